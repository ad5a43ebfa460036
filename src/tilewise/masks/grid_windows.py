"""Where a token lies on a grid, and whether a key lies in the window of a query, axis by axis."""

from typing import Any

import torch

Axis = tuple[int, int, int, int, bool]  # of a grid: size, window, stride, dilation, is_causal; a plain tuple, so that calls can be cached


def coordinates(index: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Row-major coordinates of a flat index; the first axis is not wrapped."""
    found: list[Any] = []
    for size in sizes[:0:-1]:
        found.append(index % size)
        index = index // size
    found.append(index)
    return found[::-1]


def inside_windows(query: list[Any], key: list[Any], axes: tuple[Axis, ...]) -> Any:
    allowed: Any = None
    for i, j, axis in zip(query, key, axes, strict=True):
        here = _inside_window(i, j, axis) if axis[3] == 1 else _inside_dilated_window(i, j, axis)
        allowed = here if allowed is None else allowed & here
    return allowed


def _inside_window(i: Any, j: Any, axis: Axis) -> Any:
    size, window, stride, _, is_causal = axis
    if is_causal:
        last = i if stride == 1 else (i // stride * stride + stride - 1).clamp(max=size - 1)
        return (j > last - window) & (j <= i)
    middle = i if stride == 1 else (i // stride * stride + stride // 2).clamp(max=size - 1)
    start = (middle - window // 2).clamp(0, size - window)
    return (j >= start) & (j < start + window)


def _inside_dilated_window(i: Any, j: Any, axis: Axis) -> Any:
    """The tokens i, i + d, i - d, ... are a line of their own, of `count` tokens, in which the window is looked for."""
    size, window, stride, d, is_causal = axis
    at, other, count = i // d, j // d, (size - 1 - i % d) // d + 1
    same = i % d == j % d
    if is_causal:
        last = torch.minimum(at // stride * stride + stride - 1, count - 1)
        return same & (other > last - window) & (other <= at)
    middle = torch.minimum(at // stride * stride + stride // 2, count - 1)
    start = torch.minimum((middle - window // 2).clamp(min=0), count - window)
    return same & (other >= start) & (other < start + window)
