"""The operations of the language, by name in OPS. Everything about one operation stands in its entry (see entry.py); adding one is adding one entry."""

from tilewise.lang.ops import activations, arithmetic, functions, logic, rounding  # noqa: F401  # each defines its group of operations
from tilewise.lang.ops.entry import OPS, Op, define, emit, infer

__all__ = ["OPS", "Op", "define", "emit", "infer"]
