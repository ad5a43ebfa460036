"""The text of a CUDA kernel: constants, the struct of its arguments and wrappers of wgmma, in front of the files in `kernels`."""

import hashlib
import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewise.engines.cuda import nvrtc
from tilewise.engines.cuda.config import ForwardConfig
from tilewise.engines.cxx import HEADERS
from tilewise.engines.gpu.driver import PACK, TENSOR_MAP, places_of
from tilewise.engines.gpu.kernel_request import KernelRequest, OwnCompiler, TmaBlock

FOLDER = Path(__file__).parent / "kernels"
SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
ALIGNMENT = 64  # of the struct of arguments, because of its tensor maps
C_TYPES = {
    **{"i1": "unsigned char", "u8": "unsigned char", "i8": "signed char", "i16": "short", "i32": "int", "i64": "long long"},
    **{"fp32": "float", "fp64": "double", "bf16": "bfloat", "fp16": "half"},
}  # and pointers to them


class CudaKernel(OwnCompiler):
    """A kernel of one .cu file, whose entry has the file's name and takes one struct, Args."""

    def __init__(self, entry: str) -> None:
        self._entry = entry

    def text(self, request: KernelRequest) -> str:
        known = dict(request.constants)
        config, score = known["C"], known["SCORE"]
        scored = () if score is None else (_file(FOLDER / "program.cuh"), _file(HEADERS / "operations.h"), score.source)
        banded = (_file(FOLDER / "band.cuh"),) if config.banded else ()
        repairs = (_file(FOLDER / "repair.cuh"),) if config.repairs else ()
        parts = (constants(config), _file(FOLDER / "primitives.cuh"), arguments(request)[0], products(config), *banded, *repairs, *scored)
        parts += (_file(FOLDER / f"{self._entry}.cu"),)
        return "\n".join(parts)

    def compiled(self, request: KernelRequest) -> dict[str, bytes]:
        binary, log = _compiled(self.text(request), f"{self._entry}.cu")
        config: ForwardConfig = dict(request.constants)["C"]
        types = arguments(request)[1]
        size = places_of(types)[1]
        padding = (-(-size // ALIGNMENT) * ALIGNMENT - size) // 8  # the driver reads the whole struct
        facts = {
            "name": self._entry,
            "shared": config.shared,
            "warps": config.warps,
            "types": types,
            "extra_pointers": padding,
            "boxes": [(kind.sizes, SWIZZLE_128) for _, kind in request.signature if isinstance(kind, TmaBlock)],
        }
        return {"facts": json.dumps(facts).encode(), "cubin": binary, "log": log.encode()}


_failed: dict[str, str] = {}  # by a text's digest, which covers all that NVRTC is given but its options, and those are constants: what it said


def _compiled(text: str, name: str) -> tuple[bytes, str]:
    """NVRTC's binary and words; what it did not compile once it is not given again."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest in _failed:
        raise nvrtc.CompileError(_failed[digest])
    try:
        return nvrtc.compiled(text, name)
    except nvrtc.CompileError as error:
        _failed[digest] = str(error)
        raise


def constants(config: ForwardConfig) -> str:
    names = {"block_n": "BN", "warpgroups": "WGS"}
    given = {names.get(name, name.upper()): int(value) for name, value in asdict(config).items()}
    known = given | {"REPAIRS": int(config.repairs), "NS": "(BN / 2)", "K_CHUNKS": "((D + 63) / 64)", "V_CHUNKS": "((DV + 63) / 64)"}
    return "".join([f"#define {name} {value}\n" for name, value in known.items()])


def arguments(request: KernelRequest) -> tuple[str, list[str]]:
    """The struct Args, and the types of its parts, in their order, as gpu/driver.py packs them: C has the same rules of alignment."""
    fields: list[str] = []
    types: list[str] = []
    for name, kind in request.signature:
        _describe(name, kind, fields, types)
    size = -(-places_of(types)[1] // ALIGNMENT) * ALIGNMENT
    lines = [f"struct alignas({ALIGNMENT}) Args {{", *[f"    {field};" for field in fields], "};", f"static_assert(sizeof(Args) == {size});", ""]
    return "\n".join(lines), types


def _describe(name: str, kind: Any, fields: list[str], types: list[str]) -> None:
    if isinstance(kind, TmaBlock):
        rank = len(kind.sizes)
        fields += [f"TensorMap {name}", f"int {name}_sizes[{rank}]", f"long long {name}_strides[{rank}]"]
        types += [TENSOR_MAP, *["i32"] * rank, *["i64"] * rank]
    elif isinstance(kind, tuple) and hasattr(kind, "_fields"):
        for inner, its in zip(kind._fields, kind, strict=True):
            _describe(inner, its, fields, types)
    elif isinstance(kind, tuple):
        for n, its in enumerate(kind):
            _describe(f"{name}_{n}", its, fields, types)
    elif kind != "none":
        plain = kind.removesuffix("!")
        fields.append(f"{C_TYPES[plain.removeprefix('*')]}{'*' * plain.startswith('*')} {name}")
        types.append(plain)
        assert plain in PACK or plain.startswith("*"), f"{name} is of type {kind}"


def products(config: ForwardConfig) -> str:
    dtype = "f16" if config.fp16 else "bf16"
    return wgmma("qk_mma", config.block_n, dtype, a_in_registers=False) + wgmma("pv_mma", config.dv, dtype, a_in_registers=True)


def wgmma(name: str, n: int, dtype: str, a_in_registers: bool) -> str:
    """A function around wgmma m64 x n x k16 with float32 sums d[n / 2]. A lies in registers, and B is k x n as it lies (n contiguous); or both lie in shared
    memory, rows of k contiguous."""
    count = n // 2
    sums = ", ".join([f"%{i}" for i in range(count)])
    results = ", ".join([f'"+f"(d[{i}])' for i in range(count)])
    if a_in_registers:
        a, parameter, flags = "{" + ", ".join([f"%{count + i}" for i in range(4)]) + "}", "const u32* a", "p, 1, 1, 1"
        inputs = [f'"r"(a[{i}])' for i in range(4)]
    else:
        a, parameter, flags, inputs = f"%{count}", "u64 a", "p, 1, 1, 0, 0", ['"l"(a)']
    b = count + len(inputs)
    return (
        f"__device__ __forceinline__ void {name}(float (&d)[{count}], {parameter}, u64 b, bool add) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n'
        f'wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{sums}}}, {a}, %{b}, {flags};\\n}}"\n'
        f'                 : {results} : {", ".join(inputs)}, "l"(b), "r"((int)add));\n}}\n'
    )


@lru_cache(maxsize=8)
def _file(path: Path) -> str:
    return f'#line 1 "{path.name}"\n{path.read_text()}'
