"""Context parallelism: one sequence on many ranks, with any mask and any score, forward and backward (docs/distributed.md)."""

from tilewise.distributed.agree import DisagreementError
from tilewise.distributed.context import context
from tilewise.distributed.plan import MaskPlan, Plan, plan
from tilewise.distributed.run import attention
from tilewise.distributed.simulate import Simulation, simulate
from tilewise.distributed.traffic import Machine

__all__ = ["DisagreementError", "Machine", "MaskPlan", "Plan", "Simulation", "attention", "context", "plan", "simulate"]
