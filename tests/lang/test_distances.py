"""Which scores follow the distance between key and query."""

from typing import Any

import pytest
import torch

from tilewise import scores
from tilewise.lang import follows_distance, trace_score

TABLE = torch.randn(8, 129)
FOLLOWS: dict[str, Any] = {
    "ALiBi": scores.alibi(8),
    "a table": scores.relative_bias(TABLE),
    "T5's table": scores.relative_bias(torch.randn(32, 8), buckets="t5"),
    "decay": scores.distance_decay(0.1),
    "plain": lambda s, b, h, q, kv: s - 0.1 * (q - kv + 3),
    "of the query": lambda s, b, h, q, kv: s * TABLE[h, q % 64],
    "smooth along the keys": lambda s, b, h, q, kv: s + 0.1 * (q - 2 * kv),
    "clamped": lambda s, b, h, q, kv: s + (kv - q).clamp(min=-50),
}
DOES_NOT: dict[str, Any] = {
    "jumps": lambda s, b, h, q, kv: s + torch.where(q - kv < 160, -1e9, 0.0),
    "by key": lambda s, b, h, q, kv: s + TABLE[h, kv % 64],
    "by both": lambda s, b, h, q, kv: s + TABLE[q % 8, kv % 64],
    "a table of sums": lambda s, b, h, q, kv: s + TABLE[h, (q + kv) % 129],
    "a table of shares": lambda s, b, h, q, kv: s + TABLE[h, (2 * q - kv) % 129],
    "periodic": lambda s, b, h, q, kv: s + (q - kv) % 7,
    "softcap": scores.softcap(30.0),
}


@pytest.mark.parametrize("name", [*FOLLOWS, *DOES_NOT])
def test_follows_distance(name: str) -> None:
    score = {**FOLLOWS, **DOES_NOT}[name]
    assert follows_distance(trace_score((score,), torch.float32).program) == (name in FOLLOWS)
