import gc
import os
from pathlib import Path

# Some virtual machines name AMX among the processor's features but do not let it run: a product of half-precision matrices
# then ends the process ("Illegal instruction"). oneDNN reads this once, before its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

GPU_TESTS = Path(__file__).parent / "gpu"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers already share the cores

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")
# Hypothesis also draws from the constants of all loaded modules, which differ from worker to worker. Without them every run draws the same.
providers._get_local_constants = providers.Constants


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Thousands of tests, and the modules behind them, stay until the end: the garbage collector, which some tests call often, need not walk through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel store, and memories of configurations, of the test's own."""
    from tilewise.core import folders, store
    from tilewise.engines.gpu import tuning
    from tilewise.engines.triton import fitting

    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    folders.private_folder.cache_clear()
    monkeypatch.setattr(tuning, "_found", {})
    monkeypatch.setattr(fitting, "_fitting", {})
