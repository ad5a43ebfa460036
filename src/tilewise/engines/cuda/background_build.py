"""What a call will want next, built in the background while the call waits for its first kernel."""

from tilewise.core.problem import Problem
from tilewise.engines.cuda import aot
from tilewise.engines.gluon.background_build import backward as backward  # the Gluon engine's
from tilewise.engines.gluon.background_build import backward_launches
from tilewise.engines.gpu.background_build import start, wanted_gradients


def forward(p: Problem) -> None:
    wanted = wanted_gradients(p)
    start(p, lambda p: aot.forward_launches(p) + ([] if wanted is None else backward_launches(p, wanted)))
