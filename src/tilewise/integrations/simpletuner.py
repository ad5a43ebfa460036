"""SimpleTuner: `"attention_mechanism": "tilewise"` in its config.json, and `"flex"` served by tilewise.

Example:

    tilewise.integrations.simpletuner.register()      # before the trainer starts

`tilewise.integrations.simpletuner_train` does so for `simpletuner train`.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex

from tilewise import flex
from tilewise.errors import BackendError
from tilewise.frontend.dispatch import Served, attention_backend, observers, requested_backend
from tilewise.functional import scaled_dot_product_attention
from tilewise.integrations import diffusers

__all__ = ["register", "served", "unregister"]

NAME, FLEX = "tilewise", ("flex", "flex-attn")
ELSEWHERE = ("diffusers", "native", "xformers", "sla", "kohaku-fa", "kohaku-fa-auto")  # names that are not in its table of diffusers' backends


def register() -> None:
    """Let SimpleTuner's `attention_mechanism` be `tilewise`, and let `flex` mean tilewise. unregister() undoes it.

    Under both names the models that call torch's SDPA themselves (its Flux and SD3, every UNet) are served too, as long as the trainer keeps the mechanism
    on. What imports torch's flex_attention from now on (the sparse attention of its MiniMax-H3) is served under any name. Names that SimpleTuner's command
    line would refuse raise an error here too; its trainer alone would ignore them.
    """
    backends = _attention_module()
    controller = backends.AttentionBackendController
    if isinstance(controller.__dict__["apply"], _Apply):
        return
    diffusers.register(replace_flex=True)
    backends._DIFFUSERS_BACKEND_TARGETS[NAME] = NAME
    backends._DIFFUSERS_BACKEND_ALIASES[NAME] = backends.AttentionBackendName(NAME)
    _add_choices()
    controller.apply = _Apply(controller.__dict__["apply"], backends)
    controller.restore_default = _RestoreDefault(controller.__dict__["restore_default"])
    _replace_flex()
    _served.clear()
    observers.append(_count)


def served() -> dict[str, int]:
    """How many attention calls each engine of tilewise has served since register(); empty if training never reached tilewise."""
    return dict(_served)


_served: Counter[str] = Counter()


def _count(call: Served) -> None:
    _served[call.engine] += 1


def unregister() -> None:
    """Undoes register(), and turns the current mechanism off."""
    backends = _attention_module()
    controller = backends.AttentionBackendController
    if not isinstance(controller.__dict__["apply"], _Apply):
        return
    controller.restore_default()
    _restore_flex()
    observers.remove(_count)
    controller.apply, controller.restore_default = controller.__dict__["apply"].original, controller.__dict__["restore_default"].original
    for known in (backends._DIFFUSERS_BACKEND_TARGETS, backends._DIFFUSERS_BACKEND_ALIASES):
        known.pop(NAME, None)
    _remove_choices()
    diffusers.unregister()


def _attention_module() -> Any:
    try:
        from simpletuner.helpers.training import attention_backend
    except ImportError as error:
        raise BackendError(f"tilewise.integrations.simpletuner needs SimpleTuner with helpers/training/attention_backend.py: {error}") from error
    return attention_backend


def _choices() -> list[dict[str, str]] | None:
    """The names that SimpleTuner's command line and web page offer. Importing them needs all of SimpleTuner's dependencies; None if they are not there."""
    try:
        from simpletuner.simpletuner_sdk.server.services.field_registry.registry import field_registry
    except ImportError:
        return None
    choices: list[dict[str, str]] = field_registry.get_field("attention_mechanism").choices
    return choices


_added: list[dict[str, str]] = []


def _add_choices() -> None:
    choices = _choices()
    if choices is not None:
        offered = {choice["value"] for choice in choices}
        _added.extend({"value": name, "label": name} for name in (NAME, *FLEX) if name not in offered)
        choices.extend(_added)


def _remove_choices() -> None:
    choices = _choices()
    if choices is not None:
        for choice in _added:
            choices.remove(choice)
    _added.clear()


# -- the controller ----------------------------------------------------------------------------------------------------


class _Apply:
    """Replaces AttentionBackendController.apply(config, phase)."""

    def __init__(self, original: Any, backends: Any) -> None:
        self.original, self.backends = original, backends

    def __get__(self, _: Any, controller: Any) -> Any:
        def apply(config: Any, phase: Any) -> None:
            asked = getattr(config, "attention_mechanism", None)
            name = asked.strip().lower().replace("_", "-") if isinstance(asked, str) else ""
            if name:
                _check_name(name, asked, self.backends)
            _restore_sdpa()
            self.original.__get__(None, controller)(config, phase)
            if name in (NAME, *FLEX):
                _replace_sdpa(_sdpa if name == NAME else _flex_sdpa)

        return apply


class _RestoreDefault:
    def __init__(self, original: Any) -> None:
        self.original = original

    def __get__(self, _: Any, controller: Any) -> Any:
        def restore_default() -> None:
            _restore_sdpa()
            self.original.__get__(None, controller)()

        return restore_default


def _check_name(name: str, asked: Any, backends: Any) -> None:
    known = {*(key.replace("_", "-") for key in backends._DIFFUSERS_BACKEND_TARGETS), *getattr(backends, "_METAL_FLASH_ATTENTION_ALIASES", ()), *ELSEWHERE}
    if name not in known and not backends.AttentionBackendController._is_sageattention_backend(name):
        raise BackendError(f"unknown attention_mechanism {asked!r}; allowed are {', '.join(sorted(known))}, and the sageattention names")


# -- models that call SDPA themselves ------------------------------------------------------------------------------------
# There is no model to route yet, and a `with` block would not cover activations recomputed in the backward. So, as SimpleTuner does for
# its other mechanisms, the function itself is replaced while the mechanism is on, and restored when it is turned off.

_before: list[Any] = []


def _replace_sdpa(function: Any) -> None:
    _before.append(functional.scaled_dot_product_attention)
    functional.scaled_dot_product_attention = function


def _restore_sdpa() -> None:
    while _before:
        functional.scaled_dot_product_attention = _before.pop()


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _flex_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    if requested_backend(None)[1] != "the default":
        return _sdpa(*args, **kwargs)
    with attention_backend("flex"):
        return _sdpa(*args, **kwargs)


# -- models that call FlexAttention themselves ---------------------------------------------------------------------------
# They import it when they first need it and hand it to torch.compile. With a BlockMask, what that compiles calls tilewise as in eager mode: lists of tiles
# that a step chose go straight to a kernel, and nothing is compiled anew for another shape.

_torch_functions: list[Any] = []


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    attend = flex.flex_attention if block_mask is None else _eager_flex
    return attend(query, key, value, score_mod, block_mask, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it is not typed
def _eager_flex(*args: Any, **kwargs: Any) -> Any:
    return flex.flex_attention(*args, **kwargs)


def _replace_flex() -> None:
    _torch_functions.append(torch_flex.flex_attention)
    torch_flex.flex_attention = _flex_attention


def _restore_flex() -> None:
    while _torch_functions:
        torch_flex.flex_attention = _torch_functions.pop()
