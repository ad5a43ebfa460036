"""watch(): which engine every attention layer of a model really used, and which layers bypass tilewise.

Example:

    with tilewise.watch(model) as w:
        model(x)
    print(w)
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tilewise.core.map_cache import map_of
from tilewise.engines.native import SDPA, own_call
from tilewise.errors import InputError
from tilewise.frontend.dispatch import Served, observers
from tilewise.frontend.interception import LOOKS_LIKE_ATTENTION
from tilewise.tools.html import bar, table

__all__ = ["Layer", "Use", "watch"]

TILE = (128, 128)
HEADER = ("layer", "kind", "calls", "engine", "mask", "tiles skipped")
SOFTMAX = (torch.softmax, functional.softmax, torch.Tensor.softmax, torch.special.softmax)
MULTI_HEAD = (functional.multi_head_attention_forward, torch._native_multi_head_attention)

TORCH_SDPA = "torch SDPA"
TORCH_MULTI_HEAD = "nn.MultiheadAttention"
WRITTEN_OUT = "softmax written out"
UNSEEN = "none seen"
NOT_CALLED = "not called"


@dataclass
class Use:
    """How a layer computed attention: with which engine (or what else served it) and mask, and how often."""

    engine: str
    mask: str = ""
    calls: int = 0
    tiles: int = 0
    computed: int = 0
    through_tilewise: bool = True

    @property
    def skipped(self) -> float | None:
        """The share of tiles skipped; None if they are not counted."""
        return 1 - self.computed / self.tiles if self.tiles else None


@dataclass
class Layer:
    """An attention layer of the model and all its uses."""

    name: str
    kind: str
    uses: list[Use] = field(default_factory=list)
    remedy: str = ""

    @property
    def calls(self) -> int:
        return sum(use.calls for use in self.uses)

    @property
    def engines(self) -> list[str]:
        """Those of tilewise."""
        return sorted({use.engine for use in self.uses if use.through_tilewise})

    @property
    def bypasses(self) -> bool:
        """Whether some of its calls did not reach tilewise."""
        return any(not use.through_tilewise and use.engine != NOT_CALLED for use in self.uses)


class watch:
    """Watch a model, or every model of a pipeline, inside a `with` block; print it for the table.

    `layers` has a Layer for each attention layer, `bypassing` those that did not reach tilewise, `engines` the calls by engine.
    Calls inside torch.compile are not seen; the table says so if a model is compiled.
    """

    def __init__(self, model: Any) -> None:
        self._roots = _roots(model)
        self._modules = {f"{root}.{name}".strip("."): module for root, top in self._roots.items() for name, module in top.named_modules()}
        self._seen: dict[str, dict[tuple[str, str], Use]] = {}
        self._executed: set[str] = set()
        self._place = _Place()
        self._hooks: list[Any] = []
        self._mode = _TorchCalls(self)
        self._told = 0

    # -- watching ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "watch":
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leaving(name), always_call=True))
        observers.append(self._on_call)
        self._mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)
        observers.remove(self._on_call)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._executed.add(name)
            self._place.stack.append(name)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            stack = self._place.stack
            if name in stack:  # an exception may have left inner modules on the stack
                del stack[len(stack) - 1 - stack[::-1].index(name) :]

        return leave

    def _here(self) -> str | None:
        """The layer running on this thread: the innermost attention module, else the innermost module."""
        stack = self._place.stack
        return next((name for name in reversed(stack) if self._attends(name)), stack[-1] if stack else None)

    def _attends(self, name: str) -> bool:
        return LOOKS_LIKE_ATTENTION.search(type(self._modules[name]).__name__) is not None

    def _use(self, engine: str, mask: str, through_tilewise: bool) -> Use | None:
        here = self._here()
        if here is None:
            return None
        use = self._seen.setdefault(here, {}).setdefault((engine, mask), Use(engine, mask, through_tilewise=through_tilewise))
        use.calls += 1
        return use

    def _on_call(self, served: Served) -> None:
        self._told += 1
        use = self._use(served.engine, served.mask, True)
        if use is None or served.engine == "native":  # torch does not say what it skips
            return
        problem = served.problem
        tiles = map_of(problem, TILE)
        if tiles is None:
            total = problem.batch * problem.heads * -(-problem.q_len // TILE[0]) * -(-problem.kv_len // TILE[1])
            use.tiles, use.computed = use.tiles + total, use.computed + total
            return
        repeats = problem.batch * problem.heads // max(1, tiles.geometry.batch * tiles.geometry.heads)
        use.tiles, use.computed = use.tiles + tiles.total_tiles * repeats, use.computed + tiles.computed_tiles * repeats

    def _on_torch(self, kind: str, call: Callable[[], Any]) -> Any:
        """A call of torch's own attention: a bypass, unless tilewise was reached inside it, as under interception."""
        before = self._told
        result = call()
        if self._told == before and (kind != WRITTEN_OUT or self._inside_attention()):
            self._use(kind, "", False)
        return result

    def _inside_attention(self) -> bool:
        here = self._here()
        return here is not None and self._attends(here)

    # -- what was seen -----------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[Layer]:
        """Every attention layer of the model, in the order of its modules."""
        return [self._layer(name) for name in self._modules if name in self._seen or self._silent(name)]

    def _layer(self, name: str) -> Layer:
        module = self._modules[name]
        uses = list(self._seen.get(name, {}).values())
        if any(use.through_tilewise or use.engine != WRITTEN_OUT for use in uses):
            uses = [use for use in uses if use.engine != WRITTEN_OUT]  # a softmax in a layer that also calls attention is something else
        if not uses:
            uses = [Use(UNSEEN if name in self._executed else NOT_CALLED, through_tilewise=False)]
        layer = Layer(name, type(module).__name__, uses)
        layer.remedy = self._remedy(layer, module) if layer.bypasses else ""
        return layer

    def _silent(self, name: str) -> bool:
        """Whether an attention module contains no other attention module, and no module whose calls were seen."""
        return self._attends(name) and not any(other.startswith(f"{name}.") and (other in self._seen or self._attends(other)) for other in self._modules)

    def _remedy(self, layer: Layer, module: nn.Module) -> str:
        """The line of code that would route a layer to tilewise."""
        how = {use.engine for use in layer.uses}
        root = next(name for name in self._roots if not name or layer.name == name or layer.name.startswith(f"{name}."))
        model = root or "model"
        library = self._of_transformers(layer.name)
        if library is not None:
            if getattr(self._modules[library].config, "_attn_implementation", None) == "tilewise":
                return "none: this layer keeps an attention of its own, whatever implementation the model is told to use"
            owner = f"{model}.{library.removeprefix(root).strip('.')}".strip(".")
            return f'tilewise.integrations.transformers.register(); {owner}.set_attn_implementation("tilewise")'
        if hasattr(getattr(module, "processor", None), "_attention_backend"):
            return f'tilewise.integrations.diffusers.register(); {model}.set_attention_backend("tilewise")'
        if how <= {UNSEEN, WRITTEN_OUT}:
            return "none: its weights are written out, or are no softmax attention at all"
        if TORCH_SDPA in how:
            return f"tilewise.integrations.route({model})"
        return f"tilewise.integrations.route({model}), with need_weights=False where nn.MultiheadAttention is called"

    def _of_transformers(self, name: str) -> str | None:
        """The outermost transformers model that contains a layer: it decides which attention its layers use."""
        path = name.split(".")
        owners = ["", *(".".join(path[: k + 1]) for k in range(len(path)))]
        return next((owner for owner in owners if owner in self._modules and _takes_implementations(self._modules[owner])), None)

    @property
    def bypassing(self) -> list[Layer]:
        """The layers that did not reach tilewise."""
        return [layer for layer in self.layers if layer.bypasses]

    @property
    def engines(self) -> dict[str, int]:
        """Calls by engine, tilewise's only."""
        found: dict[str, int] = {}
        for use in (use for layer in self.layers for use in layer.uses if use.through_tilewise):
            found[use.engine] = found.get(use.engine, 0) + use.calls
        return found

    def __str__(self) -> str:
        layers = self.layers
        rows = [HEADER, *[(*row[:-1], "" if row.skipped is None else f"{100 * row.skipped:.1f}%") for row in _rows(layers)]]
        widths = [max(len(row[k]) for row in rows) for k in range(len(HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", *self._summary(layers)])

    def _repr_html_(self) -> str:
        """What a notebook shows: the same, with a bar for the tiles skipped."""
        layers = self.layers
        rows = [(*row[:-1], "" if row.skipped is None else bar(row.skipped)) for row in _rows(layers)]
        return "\n".join([table(HEADER, rows), *[f"<div>{escape(line)}</div>" for line in self._summary(layers)]])

    def _summary(self, layers: list[Layer]) -> list[str]:
        reached = sum(1 for layer in layers if layer.engines)
        calls = ", ".join(f"{engine} {count}" for engine, count in self.engines.items())
        lines = [f"{reached} of {len(layers)} attention layers reached tilewise" + (f" (calls: {calls})" if calls else "")]
        remedies: dict[str, list[str]] = {}
        for layer in layers:
            if layer.bypasses:
                remedies.setdefault(layer.remedy, []).append(layer.name)
        lines += [f"{_listed(names)} bypass tilewise; to route: {remedy}" for remedy, names in remedies.items()]
        if any(getattr(m, "_compiled_call_impl", None) is not None or type(m).__name__ == "OptimizedModule" for m in self._modules.values()):
            lines.append("a part of the model is compiled: calls inside torch.compile are not seen; watch one step without it")
        return lines


class _Place(threading.local):
    def __init__(self) -> None:
        self.stack: list[str] = []


class _TorchCalls(TorchFunctionMode):
    """Notices calls of torch's own attention functions."""

    def __init__(self, watcher: watch) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        def call() -> Any:
            return func(*args, **(kwargs or {}))

        kind = None if own_call.running else _kind(func)
        return call() if kind is None else self.watcher._on_torch(kind, call)


def _kind(func: Callable[..., Any]) -> str | None:
    if func is SDPA:
        return TORCH_SDPA
    if func in MULTI_HEAD:
        return TORCH_MULTI_HEAD
    return WRITTEN_OUT if func in SOFTMAX else None


def _roots(model: Any) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    components = getattr(model, "components", model)
    found = {name: module for name, module in components.items() if isinstance(module, nn.Module)} if isinstance(components, Mapping) else {}
    if not found:
        raise InputError(f"watch takes a model (nn.Module), a pipeline with components, or a dict of models, got {type(model).__name__}")
    return found


def _takes_implementations(module: Any) -> bool:
    """Whether this is a transformers model that obeys set_attn_implementation; some accept the call and ignore it."""
    return hasattr(module, "set_attn_implementation") and getattr(module, "_can_set_attn_implementation", lambda: True)()


# -- the table ---------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    layer: str
    kind: str
    calls: str
    engine: str
    mask: str
    skipped: float | None  # the share of tiles


def _rows(layers: list[Layer]) -> Iterator[_Row]:
    """One row per use of a layer; layers that differ only in their number and have the same uses share rows."""
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        did = tuple((use.engine, use.mask, use.calls, use.tiles, use.computed) for use in layer.uses)
        pattern = tuple("#" if field.isdigit() else field for field in layer.name.split("."))
        groups.setdefault((pattern, layer.kind, did), []).append(layer)
    for alike in groups.values():
        name = _listed([layer.name for layer in alike])
        for k, use in enumerate(alike[0].uses):
            engine = use.engine if use.through_tilewise or use.engine == NOT_CALLED else f"BYPASS: {use.engine}"
            yield _Row(name if k == 0 else "", alike[0].kind if k == 0 else "", str(use.calls * len(alike)), engine, use.mask, use.skipped)


def _listed(names: list[str]) -> str:
    """`blocks.{0..11}.attn (12 layers)` of names that differ in their numbers only, else the first and how many more."""
    if len(names) == 1:
        return names[0] or "(the model)"
    columns = list(zip(*[name.split(".") for name in names], strict=False))
    together = [parts[0] if len(set(parts)) == 1 else _range(parts) for parts in columns]
    if None in together or len({name.count(".") for name in names}) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return f"{'.'.join(map(str, together))} ({len(names)} layers)"


def _range(parts: tuple[str, ...]) -> str | None:
    numbers = sorted({int(part) for part in parts}) if all(part.isdigit() for part in parts) else []
    if not numbers:
        return None
    unbroken = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{{{numbers[0]}..{numbers[-1]}}}" if unbroken else f"{{{','.join(map(str, numbers))}}}"
