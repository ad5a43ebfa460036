"""configure(model, config): the attention mechanism a config.json names, on whatever model it is for."""

import json
import logging
import weakref
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from tilewise.errors import BackendError, InputError
from tilewise.frontend.dispatch import names
from tilewise.frontend.interception import LOOKS_LIKE_ATTENTION
from tilewise.integrations import diffusers, transformers
from tilewise.integrations.routing import Route, route

__all__ = ["Configured", "configure", "mechanism_of"]

KEY = "attention_mechanism"
logger = logging.getLogger("tilewise")


class Configured:
    """A configured model. `remove()` gives it back the attention it had; so does leaving a `with` block.

    It holds the model weakly, so it does not keep the model alive.
    """

    def __init__(self, model: nn.Module, mechanism: str) -> None:
        self.mechanism = mechanism
        self._implementations: list[tuple[weakref.ref[Any], str]] = []  # models of transformers, and the implementation each used before
        self._backends: list[tuple[weakref.ref[Any], Any]] = []  # processors of diffusers, and the backend each used before
        for name, module in model.named_modules():
            if isinstance(getattr(module, "set_attn_implementation", None), MethodType) and not self._is_within(name, model):
                self._configure_transformers(module)
            processor: Any = getattr(module, "processor", None)
            if hasattr(processor, "_attention_backend"):
                self._configure_diffusers(processor)
        self._route: Route = route(model, mechanism, intercept=self._calls_sdpa(model))

    def remove(self) -> None:
        """Give the model back the attention it had."""
        self._route.remove()
        for processor, backend in self._backends:
            if (there := processor()) is not None:
                there._attention_backend = backend
        for submodel, implementation in self._implementations:
            if (there := submodel()) is not None:
                there.set_attn_implementation(implementation)
        self._backends, self._implementations = [], []

    def __enter__(self) -> "Configured":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _is_within(self, name: str, model: nn.Module) -> bool:
        """Whether a submodule belongs to a transformers model that is already configured, and got its implementation from it."""
        owners = {id(submodel()) for submodel, _ in self._implementations}
        return any(id(owner) in owners for owner in _owners(name, model))

    def _configure_transformers(self, submodel: Any) -> None:
        transformers.register()
        before = submodel.config._attn_implementation
        submodel.set_attn_implementation(transformers.NAME)
        if submodel.config._attn_implementation == transformers.NAME:
            self._implementations.append((weakref.ref(submodel), before))
        else:
            logger.warning("%s keeps its own attention; only its calls of torch's SDPA are served by tilewise", type(submodel).__name__)

    def _configure_diffusers(self, processor: Any) -> None:
        """Processor by processor: model.set_attention_backend would also change the backend of every other model."""
        diffusers.register()
        self._backends.append((weakref.ref(processor), processor._attention_backend))
        processor._attention_backend = diffusers.backend_name()

    def _calls_sdpa(self, model: nn.Module) -> bool:
        """Whether some attention layer bypasses the libraries' dispatchers, so that torch's SDPA has to be intercepted."""
        dispatched = {id(processor()) for processor, _ in self._backends}
        layers = [(name, m) for name, m in model.named_modules() if LOOKS_LIKE_ATTENTION.search(type(m).__name__) and not _holds_attention(m)]
        return not layers or any(id(getattr(m, "processor", None)) not in dispatched and not self._is_within(name, model) for name, m in layers)


def _owners(name: str, model: nn.Module) -> Iterator[nn.Module]:
    """The model and every submodule that contains the one of this name."""
    yield model
    path = name.split(".") if name else []
    for k in range(1, len(path)):
        yield model.get_submodule(".".join(path[:k]))


def _holds_attention(module: nn.Module) -> bool:
    return any(LOOKS_LIKE_ATTENTION.search(type(inner).__name__) for inner in module.modules() if inner is not module)


_configured: "weakref.WeakKeyDictionary[nn.Module, Configured]" = weakref.WeakKeyDictionary()


def configure(model: nn.Module, config: Mapping[str, Any] | str | PathLike[str]) -> Configured:
    """Run a model's attention with the mechanism that `config`, a dict or the path of a JSON file, names.

        tilewise.integrations.configure(model, {"attention_mechanism": "flex"})

    The mechanism is a backend of tilewise: auto, flex, flash, native, math, or an engine's name. A model of diffusers or
    transformers is told to use tilewise, and remaining calls of torch's SDPA are intercepted. Configuring a model again replaces
    its configuration.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"configure takes a model (nn.Module), got {type(model).__name__}; of a pipeline, configure the model in it")
    mechanism = mechanism_of(config)
    before = _configured.pop(model, None)
    if before is not None:
        before.remove()
    _configured[model] = made = Configured(model, mechanism)
    return made


def mechanism_of(config: Mapping[str, Any] | str | PathLike[str]) -> str:
    """The mechanism a configuration names, checked."""
    source = "the configuration"
    if isinstance(config, (str, PathLike)):
        source = str(config)
        config = _read(Path(config))
    if not isinstance(config, Mapping):
        raise InputError(f"{source} must be a JSON object, {{{KEY!r}: ...}}, got {type(config).__name__}")
    if KEY not in config:
        raise InputError(f"{source} does not name an {KEY!r}; allowed are {', '.join(names())}")
    asked = config[KEY]
    if not isinstance(asked, str) or asked not in names():
        hint = "; 'auto' is tilewise's own choice" if asked == "tilewise" else ""
        raise BackendError(f"unknown {KEY} {asked!r} (from {source}); allowed are {', '.join(names())}{hint}")
    return asked


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is no JSON: {error}") from error
