"""How a problem becomes launches: the CUDA forward with the Gluon engine's fix-up behind it, and the Gluon engine's backward."""

from tilewise.core import store
from tilewise.core.output import Output
from tilewise.core.problem import Problem
from tilewise.engines.cuda.config import band_for
from tilewise.engines.cuda.launches import fwd_launch, needs_fixup
from tilewise.engines.cuda.nvrtc import CompileError
from tilewise.engines.gluon import run as gluon_run
from tilewise.engines.gluon.run import Forward, is_aligned, serves_forward
from tilewise.engines.gluon.run import backward as backward  # of the engine's two passes, the Gluon engine's
from tilewise.engines.gpu.arguments import seed_of
from tilewise.engines.gpu.plan import FORWARD, GpuPlan
from tilewise.engines.triton import run as triton_run

KIND = "cuda"


def forward(p: Problem, plan: GpuPlan) -> Output:
    if not (serves_forward(p) if band_for(p) is None else is_aligned(p)):  # bands have no mask bits
        return triton_run.forward(p, plan)
    if KIND in plan.given_up:
        return gluon_run.forward(p, plan)
    try:
        ready = plan.prepared(FORWARD, p, KIND, lambda: Forward(p, fwd_launch, needs_fixup(p)))
    except CompileError as error:  # found, but of no use for this kernel: the Gluon engine's serves the same problems
        if plan.by_name:
            raise
        plan.given_up.add(KIND)
        store.warn_once(f"{error}; calls like this one are served by 'gluon'")
        return gluon_run.forward(p, plan)
    return ready.run(p.query, p.key, p.value, p.sinks, seed_of(p))
