"""PagedCache: sequences that grow, leave and come, against the keys and values they were given in order."""

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.paged import Batch, apart, assert_right
from tilewise import masks
from tilewise.paged_cache import TENSORS, Step

SIZES: dict[str, Any] = {"layers": 2, "pages": 12, "page_size": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 8, "slots": 3, "max_tokens": 30}


def make(**changes: Any) -> tw.PagedCache:
    return tw.PagedCache(**{**SIZES, **changes})


class History:
    """Keys and values (kv heads, tokens, head dim) of every layer and slot, as plain tensors beside the cache."""

    def __init__(self, cache: tw.PagedCache) -> None:
        self.cache = cache
        self.stored: dict[tuple[int, int, int], Tensor] = {}

    def step(self, counts: dict[int, int]) -> Step:
        """Appends random tokens in all layers, and compares the attention of each."""
        cache, step = self.cache, self.cache.append(counts)
        dims = (SIZES["head_dim"], SIZES["v_head_dim"])
        for layer in range(SIZES["layers"]):
            new = [torch.randn(sum(counts.values()), 2, d) for d in dims]
            query = torch.randn(sum(counts.values()), 4, dims[0])
            cache.write(layer, step, *new)
            out = cache.attention(layer, step, query, mask=masks.causal)
            for part, tokens in enumerate(new):
                for slot, piece in zip(counts, tokens.split(list(counts.values())), strict=True):
                    before = self.stored.get((part, layer, slot), torch.empty(2, 0, dims[part]))
                    self.stored[part, layer, slot] = torch.cat([before, piece.transpose(0, 1)], 1)
            queries = [q.transpose(0, 1) for q in query.split(list(counts.values()))]
            keys, values = ([self.stored[part, layer, slot] for slot in counts] for part in range(2))
            batch = Batch(queries, keys, values, cache.k_pages[layer], cache.v_pages[layer], step.page_table, step.kv_lengths)
            assert_right(batch, (apart(batch, out, out.new_zeros(4, len(out)))[0], []), mask=masks.causal)
        assert step.positions.tolist() == [at for slot, n in counts.items() for at in range(cache.length(slot) - n, cache.length(slot))]
        return step

    def free(self, slot: int) -> None:
        self.cache.free(slot)
        for key in [key for key in self.stored if key[2] == slot]:
            del self.stored[key]


def test_sequences_come_and_go() -> None:
    """Pages and slots are used again and again; table and lengths stay the same tensors, and agree with what the host knows."""
    torch.manual_seed(0)
    choose = random.Random(0)
    cache = make()
    history, used, pages = History(cache), [], 0
    table, lengths = cache.page_table, cache.lengths
    for _ in range(40):
        if cache.slots_free and choose.random() < 0.5:
            used.append(cache.allocate())
        choose.shuffle(used)
        counts = {slot: choose.choice([1, 1, 1, 2, 7]) for slot in used[: choose.randint(1, 3)]}
        full = any(cache.length(slot) + n > SIZES["max_tokens"] for slot, n in counts.items())
        if counts and not full and cache.has_room(counts):
            before = cache.pages_in_use
            history.step(counts)
            pages += cache.pages_in_use - before
        elif used:
            history.free(used.pop())
        assert cache.pages_in_use == sum(cache.pages_for(cache.length(slot)) for slot in used) == SIZES["pages"] - cache.pages_free
        assert lengths.tolist() == [cache.length(slot) if slot in used else 0 for slot in range(SIZES["slots"])]
        rows = [page for slot in used for page in table[slot, : cache.pages_for(cache.length(slot))].tolist()]
        assert len(set(rows)) == len(rows)
    assert pages > 2 * SIZES["pages"]
    assert cache.page_table is table and cache.lengths is lengths


def test_decoding_is_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token for each of as many sequences have the same tensors, made in inference mode or not, and are planned once for all steps and layers."""
    made = []
    module = sys.modules["tilewise.attention"]  # the name stands for the function
    usual = module.make_problem
    monkeypatch.setattr(module, "make_problem", lambda *args: made.append(1) or usual(*args))
    history = History(make())
    slots = [history.cache.allocate() for _ in range(3)]
    history.step({slot: 2 + slot for slot in slots})
    assert len(made) == 1
    first = history.step({slots[0]: 1, slots[2]: 1})
    history.step({slots[1]: 1, slots[2]: 1})
    assert len(made) == 2
    with torch.inference_mode():
        second = history.cache.append({slots[1]: 1, slots[0]: 1})
    assert first.one_each and all(getattr(first, name) is getattr(second, name) for name in TENSORS)
    assert second.slots == (slots[1], slots[0])
    assert second.kv_lengths.tolist() == [5, 4] and not second.rows.is_inference()
    assert history.cache.append({slots[0]: 1}).rows is not second.rows and not history.cache.append({slots[0]: 2}).one_each


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("per_head", [False, True])
def test_float8(stored: torch.dtype, per_head: bool) -> None:
    """What is stored is the quotient, rounded; what comes out is attention over what was stored, times the scale."""
    torch.manual_seed(0)
    k_scale, v_scale = (torch.tensor([[0.02, 0.5], [0.1, 3.0]]), torch.tensor([0.25, 4.0])) if per_head else (0.03, 0.5)
    cache = make(dtype=stored, k_scale=k_scale, v_scale=v_scale)
    step = cache.append({cache.allocate(): 6})
    query, key, value = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 8)
    cache.write(1, step, key, value)
    scales = [torch.as_tensor(s).expand(2, 2)[1] for s in (k_scale, v_scale)]
    kept = [(t / s[:, None]).to(stored) for t, s in zip((key, value), scales, strict=True)]
    assert torch.equal(cache.k_pages[1].flatten(0, 1)[step.rows].float(), kept[0].float())
    batch = Batch(*[[t.transpose(0, 1)] for t in (query, *kept)], cache.k_pages[1], cache.v_pages[1], step.page_table, step.kv_lengths)
    out = cache.attention(1, step, query, mask=masks.causal)
    assert_right(batch, ([out.transpose(0, 1)], []), mask=masks.causal, scales=scales)


def test_float8_ends_at_its_largest() -> None:
    cache = make(dtype=torch.float8_e4m3fn)
    step = cache.append({cache.allocate(): 1})
    cache.write(0, step, torch.full((1, 2, 16), 1e6), torch.full((1, 2, 8), -1e6))
    assert cache.k_pages[0].flatten(0, 1)[step.rows].float().unique().tolist() == [448.0]
    assert cache.v_pages[0].flatten(0, 1)[step.rows].float().unique().tolist() == [-448.0]


def test_where_pages_run_out() -> None:
    cache = make(pages=4)
    one, other = cache.allocate(), cache.allocate()
    cache.append({one: 9})
    assert repr(cache) == "PagedCache(2 layers, 3 of 4 pages of 4 tokens in use, 2 of 3 slots)"
    assert cache.has_room({one: 3, other: 4}) and not cache.has_room({one: 4, other: 4})
    with pytest.raises(tw.InputError, match=r"2 more pages of 4 tokens are needed, 1 of 4 are free: free\(\) finished sequences, append fewer tokens"):
        cache.append({one: 1, other: 5})
    assert (cache.length(one), cache.length(other), cache.pages_free) == (9, 0, 1) and cache.lengths.tolist()[:2] == [9, 0]
    cache.free(one)
    cache.append({other: 16})
    assert cache.pages_free == 0


ERRORS = [
    (lambda c: c.append({0: 31}), r"slot 0 has 0 tokens of at most max_tokens=30, and cannot take 31 more"),
    (lambda c: c.append({0: -1}), r"slot 0 takes a whole number of new tokens, 0 or more, got -1"),
    (lambda c: c.append({0: 1.5}), r"slot 0 takes a whole number of new tokens, 0 or more, got 1.5"),
    (lambda c: c.append([0]), r"new tokens are given by slot, as \{slot: 5\}, got list"),
    (lambda c: c.append({torch.tensor(0): 1}), r"a slot is the int that allocate\(\) gives, got Tensor"),
    (lambda c: c.free(torch.tensor(0)), r"a slot is the int that allocate\(\) gives, got Tensor"),
    (lambda c: c.write(2, c.append({0: 1}), torch.zeros(1, 2, 16), torch.zeros(1, 2, 8)), r"layers are numbered 0 to 1, got 2"),
    (lambda c: c.attention(-1, c.append({0: 1}), torch.zeros(1, 4, 16)), r"layers are numbered 0 to 1, got -1"),
    (lambda c: c.attention(0, c.append({0: 3}), torch.zeros(2, 4, 16)), r"query must be \(3, heads, head dim\), one for each new token of the step, got"),
    (lambda c: make(slots=2.5), r"slots must be a whole number of at least 1, got 2.5"),
    (lambda c: make(dtype=torch.int8), r"pages are float16, bfloat16, .* got torch.int8"),
    (lambda c: make(v_scale=0.0), r"v_scale is what keys or values were divided by, a number above 0, got 0.0"),
    (lambda c: make(k_scale="1"), r"k_scale must be a number, or a float tensor .* got str"),
    (lambda c: c.append({2: 1}), r"slot 2 is not in use: allocate\(\) gives one; in use are \[0\]"),
    (lambda c: c.free(1), r"slot 1 is not in use"),
    (lambda c: [c.allocate() for _ in range(3)], r"all 3 slots are in use: free\(\) a finished sequence first"),
    (lambda c: c.write(0, c.append({0: 1}), torch.zeros(1, 2, 16).half(), torch.zeros(1, 2, 8)), r"key must be torch.float32, as the pages, got torch.float16"),
    (lambda c: c.write(0, c.append({0: 1}), torch.zeros(1, 2, 16), torch.zeros(1, 2, 8).int()), r"value must be torch.float32, as the pages, got torch.int32"),
    (lambda c: c.write(0, c.append({0: 2}), torch.zeros(3, 2, 16), torch.zeros(3, 2, 8)), r"key must be \(2, 2, 16\) \(tokens, kv heads, head dim\), got"),
    (lambda c: make(k_scale=torch.ones(3)), r"k_scale must be a number or broadcast to \(2, 2\), layers and kv heads, got \(3,\)"),
    (lambda c: make(pages=0), r"pages must be a whole number of at least 1, got 0"),
]


@pytest.mark.parametrize(("wrong", "message"), ERRORS)
def test_errors(wrong: Any, message: str) -> None:
    cache = make()
    cache.allocate()
    with pytest.raises(tw.InputError, match=message):
        wrong(cache)


def test_a_step_that_has_ended_is_refused() -> None:
    """Decoding steps share their tensors: what is written by an old one would be another sequence's."""
    cache, other = make(), make()
    first, second = cache.allocate(), cache.allocate()
    new = torch.ones(1, 2, 16), torch.ones(1, 2, 8)
    old, latest, foreign = cache.append({first: 1}), cache.append({second: 1}), other.append({other.allocate(): 1})
    for step in (old, foreign):
        with pytest.raises(tw.TilewiseError, match="this step is not the latest of this cache"):
            cache.write(0, step, *new)
        with pytest.raises(tw.TilewiseError, match="this step is not the latest of this cache"):
            cache.attention(0, step, torch.ones(1, 4, 16))
    cache.free(first)  # not of this step
    cache.write(0, latest, *new)
    cache.free(second)
    with pytest.raises(tw.TilewiseError, match="this step is not the latest of this cache"):
        cache.write(0, latest, *new)


def test_a_refused_append_changes_nothing() -> None:
    cache = make()
    first, second = cache.allocate(), cache.allocate()
    for counts in ({first: 3, second: 1.5}, {first: 3, second: None}, {first: 3, 7: 1}, {first: 3, second: 31}):
        with pytest.raises(tw.TilewiseError):
            cache.append(counts)
    assert cache.pages_in_use == 0 and cache.length(first) == 0 and not cache.lengths.any()
    assert not cache.has_room({first: 31}) and cache.has_room({first: 30})


def test_lse_of_a_step() -> None:
    cache = make()
    slots = [cache.allocate(), cache.allocate()]
    for counts in ({slots[0]: 3, slots[1]: 5}, dict.fromkeys(slots, 1)):
        step, tokens = cache.append(counts), sum(counts.values())
        cache.write(0, step, torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 8))
        query = torch.randn(tokens, 4, 16)
        out, lse = cache.attention(0, step, query, mask=masks.causal, return_lse=True)
        pages = (cache.k_pages[0], cache.v_pages[0], step.page_table, step.kv_lengths, step.cu_seqlens_q)
        wanted = tw.paged_attention(query, *pages, mask=masks.causal, return_lse=True, backend="reference")
        torch.testing.assert_close((out, lse), wanted)
        assert torch.equal(out, cache.attention(0, step, query, mask=masks.causal))
