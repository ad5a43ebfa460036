"""Masks, scores and tile maps are pickled and copied: with models, and to other processes."""

import copy
import inspect
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise as tw
from tests.attacks.spawned import attend
from tilewise import masks, scores
from tilewise.lang import BoundProgram, trace_score
from tilewise.named import Named

IDS = torch.arange(24) // 5


def every_third(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv) % 3 == 0


def halved(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * 0.5


MASKS: dict[str, Callable[[], masks.Mask]] = {
    "full": lambda: masks.full,
    "causal": lambda: masks.causal,
    "causal_lower_right": lambda: masks.causal_lower_right(3, 5),
    "sliding_window": lambda: masks.sliding_window(4, right=2),
    "dilated_window": lambda: masks.dilated_window(9, 3),
    "prefix_lm": lambda: masks.prefix_lm(4),
    "prefix_lm of a batch": lambda: masks.prefix_lm(torch.tensor([3, 4])),
    "document": lambda: masks.document(IDS),
    "document of two": lambda: masks.document(IDS, kv_ids=IDS + 1),
    "document by lengths": lambda: masks.document(lengths=[3, 4]),
    "padding": lambda: masks.padding(torch.tensor([3, 4])),
    "global_tokens": lambda: masks.global_tokens(IDS > 2),
    "shared_prefix": lambda: masks.shared_prefix([3, 4, 5], [0, 0, 2]),
    "block_diffusion": lambda: masks.block_diffusion(12, 4),
    "tree": lambda: masks.tree([-1, 0, 0], 2),
    "neighborhood": lambda: masks.neighborhood([4, 6], 3),
    "on_grid": lambda: masks.on_grid(every_third, (4, 6), 3),
    "sliding_tile": lambda: masks.sliding_tile((4, 4), (2, 2), (2, 2), text=3),
    "radial": lambda: masks.radial(4, 6, least=2, text=3),
    "spatial_temporal": lambda: masks.spatial_temporal(4, 6, torch.tensor([True, False])),
    "cross": lambda: masks.cross(torch.tensor([[0, 3], [2, 5]]), 4),
    "per_batch": lambda: masks.per_batch([masks.causal, every_third], torch.tensor([0, 1])),
    "as_mask": lambda: masks.as_mask(every_third),
    "composed": lambda: (masks.causal & masks.document(IDS)) | ~(masks.sliding_window(3) & every_third),
    "a grid within": lambda: masks.neighborhood((4, 6), 3) & masks.causal,
}
SCORES: dict[str, Callable[[], scores.Score]] = {
    "sinks": lambda: scores.sinks(torch.ones(2)),
    "alibi": lambda: scores.alibi(4),
    "softcap": lambda: scores.softcap(3.0),
    "relative_bias": lambda: scores.relative_bias(nn.Parameter(torch.randn(2, 5))),
    "relative_bias of t5": lambda: scores.relative_bias(torch.randn(32, 2), buckets="t5", max_distance=40),
    "t5_bias": lambda: scores.t5_bias(torch.randn(4, 2), torch.tensor([0, 1, 2])),
    "bias": lambda: scores.bias(torch.randn(2, 1, 24)),
    "distance_decay": lambda: scores.distance_decay(torch.randn(2)),
    "as_score": lambda: scores.as_score(halved),
}
ALL: dict[str, Callable[[], Any]] = MASKS | SCORES


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def program(thing: Named) -> BoundProgram:
    return trace_score((thing.function,)) if isinstance(thing, scores.Score) else thing.traced()


def test_all_of_the_library_is_here() -> None:
    made = {n for module in (masks, scores) for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    made = {n for n in made if getattr((masks if hasattr(masks, n) else scores), n).__annotations__.get("return") in (masks.Mask, scores.Score, scores.Sinks)}
    assert {n for n in made if not n.startswith("_")} <= {name.split()[0] for name in ALL}


@pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy, copy.copy])
@pytest.mark.parametrize("name", ALL)
def test_masks_and_scores_come_back(name: str, way: Callable[[Any], Any]) -> None:
    thing = ALL[name]()
    before = program(thing)  # a trace that is there must not travel
    found = way(thing)
    assert found.name == thing.name and found.covers == thing.covers and getattr(found, "grid", None) == getattr(thing, "grid", None)
    assert "_trace" not in vars(found) or found is thing
    after = program(found)
    assert (after.program.text, after.ints, after.floats) == (before.program.text, before.ints, before.floats)
    for mine, theirs in zip(before.captures, after.captures, strict=True):
        assert torch.equal(mine, theirs) and (way is copy.copy or found is thing or mine is not theirs)
    if isinstance(thing, scores.Sinks):
        assert torch.equal(thing.logits, found.logits) and (way is copy.copy) == (thing.logits is found.logits)


@pytest.mark.parametrize("name", ["sliding_window", "document", "composed"])
def test_a_pickle_holds_a_name_and_parameters(name: str) -> None:
    mask = ALL[name]()
    fresh = pickle.dumps(mask)
    x = torch.randn(1, 1, 24, 8)
    tw.attention(x, x, x, mask=mask, backend="blocked")
    assert pickle.dumps(mask) == fresh
    assert b"sliding_window" in fresh if name == "sliding_window" else b"document" in fresh
    assert b"Program" not in fresh and b"lambda" not in fresh


@pytest.mark.parametrize("name", MASKS)
def test_a_pickle_names_the_package_of_masks_and_no_file_in_it(name: str) -> None:
    assert b"tilewise.masks." not in pickle.dumps(MASKS[name]())


def test_what_was_made_of_a_list_or_lengths_does_not_change_with_them() -> None:
    parents, lengths, prefix = [-1, 0, 0], torch.tensor([3, 4, 5]), torch.tensor([0, 0, 2])
    made = [masks.tree(parents), masks.tree(torch.tensor(parents)), masks.document(lengths=lengths), masks.shared_prefix(lengths, prefix)]
    before = [program(mask).captures for mask in made]
    parents[2] = 1
    lengths.fill_(4)
    prefix.fill_(0)
    for mask, tensors in zip(made, before, strict=True):
        for found in (pickled(mask), copy.deepcopy(mask)):
            assert all(torch.equal(a, b) for a, b in zip(program(found).captures, tensors, strict=True))


def test_functions_are_pickled_as_python_pickles_them() -> None:
    assert pickled(masks.as_mask(every_third)).function is every_third
    for mask in (masks.as_mask(lambda b, h, q, kv: q > kv), masks.causal & (lambda b, h, q, kv: q > kv)):
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"(?i)can't (get|pickle).*lambda"):
            pickle.dumps(mask)


@pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy])
def test_tile_maps_come_back(way: Callable[[Any], Any]) -> None:
    x = torch.randn(1, 1, 24, 8)
    for mask in (masks.causal & masks.document(IDS), masks.padding(torch.tensor([9]))):
        tiles = tw.tile_map(mask, batch=1, q_len=24, kv_len=24, tile=(8, 8))
        wanted = tw.attention(x, x, x, mask=tiles, backend="blocked")
        found = way(tiles)
        assert found == tiles and found.derived == {} and found.name == tiles.name
        assert torch.equal(tw.attention(x, x, x, mask=found, backend="blocked"), wanted)
    block_mask = tw.flex.create_block_mask(every_third, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)
    assert torch.equal(tw.flex.flex_attention(x, x, x, block_mask=way(block_mask)), tw.flex.flex_attention(x, x, x, block_mask=block_mask))


class Model(nn.Module):
    """Masks and scores of every kind as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 5))
        self.doc = IDS
        self.mask = masks.causal & self.same
        self.score = [scores.relative_bias(self.table), scores.softcap(9.0)]
        self.tiles = tw.tile_map(masks.causal, q_len=24, kv_len=24, tile=(8, 8))
        self.attend = tw.nn.Attention(mask=masks.sliding_window(5), score=tw.nn.RelativeBias(2, 3))

    def same(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.doc[q] == self.doc[kv]

    def forward(self, x: Tensor) -> Any:
        y = tw.attention(x, x, x, mask=self.mask, score=self.score, backend="blocked")
        return self.attend(y, y, tw.attention(y, y, y, mask=self.tiles, backend="blocked"))


@pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy])
def test_a_model_comes_back_with_its_own_tensors(way: Callable[[Any], Any]) -> None:
    model, x = Model(), torch.randn(1, 2, 24, 8)
    wanted = model(x)
    found = way(model)
    assert torch.equal(found(x), wanted)
    found.doc = torch.zeros(24, dtype=torch.int64)
    with torch.no_grad():
        found.table.zero_()
    assert not torch.allclose(found(x), wanted) and torch.equal(model(x), wanted)
    found(x).square().sum().backward()
    assert found.table.grad is not None and model.table.grad is None
    assert found.score[0]._sources[0][0] is found.table


def test_a_mask_can_be_pickled_alone_though_its_module_holds_it() -> None:
    model, x = Model(), torch.randn(1, 2, 24, 8)
    found = pickled(model.mask)
    assert torch.equal(tw.attention(x, x, x, mask=found, backend="blocked"), tw.attention(x, x, x, mask=model.mask, backend="blocked"))


def test_masks_travel_to_a_spawned_process() -> None:
    mask, score = masks.causal & ~masks.sliding_window(3, 0), scores.relative_bias(nn.Parameter(torch.ones(2, 3)))
    tiles = tw.tile_map(mask, q_len=24, kv_len=24, tile=(8, 8))
    context = multiprocessing.get_context("spawn")
    here, there = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=attend, args=(mask, tiles, score, there))
    process.start()
    attend(mask, tiles, score, here)
    found = here.get()
    assert found == there.get() and found[0] == found[1]
    process.join()
