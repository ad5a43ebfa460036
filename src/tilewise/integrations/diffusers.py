"""diffusers: tilewise as a backend of its attention dispatcher.

Example:

    tilewise.integrations.diffusers.register()
    with attention_backend("tilewise"): ...          # or model.set_attention_backend("tilewise")

    tilewise.integrations.diffusers.sparse(pipeline.transformer, method="top_k", keep=0.25)      # a video model
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from tilewise.errors import BackendError
from tilewise.flex import mask_for
from tilewise.frontend.dispatch import requested_backend
from tilewise.functional import attend
from tilewise.integrations import diffusers_sparse
from tilewise.integrations.diffusers_masks import four_dimensional
from tilewise.integrations.diffusers_sparse import Sparse
from tilewise.integrations.video_methods import Method

__all__ = ["Sparse", "backend_name", "register", "sparse", "unregister"]

NAME, FLEX = "tilewise", "flex"
_replaced: dict[str, tuple[Callable[..., Any], list[Any], bool]] = {}  # of each replaced name: diffusers' function, its constraints, whether it is parallel


def register(replace_flex: bool = False) -> None:
    """Add `tilewise` to the dispatcher's backends; with `replace_flex`, tilewise serves the name `flex` too.

    The engine is chosen as usual (tilewise.attention_backend, TILEWISE_BACKEND); under the name `flex` the default is tilewise's
    `flex` backend. Both names take diffusers' context parallelism. Calling it again has no effect; unregister() undoes it.
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
    for name, (function, constraints, is_parallel) in _replaced.items():
        registry.register(names(name), constraints=constraints)(function)
        if not is_parallel:
            _parallel_names(registry).discard(name)
    _replaced.clear()
    if NAME not in names._value2member_map_:
        return
    if registry._active_backend == NAME:  # set_attention_backend also sets it for the whole process
        registry.set_active_backend(names.NATIVE)
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(NAME, None)
    _parallel_names(registry).discard(NAME)
    _remove_member(names, NAME.upper(), NAME)


def sparse(
    model: Any, method: str = "top_k", keep: float = 0.25, *, dense_layers: int | Collection[int] = 0, dense_steps: int = 0, cube: Sequence[int] = (4, 4, 4)
) -> Sparse:
    """Make the self-attention of a video model sparse, for sampling or training: Wan, HunyuanVideo or LTX-Video.

        with tilewise.integrations.diffusers.sparse(pipeline.transformer, keep=0.25, dense_layers=1, dense_steps=10):
            video = pipeline(prompt)

    The size of the video is read from the model's own calls. Text in the same sequence stays dense, and its padding hidden. Everything else keeps the backend
    it has. Making a model sparse again replaces what was.

    Args:
        model: The transformer, not the pipeline; it may be inside another, as DDP wraps it.
        method: `top_k` and `top_p`: every cube of tokens attends to the cubes whose mean keys fit its mean query best. `radial`: a rule, places around the
            own in frames nearby. `spatial_temporal`: frames nearby or the same places in all frames, for each head what it looks at more in a run's first
            sparse step.
        keep: Above 0 and up to 1. Of `top_k` the share of cubes, of `top_p` of the softmax of mean queries and keys, of the others the least share of pairs.
        dense_layers: The first so many layers stay dense, or those of these numbers, in the order in which they run.
        dense_steps: The first so many denoising steps stay dense. A step is all calls with one timestep, and where timesteps rise, another run begins.
        cube: Frames, rows and columns of tokens of a cube, for `top_k` and `top_p`; 64 or 128 tokens suit every engine. Edges longer than the video are cut.
    """
    edges = tuple(cube) if isinstance(cube, Sequence) else (cube,)
    return Sparse(model, _registered_name, Method(method, keep, edges), dense_layers, dense_steps)


def _registered_name() -> Any:
    register()
    return backend_name()


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
        _replaced[name] = present, registry._constraints[member], name in _parallel_names(registry)
    registry.register(member)(function)  # no constraints: tilewise always checks its arguments itself
    _parallel_names(registry).add(name)


def _parallel_names(registry: Any) -> set[str]:
    """The names of backends that diffusers lets enable_parallelism() use; older versions have no such set."""
    names: set[str] = getattr(registry, "_supports_context_parallel", set())
    return names


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
    step = diffusers_sparse.running()
    if step is not None:
        others = {"dropout": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa, "return_lse": return_lse, "context parallelism": _parallel_config}
        return diffusers_sparse.attend(step, query, key, value, attn_mask, scale, others)
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _attend(query, key, value, attn_mask, _parallel_config, return_lse=return_lse, **options)


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
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "backend": None if asked else FLEX}
    return _attend(query, key, value, attn_mask, _parallel_config, return_lse=return_lse, **options)


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, parallel: Any, *, return_lse: bool, **options: Any) -> Any:
    """diffusers' tensors are (batch, sequence, heads, head dim), and so is the output; its lse is (batch, sequence, heads)."""
    if parallel is not None:
        from tilewise.integrations import diffusers_parallel  # needs a torch with torch.distributed

        return diffusers_parallel.attention(query, key, value, attn_mask, parallel.context_parallel_config, return_lse=return_lse, **options)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(attn_mask, Tensor):
        mask = four_dimensional(attn_mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    else:
        mask = mask_for(attn_mask, q, k)
    found = attend(q, k, v, mask, return_lse=return_lse, **options)
    return (found[0].transpose(1, 2), found[1].transpose(1, 2)) if return_lse else found.transpose(1, 2)
