"""explain(): which engine would serve a call, why the others would not, and how much work it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from torch import Tensor

from tilewise.attention import problem_of_call
from tilewise.core.map_cache import map_of
from tilewise.core.problem import FLOAT8, Options, Problem
from tilewise.engines import ENGINES, Engine, Request
from tilewise.frontend.dispatch import INTENTS, check_name, choose, requested_backend
from tilewise.frontend.token_order import ordering
from tilewise.scores import ScoreFunction, as_score, as_scores
from tilewise.tiles import TileMap
from tilewise.tools.html import table

__all__ = ["EngineVerdict", "Explanation", "backends", "explain"]

TILE = (128, 128)
HEADER = ("engine", "verdict", "reason")


@dataclass(frozen=True)
class EngineVerdict:
    """What was said of one engine."""

    engine: str
    verdict: str  # "chosen", "available", "refused" or "not considered"
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Print it for the table; or look at `engine`, `verdicts`, `computed_tiles`, `skipped_tiles`, `flops`, `order`, `score`, `tile_map`."""

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
    score: str = ""  # the scores in their order
    tile_map: TileMap | None = field(default=None, repr=False, compare=False)  # None without a mask: every tile is computed

    def __str__(self) -> str:
        rows = [HEADER, *self._rows()]
        widths = [max(len(row[k]) for row in rows) for k in range(2)]
        lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]
        return "\n".join([*self._above(), *lines, *self._below()])

    def _repr_html_(self) -> str:
        """What a notebook shows: the same, and the tile map."""
        above, below = (["".join(f"<div>{escape(line)}</div>" for line in lines)] for lines in (self._above(), self._below()))
        drawn = [] if self.tile_map is None else [self.tile_map._repr_html_()]
        return "\n".join([*above, table(HEADER, self._rows()), *below, *drawn])

    def _above(self) -> list[str]:
        return [
            f"attention {self.problem}, mask {self.mask}" + (f", score {self.score}" if self.score else ""),
            f"backend {self.backend!r} (from {self.source}): " + (f"engine {self.engine}" if self.engine else "no engine can serve this"),
        ]

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(v.engine, v.verdict, v.reason) for v in self.verdicts]

    def _below(self) -> list[str]:
        total = self.computed_tiles + self.skipped_tiles
        share = f" ({100 * self.skipped_tiles / total:.1f}% skipped)" if total else ""
        return [
            *([self.converted] if self.converted else []),
            *([f"order of tokens: {self.order}"] if self.order else []),
            f"tiles of {TILE[0]} x {TILE[1]}: {self.computed_tiles} of {total} computed{share}; "
            f"forward {self.flops / 1e9:.3g} GFLOP, backward {2.5 * self.flops / 1e9:.3g}",
        ]


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
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
    problem, mask_name = problem_of_call(query, key, value, mask, score, options, layout, heads, k_scale, v_scale)
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
        tile_map = replace(tile_map, name=mask_name)
        repeats = problem.batch * problem.heads // (tile_map.geometry.batch * tile_map.geometry.heads)
        computed, pairs, total = tile_map.computed_tiles * repeats, tile_map.computed_pairs() * repeats, tile_map.total_tiles * repeats
    verdicts = tuple(_verdict(e, problem, chosen, said, name) for e in ENGINES)
    flops = 2 * (problem.head_dim + problem.v_dim) * pairs
    skipped, converted = total - computed, _converted(query, key, value)
    scores = ", ".join([as_score(f).name for f in as_scores(score)])
    return Explanation(problem.describe(), mask_name, name, source, chosen, verdicts, computed, skipped, flops, order, converted, scores, tile_map)


def _converted(query: Tensor, key: Tensor, value: Tensor) -> str:
    narrow = [f"{name} from {str(t.dtype).removeprefix('torch.')}" for name, t in (("key", key), ("value", value)) if t.dtype in FLOAT8]
    return f"converted to {str(query.dtype).removeprefix('torch.')} first: {', '.join(narrow)}" if narrow else ""


def _verdict(engine: Engine, problem: Problem, chosen: str | None, said: dict[str, str | None], backend: str) -> EngineVerdict:
    name = engine.name
    if name == chosen:
        return EngineVerdict(name, "chosen", engine.says(problem))
    if name not in said:
        return EngineVerdict(name, "not considered", f"{backend!r} does not include it" + ("; used only when named" if name == "reference" else ""))
    reason = said[name]
    return EngineVerdict(name, "available", "lower priority") if reason is None else EngineVerdict(name, "refused", reason)


def backends() -> dict[str, str]:
    """Every backend name and what it is: intents first, then engines."""
    return {**INTENTS, **{e.name: e.summary for e in ENGINES}}
