"""route(model): every torch SDPA call of one model is served by tilewise, until the route is removed."""

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from torch import nn

from tilewise.errors import InputError
from tilewise.frontend.dispatch import attention_backend, check_name
from tilewise.functional import intercept_sdpa

__all__ = ["Route", "route", "unroute"]


class Route:
    """A routed model. `remove()` undoes it; so does leaving a `with` block."""

    def __init__(self, model: nn.Module, backend: str | None, intercept: bool) -> None:
        enter = _Enter(_Scope(backend, intercept))
        leave = _Leave(enter)
        self._hooks: list[Any] = []
        for module in model.modules():
            if _may_attend(module):
                self._hooks.append(module.register_forward_pre_hook(enter))
                self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Undo the route."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> "Route":
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None) -> None:
        self.remove()


_routes: "weakref.WeakKeyDictionary[nn.Module, Route]" = weakref.WeakKeyDictionary()


def route(model: nn.Module, backend: str | None = None, *, intercept: bool = True) -> Route:
    """Serve the model's scaled_dot_product_attention with tilewise, wherever and whenever its modules run.

    Unlike a `with tilewise.intercept_sdpa():` block, this covers activations that are recomputed in the backward (checkpointing).
    `backend`, a name of tilewise.backends(), is used for all of the model's calls of tilewise; intercept=False does nothing else,
    for a model that calls tilewise itself. Routing a model again replaces its route.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"route takes a model (nn.Module), got {type(model).__name__}; of a pipeline, route the model in it: route(pipeline.unet)")
    if backend is not None:
        check_name(backend, "route")
    unroute(model)
    _routes[model] = made = Route(model, backend, intercept)
    return made


def unroute(model: nn.Module) -> None:
    """Undo route(model), if it is routed."""
    before = _routes.pop(model, None)
    if before is not None:
        before.remove()


def _may_attend(module: nn.Module) -> bool:
    """Of torch's own layers, only multi-head attention and the encoder layer call SDPA; any other module may."""
    return not type(module).__module__.startswith("torch.nn.modules") or isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer))


class _Step(NamedTuple):
    """A routed module whose forward is running."""

    route: "_Enter"
    module: nn.Module
    scope: "_Scope"
    opened: AbstractContextManager[Any] | None  # the context this step entered; None if it was already active


@dataclass(frozen=True)
class _Scope:
    """What is active while a routed module runs."""

    backend: str | None
    intercept: bool

    def open(self) -> AbstractContextManager[Any]:
        if self.intercept:
            return intercept_sdpa(self.backend)
        return nullcontext() if self.backend is None else attention_backend(self.backend)


class _Steps(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Step] = []


_steps = _Steps()


class _Enter:
    """A class and not a closure, so that a routed model can be copied and pickled."""

    def __init__(self, scope: _Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any) -> None:
        opened = None
        if not _steps.stack or _steps.stack[-1].scope != self.scope:
            opened = self.scope.open()
            opened.__enter__()
        _steps.stack.append(_Step(self, module, self.scope, opened))


class _Leave:
    def __init__(self, enter: _Enter) -> None:
        self.enter = enter

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leaves this step and all inside it; does nothing if another hook raised before it was entered."""
        stack = _steps.stack
        if not any(step.route is self.enter and step.module is module for step in stack):
            return
        while True:
            step = stack.pop()
            if step.opened is not None:
                step.opened.__exit__(None, None, None)
            if step.route is self.enter and step.module is module:
                return
