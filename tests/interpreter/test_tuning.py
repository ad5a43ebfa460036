"""Tuning with a clock of our own: who is tried, who wins, where the winner is kept and who uses it."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import masks
from tilewise.core import store
from tilewise.engines.gpu import structure, tuning
from tilewise.engines.gpu.config import Config
from tilewise.engines.triton import fitting, launches
from tilewise.engines.triton.config import BWD, INTERPRETER, is_miscompiled

pytestmark = pytest.mark.usefixtures("untuned")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, ...]]:
    """Every configuration that was timed; the less keys in a tile, the quicker."""
    found: list[tuple[Config, ...]] = []

    def quickest(roles: Any, table: Any, tile: Any, time: Callable[..., float]) -> tuple[Config, ...]:
        def watched(configs: tuple[Config, ...]) -> float:
            found.append(configs)
            time(configs)
            return sum(c.n for c in configs)

        return original(roles, table, tile, watched)

    original = tuning.quickest
    monkeypatch.setattr(tuning, "quickest", quickest)
    monkeypatch.setattr(tuning, "milliseconds", lambda start: start())
    return found


def both_passes() -> list[torch.Tensor]:
    torch.manual_seed(0)
    query, key, value, bias = (torch.randn(*s, requires_grad=True) for s in ((1, 1, 20, 16), (1, 1, 20, 16), (1, 1, 20, 16), (7,)))
    out = tw.attention(query, key, value, mask=masks.causal, score=lambda s, b, h, q, kv: s + bias[(q - kv) % 7], backend="triton")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (query, key, value, bias))]


def test_nothing_is_tried_unless_asked_for(tried: list[tuple[Config, ...]]) -> None:
    both_passes()
    assert not tried and not store.entries()


def test_the_winner_is_kept_and_used_by_every_process(tried: list[tuple[Config, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = both_passes()
    with tw.autotuned():
        found = both_passes()
        count = len(tried)
        both_passes()
    assert len(tried) == count > 2 and tried[0] == (INTERPRETER,)
    assert len(store.entries()) == 2  # of the forward and of the backward
    tuned = [c.n for configs in tuning._found.values() for c in configs]
    assert sorted(tuned) == [16, 16, 32]  # in the backward one number at a time is changed
    for a, b in zip(found, wanted, strict=True):  # trials have left nothing in what is added up
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    monkeypatch.setattr(tuning, "_found", {})  # as a new process has it
    monkeypatch.setattr(fitting, "_fitting", {})
    monkeypatch.setattr(structure, "_prepared", {})
    both_passes()
    assert len(tried) == count and sorted(c.n for configs in fitting._fitting.values() for c in configs) == [16, 16, 32]


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_variable_turns_it_on(value: str) -> None:
    code = "from tilewise.engines.gpu import tuning; print(tuning.is_on())"
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, tuning.VARIABLE: value}, capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == str(value == "1")


def test_what_cannot_run_is_no_candidate() -> None:
    def time(configs: tuple[Config, ...]) -> float:
        if configs[0].n < INTERPRETER.n:
            raise RuntimeError("out of something")
        return float(configs[0].m)

    winner = tuning.quickest(("fwd",), (INTERPRETER,), None, time)
    assert winner == (INTERPRETER._replace(m=16),)
    with pytest.raises(tuning.NoCandidate, match="no configuration of fwd could run"):
        tuning.quickest(("fwd",), (INTERPRETER,), None, lambda c: 1 / 0)


def test_where_nothing_could_run_the_table_is_used_and_nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_found", {})
    with tw.autotuned():
        assert tuning.best("a kind", ("fwd",), (INTERPRETER,), None, lambda c: 1 / 0) == (INTERPRETER,)
    assert not tuning._found and not store.entries()


def test_candidates_differ_in_one_number_and_share_their_warps() -> None:
    table = (Config(32, 128, 8, 3), Config(128, 64, 8, 3))
    found = tuning.candidates(BWD, table, None)
    assert found[0] == table and len(found) == len(set(found)) == 14
    assert all(keys.warps == queries.warps for keys, queries in found)
    assert all(c.m in (16, 32) and c.n in (16, 32, 64) for configs in tuning.candidates(("fwd",), (Config(32, 64, 4, 2),), (32, 64)) for c in configs)


def test_what_is_known_to_be_compiled_wrongly_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[Config, ...]] = []
    monkeypatch.setattr(fitting, "is_miscompiled", lambda kernel, config, multiplied: is_miscompiled(kernel, config, "bf16x6"))
    monkeypatch.setattr(tuning, "milliseconds", lambda start: start() or 1.0)
    original = launches.bwd_launch
    monkeypatch.setattr(launches, "bwd_launch", lambda p, own, wanted, *configs: timed.append(configs) or original(p, own, wanted, *configs))
    with tw.autotuned():
        both_passes()
    assert any(keys.m == 64 for keys, _ in timed) and any(queries.n == 64 for _, queries in timed)
    assert all(keys.n < 64 and queries.m < 64 for keys, queries in timed)
