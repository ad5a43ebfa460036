"""Video models of diffusers with sparse self-attention.

Hooks do it. One on the model counts denoising steps and reads the size of the video from the call; one on its rotary embedding marks what it gives with that
call; those on its self-attention layers find the mark, and while such a layer runs, its processor's backend is tilewise's, which asks `running` what to do.
The mark is what makes activations that are computed again in the backward find the call they belong to.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.errors import InputError, UnsupportedError
from tilewise.integrations.diffusers_masks import four_dimensional
from tilewise.integrations.video_methods import METHODS, Call, Grid, Method, Run, Video

__all__ = ["Sparse"]


# -- models ------------------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """What is known of a class of models: its self-attention layers in the order they run, and the grid of tokens of a call, from its arguments."""

    layers: Callable[[Any], list[Any]]
    grid: Callable[[Any, dict[str, Any]], Grid]
    has_text: bool = False  # in the sequence of the video, after it


def _wan_grid(model: Any, call: dict[str, Any]) -> Grid:
    return _patches(call["hidden_states"], model.config.patch_size)


def _hunyuan_grid(model: Any, call: dict[str, Any]) -> Grid:
    side = model.config.patch_size
    return _patches(call["hidden_states"], (model.config.patch_size_t, side, side))


def _ltx_grid(model: Any, call: dict[str, Any]) -> Grid:
    frames, height, width = (call.get(name) for name in ("num_frames", "height", "width"))
    if frames is None or height is None or width is None:
        raise InputError(f"sparse attention of an LTX model needs num_frames, height and width in its call, got {frames}, {height} and {width}")
    return int(frames), int(height), int(width)


def _patches(latents: Tensor, patch: Iterable[int]) -> Grid:
    frames, height, width = (size // edge for size, edge in zip(latents.shape[2:], patch, strict=True))
    return frames, height, width


FAMILIES = {
    "WanTransformer3DModel": Family(lambda model: [block.attn1 for block in model.blocks], _wan_grid),
    "HunyuanVideoTransformer3DModel": Family(
        lambda model: [block.attn for block in (*model.transformer_blocks, *model.single_transformer_blocks)], _hunyuan_grid, has_text=True
    ),
    "LTXVideoTransformer3DModel": Family(lambda model: [block.attn1 for block in model.transformer_blocks], _ltx_grid),
}


def _family_of(model: Any) -> Family | None:
    return next((FAMILIES[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in FAMILIES), None)


# -- a model made sparse -----------------------------------------------------------------------------------------------


class Sparse:
    """A model with sparse attention. `undo()` gives it back the attention it had; so does leaving a `with` block."""

    def __init__(self, model: Any, backend: Callable[[], Any], method: Method, dense_layers: int | Collection[int], dense_steps: int) -> None:
        """`backend` gives tilewise's name among diffusers' backends, and is asked once nothing is wrong any more: it puts it there."""
        found = [m for m in model.modules() if _family_of(m) is not None] if isinstance(model, nn.Module) else []
        if len(found) != 1:
            of_pipeline = "" if isinstance(model, nn.Module) else "; of a pipeline, give the model in it: sparse(pipeline.transformer)"
            raise InputError(f"sparse takes a model of diffusers that is or holds one {', '.join(FAMILIES)}, got {type(model).__name__}{of_pipeline}")
        transformer: Any = found[0]
        family = _family_of(transformer)
        assert family is not None
        _check(method)
        layers = family.layers(transformer)
        foreign = {type(layer.processor).__name__ for layer in layers if not hasattr(layer.processor, "_attention_backend")}
        if foreign:
            raise InputError(f"sparse needs processors that call diffusers' attention dispatcher, got {', '.join(sorted(foreign))}")
        dense = _dense_layers(dense_layers, len(layers))
        if not _is_count(dense_steps):
            raise InputError(f"dense_steps is a number of steps, 0 or more, got {dense_steps!r}")
        name = backend()
        undo(transformer)
        calls = _Calls(method, dense_steps, family.has_text)
        self._hooks: list[Any] = [transformer.register_forward_pre_hook(calls.begin, with_kwargs=True), transformer.rope.register_forward_hook(calls.mark)]
        for number, layer in enumerate(layers):
            if number not in dense:
                running = _Layer(number, calls, name)
                self._hooks.append(layer.register_forward_pre_hook(running.enter, with_kwargs=True))
                self._hooks.append(layer.register_forward_hook(running.leave, always_call=True))
        _sparse[transformer] = self

    def undo(self) -> None:
        """Give the model back the attention it had."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> "Sparse":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


_sparse: "weakref.WeakKeyDictionary[nn.Module, Sparse]" = weakref.WeakKeyDictionary()


def undo(transformer: nn.Module) -> None:
    """Undo what made a model sparse before, if anything did."""
    before = _sparse.pop(transformer, None)
    if before is not None:
        before.undo()


def _check(method: Method) -> None:
    if method.name not in METHODS:
        raise InputError(f"unknown method {method.name!r}; allowed are {', '.join(METHODS)}")
    if not isinstance(method.keep, (int, float)) or isinstance(method.keep, bool) or not 0 < method.keep <= 1:
        raise InputError(f"keep is a share above 0 and up to 1, got {method.keep!r}")
    if len(method.cube) != 3 or not all(_is_count(edge) and edge > 0 for edge in method.cube):
        raise InputError(f"a cube has at least 1 frame, 1 row and 1 column of tokens, as (4, 4, 4), got {method.cube!r}")


def _dense_layers(given: Any, count: int) -> set[int]:
    """The numbers of layers that stay dense."""
    if _is_count(given) and given <= count:
        return set(range(given))
    if isinstance(given, Collection) and all(_is_count(layer) and layer < count for layer in given):
        return set(given)
    raise InputError(
        f"dense_layers is how many layers from the first on stay dense, up to {count}, or a collection of their numbers, from 0 to {count - 1}, got {given!r}"
    )


def _is_count(number: Any) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


# -- calls and steps ---------------------------------------------------------------------------------------------------

_marked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # what a rotary embedding gave -> the Call it was made for


class _Calls:
    """Hooks of the model and of its rotary embedding. A class and not closures, so that the model can be copied and pickled."""

    def __init__(self, method: Method, dense_steps: int, has_text: bool) -> None:
        self.method = method
        self.dense_steps = dense_steps
        self.has_text = has_text
        self.latest: Call | None = None
        self._step, self._timestep, self._run = 0, -1.0, Run()

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        family = _family_of(model)
        assert family is not None
        given = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
        if self.dense_steps or self.method.name == "spatial_temporal":  # else nobody asks, and a GPU need not be waited for
            self._count(float(given["timestep"].max()))
        self.latest = Call(family.grid(model, given), self._run, self._step < self.dense_steps)

    def _count(self, timestep: float) -> None:
        """Timesteps fall during a run. Calls with the same one, as guidance makes, are of one step; where it rises, another run begins."""
        if timestep > self._timestep or self._timestep < 0:
            self._step, self._run = 0, Run()
        elif timestep < self._timestep:
            self._step += 1
        self._timestep = timestep

    def mark(self, rope: nn.Module, args: Any, output: Any) -> None:
        _marked[output[0]] = self.latest

    def of(self, arguments: Iterable[Any]) -> Call | None:
        """The call that a layer's arguments belong to: by its mark, or the latest where a copy of what was marked came, as on another device."""
        for given in arguments:
            if isinstance(given, tuple) and given and isinstance(given[0], Tensor) and given[0] in _marked:
                call: Call = _marked[given[0]]
                return call
        return self.latest


# -- layers ------------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A sparse layer whose forward is running, and the backend of its processor before."""

    layer: "_Layer"
    call: Call
    backend: Any


class _Steps(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Step] = []


_steps = _Steps()


class _Layer:
    """Hooks of a self-attention layer."""

    def __init__(self, number: int, calls: _Calls, backend: Any) -> None:
        self.number = number
        self.calls = calls
        self.backend = backend

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.calls.of((*args, *kwargs.values()))
        if call is None or call.is_dense:
            return
        _steps.stack.append(_Step(self, call, module.processor._attention_backend))
        module.processor._attention_backend = self.backend

    def leave(self, module: Any, args: Any, output: Any) -> None:
        if _steps.stack and _steps.stack[-1].layer is self:  # else it is dense, or another hook raised before it was entered
            module.processor._attention_backend = _steps.stack.pop().backend


def running() -> _Step | None:
    """The sparse layer that runs on this thread."""
    return _steps.stack[-1] if _steps.stack else None


def attend(step: _Step, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, scale: float | None, unsupported: dict[str, Any]) -> Tensor:
    """The attention of a sparse layer, of (batch, tokens, heads, head dim) tensors. `unsupported` names what must not be asked for."""
    asked = [name for name, value in unsupported.items() if value]
    if asked:
        raise UnsupportedError(f"sparse attention of a diffusers model does not support {', '.join(asked)}")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    call, calls = step.call, step.layer.calls
    tokens = q.shape[2]
    if k.shape[2] != tokens or tokens < call.tokens or (tokens > call.tokens and not calls.has_text):
        raise InputError(f"sparse attention: a video of {' x '.join(map(str, call.grid))} has {call.tokens} tokens, the layer {tokens} and {k.shape[2]} keys")
    padding = None
    if attn_mask is not None:
        padding = call.once("padding", attn_mask, lambda: _padding(attn_mask, q, k))
    return calls.method.attend(Video(q, k, v, padding, scale, call, step.layer.number)).transpose(1, 2)


def _padding(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """(batch or 1, 1, 1, keys) booleans."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        whole = four_dimensional(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if whole.shape[1:] == (1, 1, k.shape[2]):
            return whole
    given = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedError(f"sparse attention of a diffusers model takes masks that are boolean key padding, (batch, 1, 1, keys), got {given}")
