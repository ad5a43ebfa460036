"""diffusers: tilewise as a backend of its attention dispatcher.

Example:

    tilewise.integrations.diffusers.register()
    with attention_backend("tilewise"): ...          # or model.set_attention_backend("tilewise")
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilewise.errors import BackendError, InputError
from tilewise.flex import mask_for
from tilewise.frontend.dispatch import requested_backend
from tilewise.functional import attend

NAME, FLEX = "tilewise", "flex"
_replaced: dict[str, tuple[Callable[..., Any], list[Any]]] = {}  # diffusers' own function and constraints of each replaced name


def register(replace_flex: bool = False) -> None:
    """Add `tilewise` to the dispatcher's backends; with `replace_flex`, tilewise serves the name `flex` too.

    The engine is chosen as usual (tilewise.attention_backend, TILEWISE_BACKEND); under the name `flex` the default is tilewise's
    `flex` backend. Calling it again has no effect; unregister() undoes it.
    """
    dispatch = _dispatch_module()
    if NAME not in dispatch.AttentionBackendName._value2member_map_:
        _add_member(dispatch.AttentionBackendName, NAME.upper(), NAME)
    _serve(dispatch, NAME, _attention)
    if replace_flex:
        _serve(dispatch, FLEX, _flex_attention)


def backend_name() -> Any:
    """tilewise's member of diffusers' AttentionBackendName."""
    return _dispatch_module().AttentionBackendName(NAME)


def unregister() -> None:
    """Restores diffusers' own `flex` and removes `tilewise`. Call reset_attention_backend() on models that use it first."""
    dispatch = _dispatch_module()
    registry, names = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName
    for name, (function, constraints) in _replaced.items():
        registry.register(names(name), constraints=constraints)(function)
    _replaced.clear()
    if NAME not in names._value2member_map_:
        return
    if registry._active_backend == NAME:  # set_attention_backend also sets it for the whole process
        registry.set_active_backend(names.NATIVE)
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(NAME, None)
    _remove_member(names, NAME.upper(), NAME)


def _dispatch_module() -> Any:
    try:
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise BackendError("tilewise.integrations.diffusers needs diffusers with models/attention_dispatch.py: pip install 'diffusers>=0.35'") from error
    return attention_dispatch


def _serve(dispatch: Any, name: str, function: Callable[..., Any]) -> None:
    registry, member = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName(name)
    present = registry._backends.get(member)
    if present is function:
        return
    if present is not None:
        _replaced[name] = present, registry._constraints[member]
    registry.register(member)(function)  # no constraints: tilewise always checks its arguments itself


def _add_member(names: Any, name: str, value: str) -> None:
    """Adds a member to diffusers' Enum of backends, which offers no supported way to extend it."""
    member = str.__new__(names, value)
    member._name_, member._value_, member.__objclass__ = name, value, names
    member._sort_order_ = len(names._member_names_)
    names._member_names_.append(name)
    names._member_map_[name] = member
    names._value2member_map_[value] = member
    if hasattr(names, "_hashable_values_"):  # Python 3.13
        names._hashable_values_.append(value)
    type.__setattr__(names, name, member)


def _remove_member(names: Any, name: str, value: str) -> None:
    names._member_names_.remove(name)
    del names._member_map_[name], names._value2member_map_[value]
    if hasattr(names, "_hashable_values_"):
        names._hashable_values_.remove(value)
    type.__delattr__(names, name)


# -- the backends ------------------------------------------------------------------------------------------------------
# The dispatcher drops arguments that a backend's signature does not name, so these name all that it knows.


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    return _attend(None, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, _parallel_config)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    asked = requested_backend(None)[1] != "the default"
    return _attend(None if asked else FLEX, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, _parallel_config)


def _attend(
    backend: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    parallel: Any,
) -> Any:
    """diffusers' tensors are (batch, sequence, heads, head dim), and so is the output; its lse is (batch, sequence, heads)."""
    if parallel is not None:
        raise BackendError("the tilewise backend has no context parallelism; use diffusers' `native` backend with enable_parallelism(), or one device")
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask = _as_four_dimensional(attn_mask, q, k) if isinstance(attn_mask, Tensor) else mask_for(attn_mask, q, k)
    found = attend(q, k, v, mask, backend=backend, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, return_lse=return_lse)
    return (found[0].transpose(1, 2), found[1].transpose(1, 2)) if return_lse else found.transpose(1, 2)


def _as_four_dimensional(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """diffusers' mask tensors: (keys), (batch, keys), (queries, keys), (batch, queries, keys), or all four dimensions."""
    batch, heads, queries, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    if mask.dim() == 1:
        return mask.view(1, 1, 1, -1)
    if mask.dim() == 2:  # if both fit, it is padding, as in diffusers' native backend
        return mask[:, None, None, :] if mask.shape == (batch, keys) else mask[None, None]
    if mask.dim() == 3:
        if mask.shape[0] == batch == heads != 1:
            raise InputError(f"a 3-D mask of shape {tuple(mask.shape)} may mean (batch, queries, keys) or (heads, queries, keys) here; write all 4 dimensions")
        return mask[:, None] if mask.shape[0] == batch else mask[None]
    if mask.dim() == 4:
        return mask
    wanted = f"(keys), (batch, keys), (queries, keys), (batch, queries, keys) or 4 dimensions with batch {batch}, heads {heads}, {queries} queries, {keys} keys"
    raise InputError(f"a mask tensor must be {wanted}, got shape {tuple(mask.shape)}")
