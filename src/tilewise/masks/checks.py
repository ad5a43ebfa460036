"""Checks of the arguments that masks are made of: what is wrong is refused with what was given."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.named import is_whole


def integers(tensor: Tensor, dims: int | tuple[int, ...], who: str) -> Tensor:
    allowed = (dims,) if isinstance(dims, int) else dims
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() not in allowed:
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"{type(tensor).__name__}; torch.tensor makes one of a list"
        raise InputError(f"{who} takes an integer tensor with {' or '.join(map(str, allowed))} dimension(s), got {given}")
    return tensor


def document_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    counts = integers(torch.as_tensor(lengths), 1, "lengths of documents")
    if not torch.compiler.is_compiling() and bool((counts < 0).any()):
        raise InputError(f"lengths of documents are not negative, got {counts.tolist()}")
    return counts


def shape_and_window(shape: int | Sequence[int], window: int | Sequence[int], who: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = axis_numbers(shape, 1, who, "shape")
    windows = axis_numbers(window, len(sizes), who, "window")
    if not 1 <= len(sizes) <= 3 or len(windows) != len(sizes) or any(not 1 <= w <= s for s, w in zip(sizes, windows, strict=True)):
        raise InputError(f"{who}: shape {sizes} needs 1 to 3 axes and a window from 1 to its size along each, got {windows}")
    return sizes, windows


def axis_numbers(given: Any, count: int, who: str, what: str) -> tuple[int, ...]:
    """Of the axes of a grid: one for each, or one for `count` of them."""
    is_one = isinstance(given, str) or not isinstance(given, Iterable) or (isinstance(given, Tensor) and given.dim() == 0)
    found = (given,) * count if is_one else tuple(given)
    if not all([is_whole(n) for n in found]):
        raise InputError(f"{who}: {what} takes whole numbers, one for each axis of the grid (or one for all), got {given!r}")
    return tuple(int(n) if isinstance(n, Tensor) else n for n in found)


def one_per_axis(given: int | Sequence[int], count: int, what: str) -> tuple[int, ...]:
    found = axis_numbers(given, count, "neighborhood", what)
    if len(found) != count:
        raise InputError(f"neighborhood: {what} is one number, or one for each of {count} axes, got {given!r}")
    return found
