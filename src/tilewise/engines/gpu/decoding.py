"""When a call is decoding."""

from tilewise.core.problem import Problem

MAX_ROWS, MIN_KEYS = 64, 32  # packed rows at most; keys per query at least


def is_decoding(p: Problem) -> bool:
    """Few query rows over many keys: too few tiles to fill a GPU unless the keys are split."""
    n_q = p.query.shape[2]
    return n_q <= MAX_ROWS and p.tiles is None and p.heads // p.kv_heads * n_q <= MAX_ROWS and p.kv_len >= MIN_KEYS * n_q
