"""diffusers' mask tensors, which leave out dimensions."""

from torch import Tensor

from tilewise.errors import InputError


def four_dimensional(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Of (keys), (batch, keys), (queries, keys), (batch, queries, keys), or all four dimensions: (batch, heads, queries, keys), those left out of size 1."""
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
