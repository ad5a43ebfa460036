"""The masks and scores that torch's FlexAttention users write, as cases for any engine and device."""

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support import upstream_mods
from tests.support.cases import LOW, Case, Draw, Masking, by_function


@lru_cache(maxsize=2)
def mods_on(device: str) -> ModuleType:
    """The mods again, with everything they capture on a device."""
    spec = importlib.util.spec_from_file_location("upstream_mods_on_a_device", upstream_mods.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with torch.device(device):
        spec.loader.exec_module(module)
    return module


def with_drawn_leaves(function: FunctionType, draw: Draw) -> Callable[..., Any]:
    """The same function over other globals: what it learns is drawn with the case, in the case's dtype."""
    learned = {name: draw.learned(*function.__globals__[name].shape) for name in function.__code__.co_names if name.startswith("L_")}
    assert learned, "the score learns nothing"
    return FunctionType(function.__code__, function.__globals__ | learned, function.__name__, function.__defaults__, function.__closure__)


def pointwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mod is a function of single indices; plain torch calls it with whole tensors of them, which torch's own vmap makes the same."""

    def mod(*args: Any) -> Any:
        if not isinstance(args[-1], Tensor):
            return function(*args)
        whole = torch.broadcast_tensors(*args)
        return torch.vmap(function)(*[t.flatten() for t in whole]).view(whole[0].shape)

    return mod


def mask_case(name: str) -> Case:
    def masking(draw: Draw) -> Masking:
        return by_function(draw, pointwise(mods_on(draw.device).MASKS[name]))

    return Case(f"upstream mask {name}", mask=masking, **SIZES)


def score_case(name: str) -> Case:
    return Case(f"upstream score {name}", score=lambda draw: [pointwise(mods_on(draw.device).SCORES[name])], **SIZES)


def learned_case(name: str) -> Case:
    return Case(f"upstream learned {name}", score=lambda draw: [pointwise(with_drawn_leaves(mods_on(draw.device).LEARNED[name], draw))], **SIZES)


SIZES: dict[str, Any] = {"batch": upstream_mods.B, "heads": upstream_mods.H, "kv_heads": 2, "q_len": upstream_mods.S, "head_dim": 64, "dtypes": LOW}
UPSTREAM_CASES = [
    *[mask_case(name) for name in upstream_mods.MASKS],
    *[score_case(name) for name in upstream_mods.SCORES],
    *[learned_case(name) for name in upstream_mods.LEARNED],
]
