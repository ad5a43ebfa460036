"""Files on a GPU: kernels of the store that the driver does not load, and tile maps that were saved."""

from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise.core import store
from tilewise.engines.gpu import kernel_cache
from tilewise.frontend import call_cache
from tilewise.tiles import TileMap


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(1, 2, 256, 64, dtype=torch.float16, device="cuda")


def test_a_stored_kernel_that_does_not_load_is_built_again(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attended() -> torch.Tensor:
        monkeypatch.setattr(kernel_cache, "_kernels", {})  # as a new process begins
        call_cache.forget()
        return tw.attention(x, x, x, mask=tw.masks.sliding_window(50), backend="triton")

    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    monkeypatch.setattr(kernel_cache, "_rebuilt", set())
    wanted = attended()
    kernels = [path.name.removesuffix(store.ENDING) for path in store.entries()]
    assert kernels
    for key in kernels:
        parts = store.read(key)
        assert parts is not None
        if "cubin" in parts:
            store.write(key, parts | {"cubin": b"no kernel"})
    assert torch.equal(attended(), wanted)
    built = kernel_cache.Counts.built
    assert torch.equal(attended(), wanted) and kernel_cache.Counts.built == built  # the store has the good ones


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_a_loaded_map_attends_as_the_saved_one(backend: str, x: torch.Tensor, tmp_path: Path) -> None:
    ids = torch.arange(256, device="cuda") // 70
    tile_map = tw.tile_map(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), q_len=256, kv_len=256, device="cuda")
    tile_map.save(tmp_path / "map")
    loaded = TileMap.load(tmp_path / "map").to("cuda")
    assert loaded == tile_map
    assert torch.equal(tw.attention(x, x, x, mask=loaded, backend=backend), tw.attention(x, x, x, mask=tile_map, backend=backend))
