"""Masks and scores kept in modules: what they read changes, and modules are copied, loaded, converted and swapped."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise import masks, scores
from tilewise.frontend import call_cache

ENGINES = ["reference", "blocked", "cpp"]
TOKENS, HEADS = 96, 2


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    call_cache.forget()
    yield


def tensors() -> list[Tensor]:
    return [torch.randn(1, HEADS, TOKENS, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def dense(bias: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
    q, k, v = tensors()
    scored = q @ k.transpose(-1, -2) / 8**0.5
    scored = scored if bias is None else scored + bias
    scored = scored if allowed is None else scored.masked_fill(~allowed, -torch.inf)
    return scored.softmax(-1) @ v


# -- what a mask reads -----------------------------------------------------------------------------------------------


class Documents:
    """A mask function that reads an attribute which is replaced."""

    def __init__(self) -> None:
        self.doc = torch.zeros(TOKENS, dtype=torch.int64)

    def same(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.doc[q] == self.doc[kv]


MASKS: dict[str, Callable[[Documents], masks.Mask]] = {
    "&": lambda held: masks.full & held.same,
    "|": lambda held: held.same | ~masks.full,
    "~": lambda held: ~~masks.as_mask(held.same),
    "as_mask": lambda held: masks.as_mask(held.same),
    "Mask": lambda held: masks.Mask(held.same, "same"),
    "on_grid": lambda held: masks.on_grid(held.same, (8, 12), 3),
    "per_batch": lambda held: masks.per_batch([held.same], torch.tensor([0])),
    "a lambda": lambda held: masks.full & (lambda b, h, q, kv: held.doc[q] == held.doc[kv]),
    "a mask in a function": lambda held: masks.as_mask(lambda b, h, q, kv: masks.as_mask(held.same)(b, h, q, kv) & True),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_reads_again_what_it_read(name: str, engine: str) -> None:
    held = Documents()
    mask = MASKS[name](held)
    for length in (TOKENS, 30, 7):
        held.doc = torch.arange(TOKENS) // length
        found = tw.attention(*tensors(), mask=mask, backend=engine)
        torch.testing.assert_close(found, dense(allowed=held.doc[:, None] == held.doc), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mask_follows_a_variable_of_its_closure(engine: str) -> None:
    limit, at = 3, torch.arange(TOKENS)
    mask = masks.causal & (lambda b, h, q, kv: q - kv < limit)
    change = scores.as_score(lambda s, b, h, q, kv: s * limit)
    for limit in (3, 9):
        distance = at[:, None] - at
        torch.testing.assert_close(tw.attention(*tensors(), mask=mask, backend=engine), dense(allowed=(distance >= 0) & (distance < limit)))
        scored = tw.attention(*tensors(), score=change, scale=1 / limit, backend=engine)
        torch.testing.assert_close(scored, tw.attention(*tensors(), scale=1.0, backend="reference"), rtol=1e-5, atol=1e-5)


def test_named_masks_are_traced_once() -> None:
    for mask in (masks.causal, masks.causal & masks.document(torch.zeros(4, dtype=torch.int64)), masks.per_batch([masks.full], torch.tensor([0]))):
        assert mask.fixed and mask.traced() is mask.traced()
    for mask in (masks.causal & (lambda b, h, q, kv: q > 3), masks.per_batch([lambda b, h, q, kv: q > 3], torch.tensor([0]))):
        assert not mask.fixed


@pytest.mark.parametrize("engine", ENGINES)
def test_documents_of_another_dtype_are_traced_again(engine: str) -> None:
    ids = torch.arange(TOKENS) // 20
    mask = masks.document(ids)
    for data in (ids.clone(), (ids + 1).int(), ids.short()):
        ids.data = data
        torch.testing.assert_close(tw.attention(*tensors(), mask=mask, backend=engine), dense(allowed=ids[:, None] == ids))


@pytest.mark.parametrize("engine", ["blocked", "cpp"])
def test_memory_that_is_used_again_is_looked_at_again(engine: str) -> None:
    """`.data` brings new contents to an old identity and version, and often to an old address."""
    ids = torch.zeros(1 << 15, dtype=torch.int64)  # large enough for the allocator to give the same address soon
    x = torch.randn(1, 1, 256, 8)
    for length in range(8, 40):
        ids.data = torch.arange(1 << 15) // length
        found, wanted = (tw.attention(x, x, x, mask=lambda b, h, q, kv: ids[q] == ids[kv], backend=e) for e in (engine, "reference"))
        torch.testing.assert_close(found, wanted)


# -- copies ----------------------------------------------------------------------------------------------------------


class Biased(nn.Module):
    """Attention with a learned bias that is kept as a score."""

    def __init__(self, make: Callable[["Biased"], Any]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(HEADS, 3))
        self.score = make(self)

    def change(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return change_by(self.table, score, b, h, q, kv)

    def forward(self, engine: str) -> Any:
        return tw.attention(*tensors(), score=self.score, backend=engine)


def change_by(table: Tensor, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + table[h, (q - kv).clamp(-1, 1) + 1]


def bias_of(table: Tensor) -> Tensor:
    at = torch.arange(TOKENS)
    return table[:, (at[:, None] - at).clamp(-1, 1) + 1]


def in_a_closure(module: Biased) -> scores.Score:
    table = module.table
    inner = lambda h, place: table[h, place]
    return scores.as_score(lambda s, b, h, q, kv: s + inner(h, (q - kv).clamp(-1, 1) + 1))


def as_a_default(module: Biased) -> scores.Score:
    return scores.as_score(lambda s, b, h, q, kv, *, table=module.table: change_by(table, s, b, h, q, kv))


KEPT: dict[str, Callable[[Biased], Any]] = {
    "relative_bias": lambda module: scores.relative_bias(module.table),
    "a method": lambda module: scores.as_score(module.change),
    "a closure": in_a_closure,
    "a default": as_a_default,
    "a partial": lambda module: scores.as_score(partial(change_by, module.table)),
    "the module": lambda module: scores.as_score(lambda s, b, h, q, kv: module.change(s, b, h, q, kv) + 0),
    "a list": lambda module: [scores.softcap(1e5), scores.relative_bias(module.table)],
}


def check_own(model: Biased, other: Biased, engine: str) -> None:
    """The model computes with its own table, and its gradient goes there."""
    before = other(engine).detach()
    table = torch.randn(HEADS, 3, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.table.copy_(table)
    found = model(engine)
    torch.testing.assert_close(found, dense(bias_of(table)), rtol=1e-4, atol=1e-4)
    assert torch.equal(other(engine), before)
    model.table.grad = other.table.grad = None
    found.square().sum().backward()
    assert bool(model.table.grad.any()) and other.table.grad is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", KEPT)
def test_a_copied_module_uses_its_own_table(name: str, engine: str) -> None:
    model = Biased(KEPT[name])
    model(engine)
    check_own(copy.deepcopy(model), model, engine)
    model.table.data.zero_()
    check_own(model, copy.deepcopy(model), engine)


def test_a_copied_mask_of_a_module_that_holds_it() -> None:
    """Wherever copying starts, the copies belong together."""

    class Holder(Documents):
        def __init__(self) -> None:
            super().__init__()
            self.mask = masks.causal & self.same

    holder = Holder()
    for copied in (copy.deepcopy(holder).mask, copy.deepcopy(holder.mask)):
        method = copied._parameters[1].function
        assert method.__self__ is not holder and method.__self__.mask is copied
        assert copied.traced().captures[0] is method.__self__.doc


def test_tile_maps_are_copied_with_their_tensors() -> None:
    ids = torch.arange(TOKENS) // 20
    tiles = tw.tile_map(masks.document(ids) & masks.causal, q_len=TOKENS, kv_len=TOKENS, tile=(32, 32))
    tw.attention(*tensors(), mask=tiles, backend="blocked")
    copied = copy.deepcopy({"ids": ids, "tiles": tiles})
    assert copied["tiles"] == tiles and copied["tiles"].derived == {}
    assert copied["tiles"].mask.captures[0] is copied["ids"] and copied["tiles"].mask.program is tiles.mask.program


# -- modules that are right by construction --------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = tw.nn.Attention(mask=masks.causal, score=[tw.nn.RelativeBias(HEADS, 4), scores.softcap(50.0)], dropout_p=0.5)

    @property
    def table(self) -> nn.Parameter:
        return self.attend.scores[0].table

    def forward(self, **options: Any) -> Any:
        return self.attend(*tensors(), **options)


def wanted(table: Tensor) -> Tensor:
    score = [scores.relative_bias(table), scores.softcap(50.0)]
    return tw.attention(*tensors(), mask=masks.causal, score=score, backend="reference")


def assign(model: Model, table: Tensor) -> Model:
    model.load_state_dict({"attend.scores.0.table": table}, assign=True)
    return model


def replace(model: Model, table: Tensor) -> Model:
    model.attend.scores[0].table = nn.Parameter(table)
    return model


def swap(model: Model, table: Tensor) -> Model:
    torch.utils.swap_tensors(model.table, nn.Parameter(table))
    return model


def through_double(model: Model, table: Tensor) -> Model:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double().load_state_dict({"attend.scores.0.table": table.double()})
        return model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def copied(model: Model, table: Tensor) -> Model:
    model = copy.deepcopy(model)
    model.table.data.copy_(table)
    return model


WAYS = [assign, replace, swap, through_double, copied]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_modules_follow_their_parameters(way: Callable[[Model, Tensor], Model], engine: str) -> None:
    model = Model().eval()
    with tw.attention_backend(engine):
        model().sum().backward()
        model.zero_grad()
        table = torch.randn(HEADS, 9, generator=torch.Generator().manual_seed(5))
        model = way(model, table.clone())
        for _ in range(2):
            out = model()
            torch.testing.assert_close(out, wanted(table), rtol=1e-5, atol=1e-5)
        out.square().sum().backward()
    assert model.table.grad is not None and bool(model.table.grad.any())


def test_a_score_that_is_kept_holds_its_tensor() -> None:
    """As docs/scores.md says: what replaces the Parameter object is seen by scores made in forward, and not by one that was made before."""
    table = torch.randn(HEADS, 3)
    for name, seen in (("relative_bias", torch.zeros(HEADS, 3)), ("a method", table), ("the module", table)):
        model = Biased(KEPT[name])
        model("blocked")
        model.load_state_dict({"table": table}, assign=True)
        torch.testing.assert_close(model("blocked"), dense(bias_of(seen)), rtol=1e-5, atol=1e-5)


def test_functional_call_uses_the_parameters_it_is_given() -> None:
    model, table = Model().eval(), torch.randn(HEADS, 9)
    torch.testing.assert_close(torch.func.functional_call(model, {"attend.scores.0.table": table}), wanted(table), rtol=1e-5, atol=1e-5)


def test_modules_are_served_from_the_call_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = tw.attention.__globals__["make_problem"]
    monkeypatch.setitem(tw.attention.__globals__, "make_problem", lambda *args: (made.append(1), original(*args))[1])
    for score in (tw.nn.RelativeBias(HEADS, 4), tw.nn.T5Bias(HEADS), tw.nn.ALiBi(HEADS), tw.nn.Sinks(HEADS), [scores.softcap(3.0)]):
        layer = tw.nn.Attention(score=score, backend="blocked")
        for _ in range(3):
            layer(*tensors(), mask=masks.sliding_window(5))
    assert len(made) == 5


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "RelativeBias": (lambda: tw.nn.RelativeBias(HEADS, 4), lambda m: scores.relative_bias(m.table)),
    "T5Bias": (lambda: tw.nn.T5Bias(HEADS, 16, 40, False), lambda m: scores.relative_bias(m.table, buckets="t5", max_distance=40, bidirectional=False)),
    "ALiBi": (lambda: tw.nn.ALiBi(HEADS), lambda m: scores.alibi(HEADS)),
    "Sinks": (lambda: tw.nn.Sinks(HEADS), lambda m: scores.sinks(m.logits)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_give_the_scores_they_are_named_after(name: str) -> None:
    make, score = MODULES[name]
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    found = tw.nn.Attention(score=module, backend="blocked")(*tensors())
    torch.testing.assert_close(found, tw.attention(*tensors(), score=score(module), backend="reference"), rtol=1e-5, atol=1e-5)
    moved = make().to("meta").to_empty(device="cpu")
    moved.reset_parameters()
    fresh = make()
    for a, b in zip([*moved.parameters(), *moved.buffers()], [*fresh.parameters(), *fresh.buffers()], strict=True):
        assert torch.equal(a, b)


def test_attention_as_a_module() -> None:
    q, k, v = tensors()
    layer = Model()
    assert set(layer.state_dict()) == {"attend.scores.0.table"} and "causal" in repr(layer)
    assert not torch.equal(layer(seed=1), layer.eval()(seed=1))  # dropout in training only
    window = masks.sliding_window(3)
    both = tw.nn.Attention(mask=masks.causal, backend="blocked")(q, k, v, mask=window)
    torch.testing.assert_close(both, tw.attention(q, k, v, mask=masks.causal & window, backend="reference"))
    held = tw.nn.Attention(mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())
    assert "mask" in dict(held.named_buffers()) and not held.state_dict()
    with pytest.raises(tw.InputError, match="a mask is a function"):
        held(q, k, v, mask=window)


def test_attention_as_a_module_compiles() -> None:
    model = Model().eval()
    nn.init.normal_(model.table)
    q, k, v = tensors()
    compiled = torch.compile(model.attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, mask=masks.sliding_window(9)), model(mask=masks.sliding_window(9)))


# -- swaps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_that_a_mask_loads_from_can_be_swapped(engine: str) -> None:
    held = nn.Parameter(torch.arange(TOKENS) // 20, requires_grad=False)
    mask = masks.document(held)
    for length in (20, 7, 20, 33):
        torch.utils.swap_tensors(held, nn.Parameter(torch.arange(TOKENS) // length, requires_grad=False))
        for _ in range(2):
            torch.testing.assert_close(tw.attention(*tensors(), mask=mask, backend=engine), dense(allowed=held[:, None] == held))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_that_is_the_mask_can_be_swapped(engine: str) -> None:
    held = nn.Parameter(torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), requires_grad=False)
    with tw.attention_backend(engine):
        for reach in (0, 1, -1):
            torch.utils.swap_tensors(
                held, nn.Parameter(torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(reach) | torch.eye(TOKENS).bool(), requires_grad=False)
            )
            torch.testing.assert_close(tw.attention(*tensors(), mask=held), dense(allowed=held))
            torch.testing.assert_close(tw.functional.scaled_dot_product_attention(*tensors(), attn_mask=held), dense(allowed=held))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_swapped_table_of_another_size_is_refused(engine: str) -> None:
    table = nn.Parameter(torch.zeros(HEADS, 3))
    score = scores.relative_bias(table)
    tw.attention(*tensors(), score=score, backend=engine)
    torch.utils.swap_tensors(table, nn.Parameter(torch.zeros(HEADS, 5)))
    with pytest.raises(tw.InputError, match=r"relative_bias\(1\)\) was made of a tensor of shape \(2, 3\), which has shape \(2, 5\) now: make it again"):
        tw.attention(*tensors(), score=score, backend=engine)


def test_calls_go_with_the_memory_of_a_scores_tensors() -> None:
    """A new bias for every step leaves no cached calls behind."""
    for step in range(20):
        bias = torch.full((1, HEADS, 1, 1), float(step))
        tw.attention(*tensors(), score=scores.bias(bias), backend="blocked")
    assert len(call_cache._calls) <= 3


def test_a_fixed_mask_of_rows_that_grow() -> None:
    lists = torch.zeros(32, 2, dtype=torch.long)
    mask, x = masks.Mask(lambda b, h, q, kv: (lists[q] == kv).any(-1), "lists", fixed=True), torch.randn(1, 1, 32, 8)
    tw.attention(x, x, x, mask=mask, backend="blocked")
    lists.data = torch.arange(32 * 3).view(32, 3) % 32
    dense = (lists[:, None, :] == torch.arange(32)[:, None]).any(-1)
    torch.testing.assert_close(tw.attention(x, x, x, mask=mask, backend="blocked"), tw.attention(x, x, x, mask=dense, backend="reference"))
