"""tilewise: attention that you program in Python and that runs tile by tile, forward and backward, on a GPU or on none."""

import importlib
from typing import Any

from tilewise import flex, functional, masks, nn, scores
from tilewise._version import __version__
from tilewise.attention import attention
from tilewise.core.store import kernel_root
from tilewise.engines.gpu.tuning import autotuned
from tilewise.errors import BackendError, InputError, TilewiseError, TraceError
from tilewise.frontend.dispatch import attention_backend
from tilewise.functional import intercept_sdpa
from tilewise.paged import paged_attention
from tilewise.paged_cache import PagedCache
from tilewise.tiles import TileMap, tile_map
from tilewise.tools.build import build_flex_attention_kernels, build_kernels
from tilewise.tools.explain import Explanation, backends, explain
from tilewise.tools.watch import watch
from tilewise.varlen import varlen_attention

__all__ = [
    "BackendError",
    "Explanation",
    "InputError",
    "PagedCache",
    "TileMap",
    "TilewiseError",
    "TraceError",
    "__version__",
    "attention",
    "attention_backend",
    "autotuned",
    "backends",
    "build_flex_attention_kernels",
    "build_kernels",
    "explain",
    "flex",
    "functional",
    "intercept_sdpa",
    "kernel_root",
    "masks",
    "nn",
    "paged_attention",
    "scores",
    "tile_map",
    "varlen_attention",
    "watch",
]


def __getattr__(name: str) -> Any:
    """tilewise.distributed, tilewise.integrations and tilewise.sparse are there without an import of their own, and cost nothing until they are used."""
    if name in ("distributed", "integrations", "sparse"):
        return importlib.import_module(f"tilewise.{name}")
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
