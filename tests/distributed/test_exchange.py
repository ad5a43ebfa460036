"""What travels between row groups, for all of them in one process: what one sends is what another expects, and every needed key comes exactly once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilewise.distributed.exchange import KeyExchange, key_exchange

TILE = 4


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[Tensor], Tensor, list[KeyExchange]]:
    """Positions held by each row group, needed tiles, and the exchange of each."""
    groups, length = draw(st.integers(1, 64)), draw(st.integers(1, 150))
    tiles = -(-length // TILE)
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    if draw(st.booleans()):  # whole tiles
        owner = torch.randint(0, groups, (tiles,), generator=g).repeat_interleave(TILE)[:length]
    else:  # stretches of any length
        owner = torch.sort(torch.randint(0, groups, (length,), generator=g)).values
    held = [(owner == r).nonzero().flatten() for r in range(groups)]
    needs = torch.rand(groups, tiles, generator=g) < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    gathers = draw(st.booleans())
    hot = needs.any(0) if gathers else torch.rand(tiles, generator=g) < draw(st.sampled_from([0.0, 0.3]))
    stages = draw(st.integers(1, 2))
    return held, needs, [key_exchange(None, r, held, needs, hot, gathers, TILE, stages) for r in range(groups)]


@settings(max_examples=300, deadline=None)
@given(exchanges())
def test_every_needed_key_comes_exactly_once(drawn: tuple[list[Tensor], Tensor, list[KeyExchange]]) -> None:
    held, needs, found = drawn
    length = sum(len(h) for h in held)
    everywhere = torch.arange(length)
    for r, x in enumerate(found):
        positions, order = torch.cat([s.positions for s in x.stages]), torch.cat([s.order for s in x.stages])
        assert torch.equal(torch.sort(positions).values, everywhere[needs[r][everywhere // TILE]])  # each once
        assert all(bool((s.positions[1:] > s.positions[:-1]).all()) for s in x.stages)
        assert len(x.stages) == 1 or torch.isin(x.stages[0].positions, held[r]).all()
        pool = torch.cat([held[r], *[_sent(held, found[s], s, r) for s in range(len(held))], *[held[s][found[s].hot_index] for s in range(len(held))]])
        assert torch.equal(pool[order], positions)


@settings(max_examples=300, deadline=None)
@given(exchanges())
def test_what_one_sends_another_expects(drawn: tuple[list[Tensor], Tensor, list[KeyExchange]]) -> None:
    held, _, found = drawn
    for s, x in enumerate(found):
        assert x.sends[s] == x.receives[s] == 0 and x.own_tokens == len(held[s])
        assert [y.receives[s] for y in found] == list(x.sends)
        assert {y.hot for y in found} == {x.hot} and x.hot[s] == len(x.hot_index)
        assert {(y.moves, y.gathers) for y in found} == {(x.moves, x.gathers)}  # every rank takes part in the same collectives
        if not x.moves:
            assert not sum(x.sends)


def _sent(held: list[Tensor], sender: KeyExchange, source: int, destination: int) -> Tensor:
    """The positions that one row group sends to another."""
    return held[source][sender.send_index.split(list(sender.sends))[destination]]
