"""configure(model, config): the attention mechanism a config.json names, on whatever model it is for."""

import json
import logging
import weakref
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from tilewise.dispatch import names
from tilewise.errors import BackendError, InputError
from tilewise.integrations import diffusers, transformers
from tilewise.integrations.routing import Route, route
from tilewise.watching import LOOKS_LIKE_ATTENTION, comes_from

KEY = "attention_mechanism"
logger = logging.getLogger("tilewise")


class Configured:
    """A configured model. `remove()` gives it back the attention it had; so does leaving a `with` block."""

    def __init__(self, model: nn.Module, mechanism: str) -> None:
        self.model, self.mechanism = model, mechanism
        self._implementation: str | None = None  # what a transformers model used before
        self._backends: list[tuple[Any, Any]] = []  # processors of diffusers, and the backend each used before
        if comes_from(model, "transformers") and hasattr(model, "set_attn_implementation"):
            self._configure_transformers(model)
        elif comes_from(model, "diffusers"):
            self._configure_diffusers(model)
        self._route: Route = route(model, mechanism, intercept=self._calls_sdpa())

    def remove(self) -> None:
        self._route.remove()
        for processor, before in self._backends:
            processor._attention_backend = before
        if self._implementation is not None:
            self.model.set_attn_implementation(self._implementation)  # type: ignore[operator]
        self._backends, self._implementation = [], None

    def __enter__(self) -> "Configured":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _configure_transformers(self, model: Any) -> None:
        transformers.register()
        before = model.config._attn_implementation
        model.set_attn_implementation(transformers.NAME)
        if model.config._attn_implementation == transformers.NAME:
            self._implementation = before
        else:
            logger.warning("%s keeps its own attention; only its calls of torch's SDPA are served by tilewise", type(model).__name__)

    def _configure_diffusers(self, model: nn.Module) -> None:
        """Processor by processor: model.set_attention_backend would also change the backend of every other model."""
        diffusers.register()
        for module in model.modules():
            processor: Any = getattr(module, "processor", None)
            if hasattr(processor, "_attention_backend"):
                self._backends.append((processor, processor._attention_backend))
                processor._attention_backend = diffusers.backend_name()

    def _calls_sdpa(self) -> bool:
        """Whether some attention layer does not hand its calls to a dispatcher, so that torch's SDPA has to be intercepted."""
        if self._implementation is not None:
            return False
        handed = {id(processor) for processor, _ in self._backends}
        layers = [m for m in self.model.modules() if LOOKS_LIKE_ATTENTION.search(type(m).__name__) and not _holds_attention(m)]
        return not layers or any(id(getattr(layer, "processor", None)) not in handed for layer in layers)


def _holds_attention(module: nn.Module) -> bool:
    return any(LOOKS_LIKE_ATTENTION.search(type(inner).__name__) for inner in module.modules() if inner is not module)


_configured: "weakref.WeakKeyDictionary[nn.Module, Configured]" = weakref.WeakKeyDictionary()


def configure(model: nn.Module, config: Mapping[str, Any] | str | PathLike[str]) -> Configured:
    """Run a model's attention with the mechanism that `config`, a dict or the path of a JSON file, names.

        tilewise.integrations.configure(model, {"attention_mechanism": "flex"})

    The mechanism is a backend of tilewise: auto, flex, flash, native, math, or an engine's name. A model of diffusers or
    transformers is told to use tilewise, and calls of torch's SDPA are served wherever they are left. A model that is
    configured already is configured anew.
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
        raise BackendError(f"unknown {KEY} {asked!r} (from {source}); allowed are {', '.join(names())}")
    return asked


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is no JSON: {error}") from error


