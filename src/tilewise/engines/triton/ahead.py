"""Building ahead: every kernel a problem needs, compiled into the store without running anything."""

from collections.abc import Callable
from typing import Any

import torch

from tilewise.engines.base import like_query
from tilewise.engines.triton import fixed_point, run, shared_memory
from tilewise.engines.triton.config import BACKWARD, Config, all_smaller, choose
from tilewise.engines.triton.launch import Launch, parts_of, request_of
from tilewise.engines.triton.looking import BLOCK, classify_launch
from tilewise.problem import Problem
from tilewise.tiles import Geometry


def forward_launches(p: Problem) -> list[Callable[[], list[Launch]]]:
    """What a forward of this problem starts: each entry gives its launches from the best configuration down."""
    rows = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    out = {"p_out": like_query(p.query, p.v_dim), "p_lse": rows, "p_highest": rows, "p_sinks": p.sinks}
    given = {"p_q": p.query, "p_k": p.key, "p_v": p.value}
    seed = {"p_seed": run.seed_of(p)}
    if run.is_decoding(p):
        splits, shares = run.split_count(p), {"p_acc": rows, "p_m": rows, "p_l": rows}
        return [
            _ladder(p, run.DECODE, lambda c: run.split_launch(p, given | shares | seed, splits, *c)),
            lambda: [run.combine_launch(p, shares | out, splits)],
        ]
    return [_ladder(p, (kind,), lambda c: run.forward_launch(p, given | out | seed, *c)) for kind in run.forward_kinds(p)] + map_launches(p)


def map_launches(p: Problem) -> list[Callable[[], list[Launch]]]:
    """What makes the problem's tile map, the backward's too."""
    if p.mask is None or (p.tiles is not None and p.tiles.given):
        return []
    own = {"p_states": torch.empty(1, dtype=torch.int8, device=p.device), "p_tiles": torch.empty(1, dtype=torch.int64, device=p.device)}
    return [lambda: [classify_launch(p, Geometry(p.batch, p.heads, p.q_len, p.kv_len, BLOCK), own)]]


def backward_launches(p: Problem, wanted: frozenset[int]) -> list[Callable[[], list[Launch]]]:
    out = like_query(p.query, p.v_dim)
    rows = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    own: dict[str, Any] = {
        "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_do": out, "p_lse": rows, "p_delta": rows, "p_parts": run.shift_parts(p),
        **{name: t.new_empty(t.shape) for name, t in (("p_dq", p.query), ("p_dk", p.key), ("p_dv", p.value))}, "p_seed": run.seed_of(p),
    }  # fmt: skip

    def deltas() -> list[Launch]:
        return [run.deltas_launch(p, {"p_out": out, "p_do": out, "p_lse": rows, "p_dlse": None, "p_delta": rows, "p_parts": run.shift_parts(p)})]

    if run.adds(p, wanted):
        return [
            deltas,
            _ladder(p, run.ADDED, lambda c: run.added_launch(p, own | {"score_g": (), "sum_g": (rows,)}, *c)),
            lambda: [run.bring_launch(p, run.bring_own(own, rows))],
        ]
    if p.score is None or not wanted:
        return [deltas, _ladder(p, BACKWARD, lambda c: run.gradients_launch(p, own | {"score_g": (), "sum_g": ()}, wanted, *c))]
    if not p.deterministic:
        shares = fixed_point.zeros(p, wanted, run.wide(p))
        return [deltas, _ladder(p, BACKWARD, lambda c: run.gradients_launch(p, own | {"score_g": shares, "sum_g": ()}, wanted, *c))]
    gauged = fixed_point.gauges(p, wanted)
    totals = fixed_point.Totals(fixed_point.zeros(p, wanted, torch.int64), gauged.limits.double())  # arithmetic without data makes torch import for seconds
    return [
        deltas,
        _ladder(p, BACKWARD, lambda c: run.gauge_launch(p, own | {"score_g": gauged.arguments, "sum_g": ()}, wanted, *c)),
        _ladder(p, BACKWARD, lambda c: run.gradients_launch(p, own | {"score_g": totals.arguments, "sum_g": ()}, wanted, *c)),
    ]


def _ladder(p: Problem, parts: tuple[str, ...], make: Callable[[tuple[Config, ...]], Launch]) -> Callable[[], list[Launch]]:
    def launches() -> list[Launch]:
        found: list[Launch] = []
        configs: tuple[Config, ...] | None = tuple([choose(part, p) for part in parts])
        while configs is not None:
            found.append(make(configs))
            configs = all_smaller(configs)
        return found

    return launches


def build(launches: list[Launch], arch: int) -> str:
    """Compile the first launch whose kernel fits the architecture's shared memory; its name and size."""
    import json

    limit = shared_memory(arch)
    for launch in launches:
        facts = json.loads(parts_of(request_of(launch, arch))["facts"])
        if facts["shared"] <= limit:
            return f"{launch.kernel} ({facts['shared'] // 1024} KiB shared)"
    raise RuntimeError(f"no configuration of the {launches[0].kernel} kernel fits sm_{arch}")
