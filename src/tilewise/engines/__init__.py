"""The engines: each computes the same meaning in its own way."""

from tilewise.engines.base import AGAIN, Engine, Gradients, Output
from tilewise.engines.direct import is_plain, run_directly
from tilewise.engines.operator import arguments
from tilewise.engines.registry import ENGINES, engine_named

__all__ = ["AGAIN", "ENGINES", "Engine", "Gradients", "Output", "arguments", "engine_named", "is_plain", "run_directly"]
