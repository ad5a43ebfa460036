"""Ahead-of-time builds: compiles every library a problem needs into the store, without running any."""

from tilewise.core.problem import Problem
from tilewise.engines.cpp.kernels import kernel_unit
from tilewise.engines.cpp.libraries import Unit, build_unit
from tilewise.engines.cpp.mods import dscore_unit, mask_unit, score_unit
from tilewise.engines.cpp.threads import POOL


def units(p: Problem, backward: bool, wanted: frozenset[int]) -> list[tuple[str, Unit]]:
    """The named libraries that a forward of this problem needs, and a backward with the gradients of the wanted captures."""
    found: list[tuple[str, Unit | None]] = [
        ("pool", POOL),
        ("forward", kernel_unit("forward", p.dtype, p.result_dtype)),
        ("mask", mask_unit(p)),
        ("score", score_unit(p)),
    ]
    if backward:
        found += [("backward", kernel_unit("backward", p.dtype, p.result_dtype)), ("dscore", None if p.score is None else dscore_unit(p.score, p, wanted))]
    return [(name, unit) for name, unit in found if unit is not None]


def build(name: str, unit: Unit) -> str:
    build_unit(unit)
    return f"{name} (C++)"
