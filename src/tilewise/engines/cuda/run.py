"""How a problem becomes launches: the CUDA forward with the Gluon engine's fix-up behind it, and the Gluon engine's backward."""

from torch import Tensor

from tilewise.core.output import Output
from tilewise.core.problem import Problem
from tilewise.engines.base import EmptyOutputs
from tilewise.engines.cuda.launches import fwd_launch
from tilewise.engines.gluon.launches import fwd_fixup_launch, fwd_fixup_tensors
from tilewise.engines.gluon.run import backward as backward  # of the engine's two passes, the Gluon engine's
from tilewise.engines.gluon.run import counter, serves_forward
from tilewise.engines.gpu.arguments import seed_of
from tilewise.engines.gpu.launch import prepare
from tilewise.engines.gpu.plan import FORWARD, GpuPlan
from tilewise.engines.gpu.structure import Pass
from tilewise.engines.triton import run as triton_run


def forward(p: Problem, plan: GpuPlan) -> Output:
    if not serves_forward(p):
        return triton_run.forward(p, plan)
    ready = plan.prepared(FORWARD, p, "cuda", lambda: Forward(p))
    return ready.run(p.query, p.key, p.value, p.sinks, seed_of(p))


class Forward(Pass):
    """Two launches: the forward, and its fix-up, which computes again the rows that the first found not finite."""

    def __init__(self, p: Problem) -> None:
        self._outputs = EmptyOutputs(p)
        output, _ = self._outputs(p.query)
        self._fwd = prepare(fwd_launch(p, output, counter(p.device)), p.device)
        self._fixup = prepare(fwd_fixup_launch(p, fwd_fixup_tensors(p, output)), p.device)
        self.device = self._fwd.device

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None, needs_lse: bool = True) -> Output:
        output, filled = self._outputs(query, needs_lse)
        self._fwd.launch([query, key, value, *filled, counter(query.device), sinks, seed])
        self._fixup.launch([query, key, value, *filled, sinks, seed])
        return output
