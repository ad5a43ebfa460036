"""Masks that are bands along the diagonal: query q sees keys q + low to q + high."""

from typing import Any

from tests.support.cases import Case, function

FAR = 10**6
BANDS = [(-FAR, 0), (-99, 0), (-40, 90), (0, FAR), (-FAR, -300), (-FAR, 400), (250, 320), (0, 0), (-128, -128), (-1000, 1000)]


def band(low: int, high: int) -> Any:
    return lambda b, h, q, kv: (kv - q >= low) & (kv - q <= high)


def band_case(dim: int, lengths: tuple[int, int], limits: tuple[int, int], **more: Any) -> Case:
    name = f"band {dim} {lengths} {limits} {sorted(more)}"
    given = {"heads": 4, "kv_heads": 2, "through": ("out", "lse"), **more}
    return Case(name, q_len=lengths[0], kv_len=lengths[1], head_dim=dim, mask=function(band(*limits)), **given)
