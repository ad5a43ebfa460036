"""How a problem becomes kernel launches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.engines.base import AGAIN, Again, Gradients, Output, like_query, like_rows
from tilewise.engines.dropout import keep_scale, threshold
from tilewise.engines.triton import FARTHEST, fixed_point, interpreted, reach, tuning
from tilewise.engines.triton.config import BACKWARD, LOG2E, SHIFT_PARTS, SPARSE, WIDEST_ADDED, Config, all_smaller, choose, is_miscompiled, padded, precision
from tilewise.engines.triton.launch import Aligned, Interpreted, Launch, OutOfSharedMemory, Prepared, Strides, architecture, prepare, sources_digest
from tilewise.engines.triton.looking import kernel_map
from tilewise.engines.triton.mods import gain_of, gauge_of, mask_of, mod_arguments, scales, scatter_of, score_of, slope_of
from tilewise.engines.triton.parts import each, padded_rows, partition, sums_rows
from tilewise.engines.triton.walks import column_tiles, row_tiles
from tilewise.problem import Problem

DECODE_ROWS, DECODE_KEYS = 64, 32  # decoding: at most so many packed rows, at least so many keys per query
PROGRAMS_PER_PROCESSOR, LEAST_SPLITS, TILES_PER_SPLIT, MOST_SPLITS, FEW_PROCESSORS = 2, 2, 4, 128, 4


def forward(p: Problem) -> Output:
    out = like_query(p.query, p.v_dim)
    lse = torch.empty(p.query.shape[:3], dtype=torch.float32, device=p.query.device)
    highest = torch.empty_like(lse)
    if p.query.numel() == 0 or p.key.numel() == 0:
        return _nothing_to_attend(p, out, lse, highest)
    if is_decoding(p):
        _decode(p, out, lse, highest)
    else:
        own = {
            "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_out": out, "p_lse": lse, "p_highest": highest, "p_sinks": p.sinks, "p_seed": seed_of(p),
        }  # fmt: skip
        ready = prepared(p, ("forward",), True, lambda: fitted(p, (forward_kind(p),), lambda c: forward_launch(p, own, *c)))
        ready.start(own)
        if wants_again(p):
            p.memory[AGAIN] = _again(p, ready)
    return Output(out, lse, highest)


def wants_again(p: Problem) -> bool:
    """Whether calls like this one will come, differ in query, key and value alone, and nothing has to be looked up again for them."""
    unknown = AGAIN in p.memory and p.memory[AGAIN] is None
    return unknown and p.sinks is None and p.dropout_p == 0 and p.grid is None and (p.mask is None or not p.mask.captures)


def _again(p: Problem, ready: Prepared | Interpreted) -> Again | None:
    if not isinstance(ready, Prepared):
        return None
    v_dim, state, rows = p.v_dim, tuning.state(), like_rows(p.query)

    def again(query: Tensor, key: Tensor, value: Tensor) -> Output | None:
        if torch.cuda.current_device() != ready.device or tuning.state() != state:
            return None
        out = like_query(query, v_dim)
        lse, highest = torch.empty_like(rows), torch.empty_like(rows)
        ready.start_with([], [query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), lse.data_ptr(), highest.data_ptr()])
        return Output(out, lse, highest)

    return again


def _decode(p: Problem, out: Tensor, lse: Tensor, highest: Tensor) -> None:
    splits = p.memory.get("splits")
    if splits is None:
        splits = p.memory["splits"] = split_count(p)
    shape = (p.batch * p.kv_heads, splits, p.heads // p.kv_heads * p.q_len)
    acc = torch.empty((*shape, p.v_dim), dtype=torch.float32, device=p.device)
    highest_of, sum_of = acc.new_empty((2, *shape)).unbind()  # of each split
    own = {"p_q": p.query, "p_k": p.key, "p_v": p.value, "p_acc": acc, "p_m": highest_of, "p_l": sum_of, "p_seed": seed_of(p)}
    prepared(p, ("split",), False, lambda: fitted(p, DECODE, lambda c: split_launch(p, own, splits, *c))).start(own)
    own = {"p_acc": acc, "p_m": highest_of, "p_l": sum_of, "p_out": out, "p_lse": lse, "p_highest": highest, "p_sinks": p.sinks}
    prepared(p, ("combine",), False, lambda: prepare(combine_launch(p, own, splits), p.device)).start(own)


def wide(p: Problem) -> torch.dtype:
    """What shares of the captures' gradients are added up in: more digits than they have."""
    return torch.float64 if p.dtype == torch.float32 else torch.float32


def shift_parts(p: Problem) -> Tensor | None:
    """-lse and -delta of each query as 16-bit parts; 32-bit products need none."""
    return None if p.dtype == torch.float32 else p.query.new_empty((p.batch * p.heads * p.q_len, 2, SHIFT_PARTS))


def backward(p: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    if p.score is not None and not all([p.score.captures[k].is_contiguous() for k in wanted]):  # their gradients are added up as if they were
        captures = tuple([t.contiguous() if k in wanted else t for k, t in enumerate(p.score.captures)])
        p = replace(p, score=replace(p.score, captures=captures), memory={})
    if reach(grad_out) >= FARTHEST:
        grad_out = grad_out.contiguous()
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (p.query, p.key, p.value))
    delta = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    if p.query.numel() and p.key.numel():
        dlse = None if grad_lse is None else grad_lse.float().contiguous()
        axis, count = partition(p, padded(p.head_dim)) if adds(p, wanted) else (0, 1)
        captured: dict[int, Tensor] = {}
        for part, tensors in each(p, axis, count, output.out, grad_out, output.lse, dlse, delta, dq, dk, dv):
            captured = _backward(part, wanted, *tensors)
    else:
        captured = {k: torch.zeros_like(p.score.captures[k]) for k in wanted} if p.score is not None else {}
        delta = delta.zero_() if grad_lse is None else -grad_lse
        for t in (dq, dk, dv):
            t.zero_()
    return Gradients(dq, dk, dv, sinks_gradient(p, output, delta), captured)


def _backward(
    p: Problem, wanted: frozenset[int], out: Tensor, grad_out: Tensor, lse: Tensor, dlse: Tensor | None, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> dict[int, Tensor]:
    # Saved tensors may come back elsewhere and otherwise laid out than they went (offloading does that).
    places = tuple([(t.stride(), t.data_ptr() % 16) for t in (p.query, p.key, p.value, out, lse, grad_out)])
    parts = shift_parts(p)
    own = {"p_out": out, "p_do": grad_out, "p_lse": lse, "p_dlse": dlse, "p_delta": delta, "p_parts": parts}
    prepared(p, ("deltas", places, dlse is None), False, lambda: prepare(deltas_launch(p, own), p.device)).start(own)
    given = {
        "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_do": grad_out, "p_lse": lse, "p_delta": delta, "p_parts": parts,
        "p_dq": dq, "p_dk": dk, "p_dv": dv, "p_seed": seed_of(p),
    }  # fmt: skip
    return _gradients(p, given, wanted, places)


def sinks_gradient(p: Problem, output: Output, delta: Tensor) -> Tensor | None:
    if p.sinks is None:
        return None
    weight = torch.where(output.lse == -torch.inf, 0.0, torch.exp(p.sinks.float().view(1, -1, 1) - output.lse))
    return -(weight * delta).sum((0, 2)).to(p.sinks.dtype)


def adds(p: Problem, wanted: frozenset[int]) -> bool:
    """Whether the programs that make dK and dV add up dQ too, in any order: five products a tile instead of seven. In 32 bits, and with wider heads, there
    are no registers for it."""
    return p.dtype != torch.float32 and max(p.head_dim, p.v_dim) <= WIDEST_ADDED and not p.deterministic and not wanted


def _gradients(p: Problem, own: dict[str, Any], wanted: frozenset[int], places: Any) -> dict[int, Tensor]:
    """dQ, dK and dV into their tensors; the gradients of the wanted captures by slot."""
    if adds(p, wanted):
        _added_gradients(p, own, places)
        return {}

    def start(kernel: str, shares: tuple[Tensor, ...], launch: Callable[..., Launch]) -> None:
        given = own | {"score_g": shares, "sum_g": ()}
        prepared(p, (kernel, places, wanted), True, lambda: fitted(p, BACKWARD, lambda c: launch(p, given, wanted, *c))).start(given)

    if p.score is None or not wanted:
        start("gradients", (), gradients_launch)
        return {}
    if not p.deterministic:
        shares = fixed_point.zeros(p, wanted, wide(p))
        start("gradients", shares, gradients_launch)
        return {k: _as_gradient(p, k, shares[k]) for k in wanted}
    gauged = fixed_point.gauges(p, wanted)
    start("gauge", gauged.arguments, gauge_launch)
    found = fixed_point.totals(p, wanted, gauged.limits)
    start("gradients", found.arguments, gradients_launch)
    return {k: _as_gradient(p, k, fixed_point.gradient(k, found, gauged)) for k in wanted}


def _added_gradients(p: Problem, own: dict[str, Any], places: Any) -> None:
    sums = torch.zeros((sums_rows(p), padded(p.head_dim)), dtype=torch.float32, device=p.device)
    given = own | {"score_g": (), "sum_g": (sums,)}
    prepared(p, ("added", places), True, lambda: fitted(p, ADDED, lambda c: added_launch(p, given, *c))).start(given)
    after = bring_own(own, sums)
    prepared(p, ("bring", places), True, lambda: prepare(bring_launch(p, after), p.device)).start(after)


def bring_own(own: dict[str, Any], sums: Tensor) -> dict[str, Any]:
    return {name: own[name] for name in ("p_q", "p_k", "p_v", "p_do", "p_lse", "p_delta", "p_dq")} | {"p_sum": sums, "p_seed": own["p_seed"]}


def _as_gradient(p: Problem, slot: int, shares: Tensor) -> Tensor:
    """Of a capture, from the sum of its shares."""
    assert p.score is not None
    gain = gain_of(p)
    return (shares if gain == 1.0 else shares * gain).to(p.score.captures[slot].dtype)


# -- kernels made ready ----------------------------------------------------------------------------------------------

DECODE = ("decode",)
ADDED = ("added",)  # the key programs of a backward, where they add up dQ
_fitting: dict[Any, tuple[Config, ...]] = {}


def prepared(p: Problem, name: tuple[Any, ...], mapped: bool, make: Callable[[], Prepared | Interpreted]) -> Prepared | Interpreted:
    """A kernel made ready for calls like this one; again when a tensor that a tile map was made from has changed, or tuning went on."""
    contents = versions(p) if mapped else ()
    state = contents, tuning.state()
    found = p.memory.get(name)
    if found is None or found[1] != state or contents is None:
        found = p.memory[name] = (make(), state)
        if AGAIN in p.memory:
            p.memory[AGAIN] = None  # it may start what was ready before
    return found[0]


def versions(p: Problem) -> tuple[int, ...] | None:
    """Of the tensors the mask loads from; None if their changes leave no trace."""
    if p.mask is None or not p.mask.captures:
        return ()
    return None if any([t.is_inference() for t in p.mask.captures]) else tuple([t._version for t in p.mask.captures])


def fitted(p: Problem, parts: tuple[str, ...], make: Callable[[tuple[Config, ...]], Launch]) -> Prepared | Interpreted:
    """The kernel in the best configuration whose shared memory the GPU has; what did not fit is not tried again."""
    score = "" if p.score is None else p.score.program.text
    tile = p.tiles.tile if p.tiles is not None and p.tiles.given else None  # others are cut as the kernels like
    key = (parts, p.head_dim, p.v_dim, p.dtype, precision(p.dtype), p.mask is None, score, tile, p.device)
    configs = _fitting.get(key)
    if configs is None or tuning.is_on():
        configs = _tuned(p, parts, make)
    while configs is not None:
        try:
            ready = prepare(make(configs), p.device)
        except OutOfSharedMemory:
            configs = all_smaller(configs)
            continue
        _fitting[key] = configs
        return ready
    raise RuntimeError(f"no configuration of the {' and '.join(parts)} kernel fits this GPU for {p.describe()}")


def _tuned(p: Problem, parts: tuple[str, ...], make: Callable[[tuple[Config, ...]], Launch]) -> tuple[Config, ...]:
    """The configurations of kernels like this one: those found by trying, now or earlier, else the table's."""
    tile = p.tiles.tile if p.tiles is not None and p.tiles.given else None
    arch = architecture(p.device) if p.device.type == "cuda" else p.device.type
    inputs = f"{p.head_dim} {p.v_dim} {p.dtype} {precision(p.dtype)}"
    kind = f"{parts} {inputs} masked {p.mask is not None} scored {p.score is not None} tiles {tile} {arch} {sources_digest()}"

    def milliseconds(configs: tuple[Config, ...]) -> float:
        if any([is_miscompiled(part, config, precision(p.dtype)) for part, config in zip(parts, configs, strict=True)]):
            raise RuntimeError("the compiler makes wrong code of it")
        launch = make(configs)
        own = {name: tuple([t.clone() for t in v]) if type(v) is tuple else v for name, v in launch.own.items()}  # sums, which trials would add to
        ready = prepare(launch, p.device)
        return tuning.milliseconds(lambda: ready.start(own))

    return tuning.best(kind, parts, tuple([choose(part, p) for part in parts]), tile, milliseconds)


def forward_kind(p: Problem) -> str:
    """Which table of configurations a forward takes, by how much of its map is computed."""
    kinds = forward_kinds(p)
    if len(kinds) == 1 or p.device.type == "meta":
        return kinds[0]
    small = choose("sparse", p)
    tile_map = kernel_map(p, (small.m, small.n))
    assert tile_map is not None
    computed: float = tile_map.remember("computed", lambda: 1.0 - tile_map.sparsity)
    return "sparse" if computed < SPARSE else "forward"


def forward_kinds(p: Problem) -> tuple[str, ...]:
    """Those that may be taken."""
    mapped = p.mask is not None and (p.tiles is None or not p.tiles.given)
    return ("forward", "sparse") if mapped and choose("sparse", p) != choose("forward", p) else ("forward",)


# -- launches --------------------------------------------------------------------------------------------------------


def forward_launch(p: Problem, own: dict[str, Any], config: Config) -> Launch:
    tiles = row_tiles(p, config)
    return Launch(
        "forward",
        p.batch * p.heads * tiles.count,
        own,
        {
            "s_q": strides(p.query), "s_k": strides(p.key), "s_v": strides(p.value), "s_out": strides(own["p_out"]),
            "tiles": tiles.tensors, "s_tiles": tiles.strides, **shape_arguments(p), "n_tiles": tiles.count, "scale": scales(p),
            **dropout_arguments(p), **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "MAPPED": tiles.mapped, "GIVEN": mask_is_inside(p), "SINKS": p.sinks is not None,
            "DROPOUT": p.dropout_p > 0, "M": config.m, "N": config.n, **size_constants(p), "STAGES": config.stages, "MASKED_STAGES": config.masked_stages,
        },
        config.warps, config.stages,
    )  # fmt: skip


def split_launch(p: Problem, own: dict[str, Any], splits: int, config: Config) -> Launch:
    rows = p.heads // p.kv_heads * p.q_len
    return Launch(
        "split",
        p.batch * p.kv_heads * splits,
        own,
        {
            "s_q": strides(p.query), "s_k": strides(p.key), "s_v": strides(p.value), **shape_arguments(p),
            "n_splits": splits, "per_split": -(-p.kv_len // (config.n * splits)), "scale": scales(p), "threshold": threshold(p.dropout_p),
            **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "DROPOUT": p.dropout_p > 0, "M": max(16, 1 << (rows - 1).bit_length()), "N": config.n,
            **size_constants(p), "STAGES": config.stages,
        },
        config.warps, config.stages,
    )  # fmt: skip


def combine_launch(p: Problem, own: dict[str, Any], splits: int) -> Launch:
    return Launch(
        "combine",
        p.batch * p.heads * p.q_len,
        own,
        {
            "s_out": strides(own["p_out"]), "n_heads": p.heads, "ratio": p.heads // p.kv_heads, "n_q": p.q_len, "n_splits": splits,
            "keep_scale": dropout_scale(p),
        },
        {"SINKS": p.sinks is not None, "SPLITS": MOST_SPLITS, "DV": padded(p.v_dim), "DV_TRUE": p.v_dim},
        4, 1,
    )  # fmt: skip


def deltas_launch(p: Problem, own: dict[str, Any]) -> Launch:
    rows = 32
    return Launch(
        "deltas",
        p.batch * p.heads * -(-p.q_len // rows),
        own,
        {
            "s_out": strides(own["p_out"]), "s_do": strides(own["p_do"]), "n_heads": p.heads, "n_q": p.q_len,
            "unit": scales(p)[2] * LOG2E if slope_of(p) is None else 1.0,
        },
        {"HAS_DLSE": own["p_dlse"] is not None, "FOLDED": own["p_parts"] is not None, "M": rows, "DV": padded(p.v_dim), "DV_TRUE": p.v_dim},
        4, 1,
    )  # fmt: skip


def gauge_launch(p: Problem, own: dict[str, Any], wanted: frozenset[int], keys: Config, queries: Config) -> Launch:
    """The query programs alone, measuring shares instead of adding them. What they write to dQ is written again."""
    whole = gradients_launch(p, own, wanted, keys, queries)
    programs = whole.programs - whole.rest["n_key_programs"]
    constants = whole.constants | {"SCATTER": gauge_of(p, wanted), "KEYS": False}
    return whole._replace(programs=programs, rest=whole.rest | {"n_key_programs": 0}, constants=constants)


def added_launch(p: Problem, own: dict[str, Any], config: Config) -> Launch:
    """The key programs alone, which add up dQ."""
    whole = gradients_launch(p, own, frozenset(), config, config)
    return whole._replace(programs=whole.rest["n_key_programs"], constants=whole.constants | {"ADDS": "straight"})


def bring_launch(p: Problem, own: dict[str, Any]) -> Launch:
    config = choose("added", p)
    rows = row_tiles(p, config)
    return Launch(
        "bring",
        p.batch * p.heads * rows.count,
        own,
        {
            **{f"s_{name}": strides(own[f"p_{name}"]) for name in ("q", "k", "v", "do", "dq")},
            "tiles": rows.tensors, "s_tiles": rows.strides, "n_tiles": rows.count, **shape_arguments(p), "n_padded": padded_rows(p), "scale": scales(p),
            **dropout_arguments(p), **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "SLOPE": slope_of(p), "MAPPED": rows.mapped, "GIVEN": mask_is_inside(p), "DROPOUT": p.dropout_p > 0,
            "M": config.m, "N": config.n, **{k: v for k, v in size_constants(p).items() if k.startswith("D")},
        },
        4, 1,
    )  # fmt: skip


def gradients_launch(p: Problem, own: dict[str, Any], wanted: frozenset[int], keys: Config, queries: Config) -> Launch:
    columns, rows = column_tiles(p, keys), row_tiles(p, queries)
    key_programs = p.batch * p.kv_heads * columns.count
    return Launch(
        "gradients",
        key_programs + p.batch * p.heads * rows.count,
        own,
        {
            **{f"s_{name}": strides(own[f"p_{name}"]) for name in ("q", "k", "v", "do", "dq", "dk", "dv")},
            "columns": columns.tensors, "s_columns": columns.strides, "n_columns": columns.count,
            "rows": rows.tensors, "s_rows": rows.strides, "n_rows": rows.count, "n_key_programs": key_programs,
            **shape_arguments(p), "n_padded": padded_rows(p), "scale": scales(p), **dropout_arguments(p), **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "SLOPE": slope_of(p), "SCATTER": scatter_of(p, wanted), "MAPPED": rows.mapped,
            "GIVEN": mask_is_inside(p), "DROPOUT": p.dropout_p > 0, "FOLDED": own["p_parts"] is not None, "KEYS": True, "ADDS": None,
            **size_constants(p),
            "KEYS_M": keys.m, "KEYS_N": keys.n, "QUERIES_M": queries.m, "QUERIES_N": queries.n,
            "KEYS_STAGES": keys.stages, "KEYS_MASKED_STAGES": keys.masked_stages,
            "QUERIES_STAGES": queries.stages, "QUERIES_MASKED_STAGES": queries.masked_stages,
        },
        keys.warps, keys.stages,
    )  # fmt: skip


def mask_is_inside(p: Problem) -> bool:
    """Whether a mask decides inside the partial ones of given tiles, and only there."""
    return p.mask is not None and p.tiles is not None and p.tiles.given


def is_decoding(p: Problem) -> bool:
    """Few query rows over many keys: too few tiles to fill a GPU unless the keys are split."""
    n_q = p.query.shape[2]
    return n_q <= DECODE_ROWS and p.tiles is None and p.heads // p.kv_heads * n_q <= DECODE_ROWS and p.kv_len >= DECODE_KEYS * n_q


def split_count(p: Problem) -> int:
    """As many programs as run at a time, each with a few key tiles at least; but one of a (batch, head) alone would end late."""
    tiles = -(-p.kv_len // choose("decode", p).n)
    processors = torch.cuda.get_device_properties(p.device).multi_processor_count if p.device.type == "cuda" else FEW_PROCESSORS
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // (p.batch * p.kv_heads))
    return max(1, min(max(wanted, LEAST_SPLITS), tiles // TILES_PER_SPLIT, MOST_SPLITS))


def _nothing_to_attend(p: Problem, out: Tensor, lse: Tensor, highest: Tensor) -> Output:
    """No keys at all: outputs are 0; the sink, where there is one, is the whole sum."""
    lse = lse.fill_(-torch.inf) if p.sinks is None else p.sinks.float().view(1, -1, 1).expand_as(lse).contiguous()
    return Output(out.zero_(), lse, highest.fill_(-torch.inf))


# -- arguments -------------------------------------------------------------------------------------------------------


def strides(t: Tensor) -> tuple[int, ...]:
    """(batch, head, sequence, dim) strides; `Aligned` where rows can be loaded 16 bytes at a time."""
    found = t.stride()
    if found[3] == 1 and t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in found[:3]):
        return Aligned(found)
    return Strides(found)


def seed_of(p: Problem) -> Tensor | None:
    return None if p.seed is None else p.seed.to(p.device)


def shape_arguments(p: Problem) -> dict[str, int]:
    return {"n_heads": p.heads, "ratio": p.heads // p.kv_heads, "n_q": p.q_len, "n_kv": p.kv_len}


def dropout_scale(p: Problem) -> float:
    return float(keep_scale(p.dropout_p)) if p.dropout_p > 0 else 1.0


def dropout_arguments(p: Problem) -> dict[str, Any]:
    return {"keep_scale": dropout_scale(p), "threshold": threshold(p.dropout_p)}


def size_constants(p: Problem) -> dict[str, Any]:
    return {
        "D": padded(p.head_dim), "DV": padded(p.v_dim), "D_TRUE": p.head_dim, "DV_TRUE": p.v_dim,
        "PRECISION": precision(p.dtype), "UPCAST": interpreted() and p.dtype == torch.bfloat16,
    }  # fmt: skip
