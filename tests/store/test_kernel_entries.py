"""Entries of the store that are not what they should be, though their checksums are right: GPU kernels and tuned configurations. No GPU is needed."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tilewise.core import store
from tilewise.engines.gpu import kernel_cache, tuning
from tilewise.engines.gpu.config import Config
from tilewise.engines.gpu.driver import UnusableBinary
from tilewise.engines.gpu.limits import NO_TRITON

pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))

FACTS = {"name": "kernel", "shared": 0, "warps": 4, "types": [], "extra_pointers": 0, "boxes": []}
GOOD = {"facts": json.dumps(FACTS).encode(), "cubin": b"good"}
KEY = "cd" * 32


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were built: everything is real but the compiler and the driver."""
    kernels: list[str] = []

    def build(request: Any, table: Any) -> dict[str, bytes]:
        kernels.append(request)
        return GOOD if request == "good" else GOOD | {"cubin": b"bad"}

    def load(cubin: bytes, *_: Any) -> str:
        if cubin != b"good":
            raise UnusableBinary("CUDA driver: loading a kernel failed")
        return "loaded"

    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    monkeypatch.setattr(kernel_cache, "_build", build)
    monkeypatch.setattr(kernel_cache, "Kernel", load)
    monkeypatch.setattr(kernel_cache, "_kernels", {})
    monkeypatch.setattr(kernel_cache, "_rebuilt", set())
    monkeypatch.setattr(kernel_cache, "store_key", lambda request: KEY)
    return kernels


@pytest.mark.parametrize(
    "parts",
    [{"other": b"1"}, {"facts": b"{}", "cubin": b"good"}, GOOD | {"facts": b"rubbish"}, GOOD | {"cubin": b""}, GOOD | {"cubin": b"bad"}],
    ids=["other parts", "no facts", "unreadable facts", "empty", "not loaded by the driver"],
)
def test_a_stored_kernel_that_cannot_be_used_is_built_again(parts: dict[str, bytes], built: list[str]) -> None:
    store.write(KEY, parts)
    assert kernel_cache.load("short", "good", lambda: {}, 0) == "loaded" and built == ["good"]
    kernel_cache._kernels.clear()
    assert kernel_cache.load("short", "good", lambda: {}, 0) == "loaded" and built == ["good"]  # from the store


def test_a_driver_that_loads_nothing_does_not_have_everything_built_again(built: list[str]) -> None:
    for _ in range(3):
        with pytest.raises(UnusableBinary):
            kernel_cache.load("short", "bad", lambda: {}, 0)
    assert built == ["bad", "bad"]


@pytest.mark.parametrize("home", ["/dev/null", "~"])
def test_without_a_home_triton_gets_a_folder(home: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from tilewise.engines.gpu.compiler import give_triton_a_folder

    for variable in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home))
    give_triton_a_folder.__wrapped__()
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_dir() and not Path("~").exists() and "TRITON_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("configs", [b"rubbish", b"[]", b"[[1]]", b"[" * 100_000, b"7"])
def test_tuned_configurations_that_are_none_are_not_used(configs: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_found", {})
    table = (Config(64, 64, 4, 2),)
    store.write(hashlib.sha256(b"configurations some kind").hexdigest(), {"configs": configs})
    assert tuning.best("some kind", ("forward",), table, None, lambda found: 1.0) == table
    with tuning.autotuned():
        assert len(tuning.best("some kind", ("forward",), table, None, lambda found: 1.0)) == 1
    monkeypatch.setattr(tuning, "_found", {})
    assert store.find(hashlib.sha256(b"configurations some kind").hexdigest(), lambda parts: json.loads(parts["configs"]))
