"""The Hopper kernels' table of named barriers: no two uses of one kernel share a barrier, and none is Triton's."""

from itertools import product

import pytest

from tilewise.engines.gluon.config import BackwardConfig, ForwardConfig, _backward_config, _forward_config
from tilewise.engines.gluon.named_barriers import COUNT, OURS, used_by_backward, used_by_forward

DIMS = (64, 128, 256)

# grid_width admits patches only up to head dim 128, and only without given tiles
FORWARD = {_forward_config(d, dv, given, False) for d, dv, given in product(DIMS, DIMS, (False, True))} | {
    _forward_config(d, dv, False, True) for d, dv in product(DIMS[:2], DIMS[:2])
}
BACKWARD = {_backward_config(d) for d in DIMS}


def assert_distinct_and_ours(barriers: list[int]) -> None:
    assert len(set(barriers)) == len(barriers)
    assert min(barriers) >= OURS and max(barriers) < COUNT


@pytest.mark.parametrize("config", sorted(FORWARD, key=repr), ids=repr)
def test_forward(config: ForwardConfig) -> None:
    barriers = used_by_forward(config.warpgroups, config.k_stages, config.v_stages)
    assert config.q_free in barriers
    assert_distinct_and_ours(barriers)


@pytest.mark.parametrize("config", sorted(BACKWARD, key=repr), ids=repr)
def test_backward(config: BackwardConfig) -> None:
    assert_distinct_and_ours(used_by_backward(config.is_wide, config.stages))
