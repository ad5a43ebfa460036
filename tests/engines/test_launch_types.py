"""What a kernel is compiled for: the types of grouped arguments, with the alignment of pointers."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewise.engines.gpu.kernel_args import AlignedStrides, Schedule, Strides
from tilewise.engines.gpu.launch import Launch, _read, flat, request_of, static_tensors
from tilewise.engines.gpu.limits import NO_TRITON

ALIGNED = torch.empty(64)
UNALIGNED = ALIGNED[1:]


class Tensors(NamedTuple):
    a: Tensor
    b: Tensor
    seed: Tensor | None
    sums: tuple[Tensor, ...]


class Args(NamedTuple):
    strides: tuple[Strides, ...]
    schedule: Schedule
    n: int
    scale: float


TENSORS = Tensors(ALIGNED, UNALIGNED, None, (ALIGNED,))
ARGS = Args((AlignedStrides((64, 32, 16, 1)), Strides((64, 32, 15, 1))), Schedule(ALIGNED, None, None, None, (0, 0)), 2**40, 0.5)


def launch(tensors: dict[str, Any], static_args: dict[str, Any]) -> Launch:
    return Launch("kernel", dict, 1, tensors, static_args, {}, 4, 1)


def test_fields_of_the_calls_tensors_are_known_to_be_aligned_and_other_tuples_are_not() -> None:
    signature = dict(request_of(launch({"tensors": TENSORS, "p": ALIGNED}, {"args": ARGS, "p_static": ALIGNED}), 90).signature)
    assert signature["tensors"] == ("*fp32!", "*fp32", "none", ("*fp32",))
    assert (signature["p"], signature["p_static"]) == ("*fp32!", "*fp32!")
    assert signature["args"] == (("aligned", ("i64",) * 4), ("*fp32", "none", "none", "none", ("i32", "i32")), "i64", "fp32")
    assert signature["tensors"].seed == signature["args"].schedule.offsets == "none"  # kernels read them by name


def test_the_key_of_a_loaded_kernel_has_the_same_facts() -> None:
    def key(value: Any, aligned: bool = True) -> list[Any]:
        types: list[Any] = []
        _read(value, types, [], aligned)
        return types

    assert key(TENSORS) != key(TENSORS._replace(b=ALIGNED)) and key(TENSORS) == key(TENSORS._replace(sums=(UNALIGNED,)))
    moved = ARGS._replace(schedule=ARGS.schedule._replace(order=UNALIGNED))
    assert key(ARGS, False) == key(moved, False) != key(ARGS._replace(n=1), False)


def test_tensors_are_flattened_in_order() -> None:
    assert [t is ALIGNED for t in flat({"tensors": TENSORS})] == [True, False, False, True]
    assert [t is ALIGNED for t in static_tensors({"args": ARGS, "mask": ((UNALIGNED,),)})] == [True, False]
    assert [t is ALIGNED for t in static_tensors({"tiles": (ALIGNED, None), "n": 5, "scale": (0.5,)})] == [True]


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
def test_the_compiler_is_told_what_is_divisible_and_what_is_constant() -> None:
    from tilewise.engines.gpu.compiler import DIVISIBLE, _describe

    attributes: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    types: list[str] = []
    request = request_of(launch({"tensors": TENSORS}, {"args": ARGS}), 90)
    described = [_describe(kind, (place,), attributes, constants, types) for place, (_, kind) in enumerate(request.signature)]
    assert attributes == {(0, 0): DIVISIBLE, **{(1, 0, 0, d): DIVISIBLE for d in range(3)}}
    assert constants == {(0, 2): None, (1, 0, 0, 3): 1, **{(1, 1, d): None for d in (1, 2, 3)}}
    assert types == ["*fp32"] * 3 + ["i64"] * 7 + ["*fp32", "i32", "i32", "i64", "fp32"]
    assert described[0].sums == ("*fp32",) and described[1].strides[0] == ("i64", "i64", "i64", "constexpr")
