"""All engines. The order here is that of explain's table; the order in which dispatch asks them is Engine.serves."""

from tilewise.engines.base import Engine
from tilewise.engines.blocked import BlockedEngine
from tilewise.engines.cpp import CppEngine
from tilewise.engines.cuda import CudaEngine
from tilewise.engines.fa2 import Fa2Engine
from tilewise.engines.gluon import GluonEngine
from tilewise.engines.native import NativeEngine
from tilewise.engines.reference import ReferenceEngine
from tilewise.engines.triton import TritonEngine

ENGINES: tuple[Engine, ...] = (NativeEngine(), Fa2Engine(), CudaEngine(), GluonEngine(), TritonEngine(), CppEngine(), BlockedEngine(), ReferenceEngine())


def engine_named(name: str) -> Engine:
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise KeyError(name)
