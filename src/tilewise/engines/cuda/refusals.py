"""Which problems that the Gluon engine serves the CUDA forward cannot serve, or should leave to it, and why."""

from tilewise.core.problem import Problem
from tilewise.engines.cuda.config import band_for
from tilewise.engines.cuda.mods import UP_TO_ONE, keeps_range
from tilewise.engines.gluon.patches import grid_width
from tilewise.engines.gpu.mods import inner_score
from tilewise.lang import Program

MOST_OPERATIONS = 64  # of a score, for every element: they are written out for each that a thread holds, and compilers take their time


def refuse_problem(p: Problem) -> str | None:
    """Why the kernel cannot serve a problem of the Gluon engine's, whatever the device."""
    if p.score is not None:
        operations = sum(["score" in uses or ("q" in uses and "kv" in uses) for uses in p.score.program.dependencies])
        if operations > MOST_OPERATIONS:
            return f"its compiler would take too long for a score of {operations} operations an element, more than {MOST_OPERATIONS}"
    if p.max_scores:
        return "it finds no row maxima, got a call that asks for them (max_scores)"
    if p.grid is not None and grid_width(p) is not None:
        return f"it takes tokens as they come, a grid of {tuple(p.grid.shape)} is read in patches"
    return None


def faster_elsewhere(p: Problem) -> str | None:
    """Why the Gluon engine should serve a problem. Measured on an H200: ALiBi with maxima in every step 591 TFLOP/s there and 569 here
    (benchmarks/results/gpu/bands.md); without them 590 there and 658 here (masks_flash.md beside it)."""
    if p.score is None or inner_score(p) is None or not is_plain_arithmetic(p.score.program):  # a scale costs nothing
        return None
    return None if keeps_range(p, band_for(p)) else "a score of plain arithmetic, as ALiBi, is computed faster by 'gluon' but under causal masks and windows"


def is_plain_arithmetic(program: Program) -> bool:
    """Whether a score reads no captured tensor by query and key, and calls no function that bounds it (softcap's tanh does)."""
    loads = [step.op == "load" and "q" in uses and "kv" in uses for step, uses in zip(program.instructions, program.dependencies, strict=True)]
    return not any(loads) and not any([step.op in UP_TO_ONE for step in program.instructions])
