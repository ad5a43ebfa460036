"""Tuning by the GPU's own clock: results stay right, and the winner is used from then on."""

import pytest
import torch

import tilewise as tw
from tests.support.cases import Case, function
from tests.support.error_rule import check

pytestmark = pytest.mark.usefixtures("untuned")

CASE = Case("window", batch=1, q_len=1000, head_dim=64, mask=function(lambda b, h, q, kv: (q >= kv) & (q - kv < 333)))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few candidates, as each is compiled."""
    from tilewise.engines.gpu import tuning

    every = tuning.candidates
    monkeypatch.setattr(tuning, "candidates", lambda *asked: every(*asked)[:3])


def test_both_passes_are_tuned_and_the_winners_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.gpu import tuning
    from tilewise.engines.triton import fitting

    times: list[float] = []
    clock = tuning.milliseconds
    monkeypatch.setattr(tuning, "milliseconds", lambda start: (times.append(clock(start)), times[-1])[1])
    with tw.autotuned():
        check(CASE, "triton", "cuda", torch.bfloat16)  # trials have left nothing in dQ's sums
    tried = len(times)
    assert tried >= 4 and all(0 < t < 100 for t in times)
    check(CASE, "triton", "cuda", torch.bfloat16)
    assert len(times) == tried
    winners = set(tuning._found.values())
    assert len(winners) == 2 and winners <= set(fitting._fitting.values())
