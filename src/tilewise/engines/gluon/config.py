"""How the Hopper kernels are cut, by head dim. Measured on an H200; docs/kernels/hopper.md tells the story."""

from functools import lru_cache

from tilewise.engines.gluon.cuts import BackwardCut, ForwardCut
from tilewise.engines.gluon.patches import width
from tilewise.problem import Problem

ROWS = 64  # query rows of a warpgroup


def padded(size: int) -> int:
    """The head dim in shared memory, where the copy engine writes zeros past the tensor's own."""
    return max(64, 1 << (size - 1).bit_length())


def forward_cut(p: Problem) -> ForwardCut:
    if "forward cut" not in p.memory:
        given = p.tiles is not None and p.tiles.given
        p.memory["forward cut"] = _forward_cut(padded(p.head_dim), padded(p.v_dim), given, width(p) is not None)
    found: ForwardCut = p.memory["forward cut"]
    return found


def _forward_cut(d: int, dv: int, given: bool, patched: bool) -> ForwardCut:
    widest = max(d, dv)
    if patched:  # smaller tiles leave out more
        return ForwardCut(d, dv, block_n=64, warpgroups=2, k_stages=4, v_stages=4, ping_pong=True, own_o_buffer=True)
    if widest == 64 and not given:
        return ForwardCut(d, dv, block_n=128, warpgroups=3, k_stages=3, v_stages=3, ping_pong=True, own_o_buffer=True)
    if widest <= 128:
        return ForwardCut(d, dv, block_n=128, warpgroups=2, k_stages=3, v_stages=2, ping_pong=True, own_o_buffer=True)
    return ForwardCut(d, dv, block_n=64, warpgroups=2, k_stages=2, v_stages=2, ping_pong=False, own_o_buffer=d != dv)


def forward_tile(cut: ForwardCut) -> tuple[int, int]:
    return ROWS * cut.warpgroups, cut.block_n


def backward_cut(p: Problem) -> BackwardCut:
    return _backward_cut(max(padded(p.head_dim), padded(p.v_dim)))


@lru_cache(maxsize=64)
def _backward_cut(d: int) -> BackwardCut:
    return BackwardCut(d, stages=2)


def backward_tile(cut: BackwardCut) -> tuple[int, int]:
    return cut.block_m, cut.block_n
