"""explain(): which engine would serve a call, why the others would not, and how much work it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewise.attention import problem_of_call
from tilewise.core.map_cache import map_of
from tilewise.core.problem import FLOAT8, Options, Problem
from tilewise.engines import ENGINES, Engine, Request
from tilewise.frontend.dispatch import INTENTS, check_name, choose, requested_backend
from tilewise.frontend.token_order import ordering
from tilewise.scores import ScoreFunction

TILE = (128, 128)


@dataclass(frozen=True)
class EngineVerdict:
    engine: str
    verdict: str  # "chosen", "could", "refused" or "not asked"
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Print it for the table; or look at `engine`, `verdicts`, `computed_tiles`, `skipped_tiles`, `flops`, `order`."""

    problem: str
    mask: str
    backend: str
    source: str
    engine: str | None
    verdicts: tuple[EngineVerdict, ...]
    computed_tiles: int
    skipped_tiles: int
    flops: int
    order: str = ""  # of the tokens, where the mask is on a grid
    converted: str = ""  # which tensors are, before the engine sees them

    def __str__(self) -> str:
        total = self.computed_tiles + self.skipped_tiles
        share = f" ({100 * self.skipped_tiles / total:.1f}% skipped)" if total else ""
        rows = [("engine", "verdict", "reason"), *[(v.engine, v.verdict, v.reason) for v in self.verdicts]]
        widths = [max(len(row[k]) for row in rows) for k in range(2)]
        table = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]
        return "\n".join(
            [
                f"attention {self.problem}, mask {self.mask}",
                f"backend {self.backend!r} (from {self.source}): " + (f"engine {self.engine}" if self.engine else "no engine can serve this"),
                *table,
                *([self.converted] if self.converted else []),
                *([f"order of tokens: {self.order}"] if self.order else []),
                f"tiles of {TILE[0]} x {TILE[1]}: {self.computed_tiles} of {total} computed{share}; "
                f"forward {self.flops / 1e9:.3g} GFLOP, backward {2.5 * self.flops / 1e9:.3g}",
            ]
        )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Explanation:
    """What attention() would do with the same arguments, without doing it."""
    name, source = requested_backend(backend)
    check_name(name, source)
    options = Options(scale, dropout_p, is_causal, enable_gqa, deterministic, 0 if seed is None else seed)  # draws no random number
    problem, mask_name = problem_of_call(query, key, value, mask, score, options, layout, heads)
    choice = choose(problem, Request(name, source, return_lse, seed is not None), ask_all=True)
    chosen = choice.engine.name if choice.engine is not None else None
    said = {v.engine: v.reason for v in choice.verdicts}
    order = ""
    if choice.engine is not None and problem.grid is not None:
        found = ordering(choice.engine, problem)
        order = f"as given; {found.reason}"
        if found.permutation is not None and problem.mask is not None:
            order = f"by patches; {found.reason}"
            problem = problem.replaced(mask=found.permutation.rewritten(problem.mask))
    tile_map = None if problem.query.is_meta else map_of(problem, TILE)  # what has no contents has no empty tiles
    total = problem.batch * problem.heads * -(-problem.q_len // TILE[0]) * -(-problem.kv_len // TILE[1])
    computed, pairs = total, problem.batch * problem.heads * problem.q_len * problem.kv_len
    if tile_map is not None:
        repeats = problem.batch * problem.heads // (tile_map.geometry.batch * tile_map.geometry.heads)
        computed, pairs, total = tile_map.computed_tiles * repeats, tile_map.computed_pairs() * repeats, tile_map.total_tiles * repeats
    verdicts = tuple(_verdict(e, problem, chosen, said, name) for e in ENGINES)
    flops = 2 * (problem.head_dim + problem.v_dim) * pairs
    return Explanation(problem.describe(), mask_name, name, source, chosen, verdicts, computed, total - computed, flops, order, _converted(query, key, value))


def _converted(query: Tensor, key: Tensor, value: Tensor) -> str:
    narrow = [f"{name} from {str(t.dtype).removeprefix('torch.')}" for name, t in (("key", key), ("value", value)) if t.dtype in FLOAT8]
    return f"converted to {str(query.dtype).removeprefix('torch.')} first: {', '.join(narrow)}" if narrow else ""


def _verdict(engine: Engine, problem: Problem, chosen: str | None, said: dict[str, str | None], backend: str) -> EngineVerdict:
    name = engine.name
    if name == chosen:
        return EngineVerdict(name, "chosen", engine.says(problem))
    if name not in said:
        return EngineVerdict(name, "not asked", f"{backend!r} does not include it" + ("; never chosen by itself" if name == "reference" else ""))
    reason = said[name]
    return EngineVerdict(name, "could", "comes later in the order") if reason is None else EngineVerdict(name, "refused", reason)


def backends() -> dict[str, str]:
    """Every backend name and what it is: intents first, then engines."""
    return {**INTENTS, **{e.name: e.summary for e in ENGINES}}
