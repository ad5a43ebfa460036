"""The torch interpreter: it defines what a program means; every other emitter is tested against it.

Indices and scores are given as tensors that broadcast against each other. What depends on q alone is computed on q's
shape alone, and so on: only what needs both q and kv is as large as the tile.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.lang.ops import OPS
from tilewise.lang.program import BoundProgram, Program, literal_value
from tilewise.lang.types import DTYPE_OF

Value = Tensor | bool | int | float


def interpret(program: Program, call: BoundProgram, inputs: Mapping[str, Tensor]) -> tuple[Value, ...]:
    """The values of the program's results. `inputs` holds b, h, q, kv and, for a score, score."""
    values: list[Any] = []
    for op, args, attr, _ in program.instructions:
        if op == "index":
            value: Any = inputs[attr]
        elif op == "score":
            value = inputs["score"]
        elif op == "int":
            value = call.ints[int(attr)]
        elif op == "float":
            value = call.floats[int(attr)]
        elif op == "literal":
            value = literal_value(attr)
        elif op == "load":
            value = load(call.captures[int(attr)], tuple(values[a] for a in args))
        elif op == "cast":
            value = torch.as_tensor(values[args[0]], dtype=DTYPE_OF[attr])
        else:
            value = OPS[op].meaning(*(values[a] for a in args))
        values.append(value)
    return tuple(values[k] for k in program.results)


def evaluate(call: BoundProgram, inputs: Mapping[str, Tensor]) -> Value:
    return interpret(call.program, call, inputs)[0]


def load(tensor: Tensor, indices: tuple[Any, ...]) -> Tensor:
    """tensor[indices] as torch reads it, negative indices included; what is still outside is clamped to the edge."""
    return tensor[wrapped(tensor, indices)] if indices else tensor


def wrapped(tensor: Tensor, indices: tuple[Any, ...]) -> tuple[Any, ...]:
    inside: list[Any] = []
    for index, size in zip(indices, tensor.shape, strict=True):
        if isinstance(index, Tensor):
            index = index.long()
            inside.append(torch.where(index < 0, index + size, index).clamp(0, size - 1))
        else:
            inside.append(min(max(index + size if index < 0 else index, 0), size - 1))
    return tuple(inside)
