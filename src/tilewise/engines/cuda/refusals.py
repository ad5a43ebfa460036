"""Which problems that the Gluon engine serves the CUDA forward cannot, and why."""

from tilewise.core.problem import Problem
from tilewise.engines.gluon.patches import grid_width
from tilewise.engines.gpu.mods import SMALLEST_SCALE


def refuse_problem(p: Problem) -> str | None:
    """Why the kernel cannot serve a problem of the Gluon engine's, whatever the device."""
    if p.score is not None:
        return "it has no score functions, got one"
    if p.scale < SMALLEST_SCALE:
        return f"it needs a scale of at least {SMALLEST_SCALE}, got {p.scale}"
    if p.max_scores:
        return "it finds no row maxima, got a call that asks for them (max_scores)"
    if p.dropout_p > 0:
        return f"it has no dropout, got {p.dropout_p}"
    if p.grid is not None and grid_width(p) is not None:
        return f"it takes tokens as they come, a grid of {tuple(p.grid.shape)} is read in patches"
    return None
