"""Masks: who may attend to whom.

A mask is a function f(b, h, q, kv) that is true where query q may attend to key kv. The masks here carry a name and
combine with `&`, `|` and `~`, with each other and with plain functions:

    masks.causal & masks.sliding_window(1024)
    masks.document(ids) & (lambda b, h, q, kv: q >= kv)
"""

from types import FunctionType

from tilewise.masks.batches import padding, per_batch
from tilewise.masks.documents import _after_prefix, document, ids_of_lengths, shared_prefix
from tilewise.masks.generation import block_diffusion, tree
from tilewise.masks.grids import neighborhood, on_grid, sliding_tile
from tilewise.masks.mask import Grid, Mask, MaskFunction, as_mask
from tilewise.masks.sequence import causal, causal_lower_right, dilated_window, full, global_tokens, prefix_lm, sliding_window
from tilewise.masks.vision import cross, radial, spatial_temporal

__all__ = [
    "Grid",
    "Mask",
    "MaskFunction",
    "as_mask",
    "block_diffusion",
    "causal",
    "causal_lower_right",
    "cross",
    "dilated_window",
    "document",
    "full",
    "global_tokens",
    "ids_of_lengths",
    "neighborhood",
    "on_grid",
    "padding",
    "per_batch",
    "prefix_lm",
    "radial",
    "shared_prefix",
    "sliding_tile",
    "sliding_window",
    "spatial_temporal",
    "tree",
]

# Pickles and error messages know a mask by tilewise.masks and its name, whatever file it is in.
for _made in (*[globals()[name] for name in __all__], _after_prefix):
    if type(_made) in (type, FunctionType):  # full and causal are known by their class
        _made.__module__ = __name__
