"""Generated functions: their source, named by its hash, and the Triton function it becomes when a kernel is built."""

import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewise.core.folders import process_folder
from tilewise.core.locks import new_lock

HEADER = """\
import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.bounds import absolute_bounds, loaded_bounds, offset, product_bounds, remainder_bounds, truth_bounds, widened
from tilewise.engines.gpu.kernels.primitives import add_fixed, add_share, fast_tanh, gauge_share, load_unpipelined, power, quotient, round_even, tanh
from tilewise.engines.gpu.kernels.primitives import atan, atan2, cosh, erfc, expm1, fmod, log10, log1p, logaddexp, sinh, softplus, tan

"""

_loaded: dict[str, ModuleType] = {}
_lock = new_lock()


@dataclass(frozen=True)
class Generated:
    """A function of generated source. Two with the same source are the same."""

    entry: str
    source: str

    @cached_property
    def name(self) -> str:
        return "tilewise_mod_" + hashlib.sha256(self.source.encode()).hexdigest()[:32]

    def __repr__(self) -> str:
        return f"{self.entry}@{self.name}"

    def function(self) -> Any:
        """The Triton function. Triton reads source from files, so it is put into one."""
        with _lock:
            if self.name not in _loaded:
                _loaded[self.name] = _module(self.name, self.source)
            return getattr(_loaded[self.name], self.entry)


def generated(entry: str, lines: list[str]) -> Generated:
    return Generated(entry, HEADER + "\n".join(lines) + "\n")


@lru_cache(maxsize=1)
def _folder() -> Path:
    return process_folder()


def _module(name: str, source: str) -> ModuleType:
    path = _folder() / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
