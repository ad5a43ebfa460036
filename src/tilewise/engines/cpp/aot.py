"""Building ahead: every library a problem needs, compiled into the store without running anything."""

from tilewise.core.problem import Problem
from tilewise.engines.cpp.libraries import Unit, parts_of
from tilewise.engines.cpp.mods import mask_unit, score_unit, slope_unit
from tilewise.engines.cpp.run import kernel_unit
from tilewise.engines.cpp.threads import POOL


def units(p: Problem, backward: bool, wanted: frozenset[int]) -> list[tuple[str, Unit]]:
    """What a forward of this problem needs, and a backward with the gradients of the wanted captures; each with its name."""
    found: list[tuple[str, Unit | None]] = [("pool", POOL), ("forward", kernel_unit("forward", p.dtype)), ("mask", mask_unit(p)), ("score", score_unit(p))]
    if backward:
        found += [("backward", kernel_unit("backward", p.dtype)), ("slope", slope_unit(p, wanted))]
    return [(name, unit) for name, unit in found if unit is not None]


def build(name: str, unit: Unit) -> str:
    parts_of(unit)
    return f"{name} (C++)"
