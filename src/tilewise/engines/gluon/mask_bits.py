"""The launch that evaluates a mask inside partial tiles, into bits."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.gluon.kernel_args import MaskBitsConstants, MaskBitsGeometry
from tilewise.engines.gpu.device_map import CHUNK, captures_of, mask_numbers
from tilewise.engines.gpu.launch import AnyTensor, Launch
from tilewise.engines.gpu.mods import mask_of
from tilewise.engines.gpu.tile_schedule import TileSchedule

ROWS_PER_PROGRAM = 32


def kernels() -> Mapping[str, Any]:
    """Imports Triton, so only when a kernel has to be compiled."""
    from tilewise.engines.gluon.kernel_table import KERNELS

    return KERNELS


def pack_mask_bits_launch(
    p: Problem, shape: tuple[int, int], by_keys: bool, transposed: bool, bits: Tensor, tiles: TileSchedule, first: AnyTensor, visited: AnyTensor | None
) -> Launch:
    """`shape`: rows and columns of a tile's bits; `first`: the number of each row's first block of bits; `visited`: how many tiles each row has, if it has yet
    to be ordered by that."""
    rows, columns = shape
    blocks = rows // ROWS_PER_PROGRAM
    return Launch(
        "pack_mask_bits",
        kernels,
        len(first) * blocks,
        {"p_bits": bits, "tables": (*tiles.tensors[1:], first), "order": () if visited is None else (tiles.tensors[0], visited), "captures": captures_of(p)},
        {"geometry": MaskBitsGeometry(tiles.count, p.heads if tiles.strides[1] > 0 else 1, blocks, rows, p.q_len, p.kv_len), **mask_numbers(p)},
        {"MASK": mask_of(p), "C": MaskBitsConstants(by_keys, transposed, visited is not None, CHUNK, ROWS_PER_PROGRAM, columns)},
        4,
        1,
    )
