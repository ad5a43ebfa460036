"""What the CUDA engine takes and refuses, and what its kernel's key and arguments are, as far as it can be told without a GPU and without NVRTC."""

import glob
import math
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.support.recorded_launches import record
from tilewise import masks, scores
from tilewise.core import folders
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines import engine_named
from tilewise.engines.cuda import CudaEngine, nvrtc
from tilewise.engines.cuda.config import forward_config, forward_forms
from tilewise.engines.cuda.refusals import refuse_problem
from tilewise.engines.gluon import NO_GLUON, GluonEngine
from tilewise.engines.gluon import config as gluon
from tilewise.engines.gpu import kernel_cache, structure
from tilewise.engines.gpu.driver import TENSOR_MAP
from tilewise.engines.gpu.kernel_request import KernelRequest
from tilewise.engines.gpu.limits import shared_memory

DOCUMENTS = masks.document(torch.arange(512) // 100)


def problem(
    shape: tuple[int, ...] = (2, 4, 512, 64),
    v_dim: int | None = None,
    mask: object = None,
    score: object = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int | None = None,
    **options: object,
) -> Problem:
    query = torch.empty(shape, dtype=dtype, device="meta")
    key = torch.empty((shape[0], kv_heads or shape[1], *shape[2:]), dtype=dtype, device="meta")
    value = torch.empty((*key.shape[:3], v_dim or shape[3]), dtype=dtype, device="meta")
    return make_problem(query, key, value, mask, score, Options(enable_gqa=True, **options))[0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"score": lambda s, b, h, q, kv: sum((s * n for n in range(2, 40)), s)}, "a score of 77 operations an element, more than 64"),
        ({"shape": (1, 2, 128 * 128, 64), "mask": masks.neighborhood((128, 128), 13)}, "a grid of (128, 128) is read in patches"),
        ({}, None),
        ({"max_scores": True}, "max_scores"),
        ({"scale": -1.0}, None),
        ({"dropout_p": 0.25, "seed": 1}, None),
        ({"score": scores.softcap(30.0)}, None),
        ({"shape": (1, 2, 512, 256)}, None),
        ({"shape": (1, 2, 512, 72), "v_dim": 24}, None),
        ({"mask": masks.causal, "score": scores.sinks(torch.zeros(4))}, None),
        ({"shape": (1, 2, 64 * 64, 128), "mask": masks.neighborhood((64, 64), 63)}, None),
    ],
)
def test_refusals_name_what_was_given(asked: dict[str, object], reason: str | None) -> None:
    said = refuse_problem(problem(**asked))
    assert said is None if reason is None else reason in str(said)


@pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))
def test_a_kernel_that_does_not_compile_is_gluons_unless_the_engine_was_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    recorded, load, tried = record(monkeypatch), kernel_cache.load, []

    def fails(key: Any, request: KernelRequest, table: Any, device: int) -> Any:
        if request.kernel == "cuda_fwd":
            tried.append(request)
            raise nvrtc.CompileError("NVRTC could not compile forward.cu: out of luck")
        return load(key, request, table, device)

    monkeypatch.setattr(kernel_cache, "load", fails)
    monkeypatch.setattr(structure, "_prepared", {})
    monkeypatch.setattr(folders, "_warned", set())
    monkeypatch.setattr(CudaEngine, "serves", {"auto": -1})  # the first that is asked
    monkeypatch.setattr(CudaEngine, "defers", lambda self, problem, others: None)
    inputs = [torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    for _ in range(3):
        recorded.clear()
        tw.attention(*inputs, mask=masks.causal, backend="auto")
        assert [r.kernel for r in recorded if r.kernel.endswith("_fwd")] == ["hopper_fwd"]
    assert len(tried) == 1
    assert [r.getMessage() for r in caplog.records] == ["NVRTC could not compile forward.cu: out of luck; calls like this one are served by 'gluon'"]
    with pytest.raises(nvrtc.CompileError, match="out of luck"):
        tw.attention(*inputs, mask=masks.causal, backend="cuda")


def test_what_the_gluon_engine_refuses_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GluonEngine, "refuse", lambda self, p: "the GPU has 8.0")
    assert engine_named("cuda").refuse(problem()) == "the GPU has 8.0"


def test_without_its_compiler_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GluonEngine, "refuse", lambda self, p: None)
    monkeypatch.setattr(nvrtc, "MAJORS", (0,))
    for cached in (nvrtc.library, nvrtc.version, nvrtc._refusal):
        cached.cache_clear()
    try:
        assert "pip install nvidia-cuda-nvrtc" in str(engine_named("cuda").refuse(problem()))
    finally:
        for cached in (nvrtc.library, nvrtc.version, nvrtc._refusal):
            cached.cache_clear()


def test_a_compiler_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 0))
    nvrtc._refusal.cache_clear()
    try:
        assert "needs NVRTC 12.3 or newer, got 12.0" in str(nvrtc.refusal())
    finally:
        nvrtc._refusal.cache_clear()


def test_the_library_is_looked_for_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest first, in the packages before the system's folders; one that does not load is passed over."""
    tried: list[str] = []

    def load(path: str) -> object:
        tried.append(path)
        if path == "libnvrtc.so.12":
            return "found"
        raise OSError

    monkeypatch.setattr(nvrtc, "_loaded", load)
    monkeypatch.setattr(nvrtc.sys, "path", ["/packages"])
    monkeypatch.setattr(glob, "glob", lambda pattern: [pattern.replace("*", "cu13")] if pattern.endswith("13") else [])
    try:
        for cuda in (None, "12.8"):  # torch's, whose driver may not load what a newer one compiles
            monkeypatch.setattr(torch.version, "cuda", cuda)
            nvrtc.library.cache_clear()
            assert nvrtc.library() == "found"
    finally:
        nvrtc.library.cache_clear()
    assert tried == ["/packages/nvidia/cu13/lib/libnvrtc.so.13", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.12"]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (8, 8), (96, 96), (72, 200), (200, 72), (192, 128), (8, 256), (256, 8)])
@pytest.mark.parametrize("beside", [{}, {"score": scores.alibi(2)}, {"score": scores.alibi(2), "dropout_p": 0.1, "seed": 1}], ids=["plain", "ALiBi", "dropout"])
def test_tiles_fit_and_are_the_gluon_engines_where_there_is_a_map(beside: dict[str, object], dims: tuple[int, int], mapped: bool) -> None:
    p = problem((1, 2, 512, dims[0]), dims[1], mask=DOCUMENTS if mapped else None, **beside)
    for config in forward_forms(p, mapped):
        assert config.shared <= shared_memory(90)
        assert not mapped or config.tile == gluon.forward_config(p).tile
        assert config.block_m <= 256 and config.block_n % 16 == 0 and config.block_n <= 256  # boxes of TMA, shapes of wgmma
        assert dims[0] <= config.d < dims[0] + 16 and config.d % 16 == 0 and config.dv == dims[1]
        assert not mapped or config.block_n <= 128  # a word of mask bits for each row and thread


@pytest.mark.parametrize(("dim", "keys"), [(96, 192), (128, 176), (192, 112), (256, 80)])
def test_without_a_map_a_step_takes_as_many_keys_as_fit(dim: int, keys: int) -> None:
    assert {config.block_n for config in forward_forms(problem((1, 2, 512, dim)), mapped=False)} == {keys}


@pytest.mark.parametrize(
    ("asked", "anchored"),
    [
        ({}, True),
        ({"score": scores.softcap(50.0)}, True),
        ({"score": scores.softcap(60.0)}, False),
        ({"score": scores.softcap(5.0), "dtype": torch.float16}, False),
        ({"score": scores.alibi(4)}, False),
        ({"scale": -1.0}, False),
    ],
)
def test_scores_that_may_rise_have_maxima_in_every_step(asked: dict[str, object], anchored: bool) -> None:
    (config, *_) = forward_forms(problem(**asked), mapped=False)
    assert config.anchored == anchored and config.scored == bool(asked)


@pytest.mark.parametrize(("length", "cluster"), [(1, 1), (128, 1), (129, 2), (256, 2), (300, 1), (900, 2), (1024, 2), (1100, 2)])
def test_programs_share_keys_where_query_tiles_come_in_pairs(length: int, cluster: int) -> None:
    assert forward_config(problem((1, 2, length, 128)), mapped=False).cluster == cluster


@pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))
class TestLaunches:
    """The kernel's request; nothing is compiled."""

    @pytest.fixture(autouse=True)
    def _compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))

    def request(self, **asked: object) -> object:
        from tilewise.engines.cuda import aot
        from tilewise.engines.gpu.launch import request_of

        partial = bool(asked.pop("partial", False))
        return request_of(aot.forward_launches(problem(**asked).replaced(partial=partial))[0]()[0], 90)

    def test_the_key_has_what_the_code_depends_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tilewise.engines.gpu.kernel_cache import store_key

        usual = store_key(self.request())
        for other in (
            {"dropout_p": 0.5, "seed": 1},
            {"shape": (2, 4, 512, 128)},
            {"dtype": torch.float16},
            {"mask": masks.causal},
            {"mask": DOCUMENTS},
            {"score": scores.sinks(torch.zeros(4))},
            {"score": scores.alibi(4)},
            {"partial": True},
        ):
            assert store_key(self.request(**other)) != usual
        for same in ({"shape": (3, 6, 100, 64)}, {"scale": 0.5}, {"kv_heads": 1}):  # numbers are arguments
            assert store_key(self.request(**same)) == usual
        assert store_key(self.request(score=scores.softcap(20.0))) == store_key(self.request(score=scores.softcap(30.0), shape=(1, 4, 100, 64)))
        assert store_key(self.request(score=scores.softcap(20.0))) != store_key(self.request(score=scores.alibi(4)))
        masked, band = (store_key(self.request(mask=mask)) for mask in (DOCUMENTS, masks.causal))
        assert masked == store_key(self.request(mask=lambda b, h, q, kv: (q // 7 + h) % 3 == kv % 3))  # masks are bits
        assert masked != band == store_key(self.request(mask=masks.sliding_window(11, 3)))  # or two numbers
        monkeypatch.setattr(nvrtc, "version", lambda: (13, 1))
        assert store_key(self.request()) != usual
        monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
        monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-lineinfo"))
        assert store_key(self.request()) != usual

    def test_the_struct_of_arguments_has_what_is_packed(self) -> None:
        from tilewise.engines.cuda.source import arguments

        struct, types = arguments(self.request(mask=DOCUMENTS))
        assert types[0] == types[9] == types[18] == TENSOR_MAP and types.count(TENSOR_MAP) == 3
        assert types[27:31] == ["*bf16", "*fp32", "*fp32", "*i32"] and types[31:39] == ["*i32"] * 8  # out, lse, maxima, counter; the schedule
        assert "TensorMap q;\n    int q_sizes[4];\n    long long q_strides[4];" in struct and "bfloat* out;" in struct and "int* first_bits;" in struct
        assert "first_bits" not in arguments(self.request())[0] and "sinks" not in struct and "int low;" not in struct
        band = arguments(self.request(mask=masks.causal))[0]
        assert "int low;\n    int high;" in band and "first_bits" not in band
        scored, types = arguments(self.request(score=[scores.alibi(4), lambda s, b, h, q, kv: s * 0.5 + kv * 2**40]))
        assert "float* p_0;" in scored and "long long i_" in scored and "float f_0;" in scored and "int s_0;" in scored and "*fp32" in types[35:]
        assert "float* sinks;" in arguments(self.request(score=scores.sinks(torch.zeros(4))))[0]

    def test_parts_are_written_in_fp32(self) -> None:
        from tilewise.engines.cuda.source import arguments

        assert "float* out;" in arguments(self.request(partial=True))[0]

    @pytest.mark.parametrize(("busy", "programs"), [(0, 132), (16, 116), (15, 116), (200, 2)])
    def test_programs_leave_busy_multiprocessors_free(self, busy: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """In pairs; the kernel is the same."""
        from tilewise.engines.cuda import aot
        from tilewise.engines.gluon import aot as gluon_aot
        from tilewise.engines.gpu import limits
        from tilewise.engines.gpu.kernel_cache import store_key
        from tilewise.engines.gpu.launch import request_of

        monkeypatch.setattr(limits, "sm_count", lambda device: 132)
        p = problem((4, 64, 8192, 128)).replaced(busy_sms=busy)
        launch, theirs = aot.forward_launches(p)[0]()[0], gluon_aot.forward_launches(p)[0]()[0]
        assert launch.constants["C"].cluster == 2 and launch.programs == programs
        assert theirs.programs == max(2, 132 - busy)
        assert store_key(request_of(launch, 90)) == store_key(self.request(shape=(1, 8, 8192, 128)))

    def test_keys_are_shared_by_whole_pairs(self) -> None:
        from tilewise.engines.cuda import aot

        p = problem((1, 3, 512, 128), kv_heads=1)
        both, alone = (make()[0] for make in aot.forward_launches(p)[:2])
        assert (both.constants["C"].cluster, alone.constants["C"].cluster) == (2, 1)
        assert both.programs % 2 == 0
        assert math.isclose(both.static_args["scale"], 128**-0.5 * math.log2(math.e))
