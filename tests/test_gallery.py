"""The gallery: every mask and score has an entry that says the truth, and the page, the pictures and the notebook are those of the entries."""

import inspect
import json
from types import ModuleType
from typing import Any

import pytest
import torch

import tilewise as tw
from docs import gallery
from docs.gallery_entries import MASKS, SCORES, MaskEntry, ScoreEntry
from tilewise import masks, scores
from tilewise.named import Named

SMALL = gallery.DRAWN
ENTRIES = (*MASKS, *SCORES)


def public(module: ModuleType) -> set[str]:
    """The masks or scores of a module, and the functions that make them."""
    makers = {name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__ and made_here(value)}
    return {name for name in makers | {name for name, value in vars(module).items() if isinstance(value, Named)} if not name.startswith("_")}


def made_here(function: Any) -> bool:
    return hasattr(function, "__wrapped__")  # by @named


def shown(entries: tuple[gallery.Entry, ...]) -> set[str]:
    """Names of entries, and of what their calls are made by: relative_bias with T5's buckets is t5_bias."""
    found = {entry.name for entry in entries}
    for entry in entries:
        made_by = (gallery.mask_of(entry, SMALL) if isinstance(entry, MaskEntry) else gallery.score_of(entry, SMALL)).made_by
        found.add(made_by if isinstance(made_by, str) else made_by[0].__name__ if made_by is not None else "")
    return found


@pytest.mark.parametrize(("module", "entries"), [(masks, MASKS), (scores, SCORES)], ids=["masks", "scores"])
def test_every_mask_and_score_has_an_entry(module: ModuleType, entries: tuple[gallery.Entry, ...]) -> None:
    assert public(module) <= shown(entries), f"add to docs/gallery_entries.py: {sorted(public(module) - shown(entries))}"


def test_public_names_are_found() -> None:
    assert {"full", "causal", "document", "tree", "per_batch"} <= public(masks)
    assert {"alibi", "sinks", "softcap"} <= public(scores)
    assert "as_mask" not in public(masks) and "_after_prefix" not in public(masks)


def test_names_differ() -> None:
    assert len({gallery.anchor(entry) for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", [e for e in MASKS if e.formula], ids=lambda e: e.name)
def test_formula_of_a_mask(entry: MaskEntry) -> None:
    batch, queries, keys = gallery.sizes_of(entry, SMALL)
    at = {"b": torch.arange(batch)[:, None, None], "h": 0, "q": torch.arange(queries)[:, None], "kv": torch.arange(keys)[None, :]}
    wanted = torch.as_tensor(eval(entry.formula, gallery.names_of(entry, SMALL) | at)).expand(batch, queries, keys)
    found = tw.flex.create_mask(gallery.mask_of(entry, SMALL), batch, 1, queries, keys, device="cpu")
    assert torch.equal(found[:, 0], wanted)


@pytest.mark.parametrize("entry", [e for e in SCORES if e.formula], ids=lambda e: e.name)
def test_formula_of_a_score(entry: ScoreEntry) -> None:
    at = torch.arange(SMALL)
    places = {"b": 0, "h": torch.arange(gallery.HEADS)[:, None, None], "q": at[:, None], "kv": at[None, :]}
    before = torch.randn(gallery.HEADS, SMALL, SMALL, generator=torch.Generator().manual_seed(0))
    wanted = eval(entry.formula, gallery.names_of(entry, SMALL) | places | {"score": before})
    torch.testing.assert_close(gallery.score_of(entry, SMALL)(before, **places), wanted)


def test_gallery_is_up_to_date() -> None:
    assert gallery.stale() == [], "run python -m docs.gallery --write"


def test_what_is_stale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "MASKS", MASKS[:-1])
    assert gallery.stale() == ["docs/gallery.md", "docs/pictures/gallery/per_batch.svg"]


def test_pictures_are_small() -> None:
    assert sum(path.stat().st_size for path in gallery.PICTURES.iterdir()) < 1_000_000


def test_every_entry_is_measured() -> None:
    assert set(json.loads(gallery.TIMES.read_text())["times"]) == {entry.name for entry in ENTRIES}


def test_measuring(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gallery, "MASKS", MASKS[:2])
    monkeypatch.setattr(gallery, "SCORES", SCORES[:1])
    found = gallery.measured(SMALL, rounds=1, backend="blocked")
    assert list(found["times"]) == ["full", "causal", "alibi"] and found["engine"] == "blocked"
    for times in found["times"].values():
        assert all(0 < forward < both for forward, both in times.values())


def test_notebook_runs() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    notebook = nbformat.read(gallery.NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kinds = [kind for cell in cells for output in cell.outputs for kind in output.get("data", {})]
    assert kinds.count("text/html") == len(MASKS) + 1  # tile maps, and explain
    assert kinds.count("image/png") == len(SCORES)
