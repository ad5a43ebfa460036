"""The engines: each computes the same meaning in its own way."""

from tilewise.core.output import Gradients, Output
from tilewise.engines.autograd import run_eager, train
from tilewise.engines.base import Engine, Request, is_plain
from tilewise.engines.registry import ENGINES, engine_named
from tilewise.engines.torch_op import arguments
from tilewise.engines.transforms import are_active, are_active_while_compiling, transformed

__all__ = [
    "ENGINES",
    "Engine",
    "Gradients",
    "Output",
    "Request",
    "are_active",
    "are_active_while_compiling",
    "arguments",
    "engine_named",
    "is_plain",
    "run_eager",
    "train",
    "transformed",
]
