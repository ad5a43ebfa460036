"""Which engine serves a call on GPUs that are not here, and that `auto` hands cuDNN nothing."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import masks, scores
from tilewise.core.output import Output
from tilewise.core.problem import Options, make_problem
from tilewise.engines import Request, fa2, gluon, triton
from tilewise.engines.cuda import nvrtc
from tilewise.engines.cuda.refusals import faster_elsewhere
from tilewise.engines.fa2 import Fa2Engine, FlashPlan
from tilewise.engines.gpu import limits
from tilewise.engines.native import NativeEngine
from tilewise.frontend.dispatch import Choice, choose

A100, RTX_3090, RTX_4090, H100, B200, RTX_5090, T4 = (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (7, 5)


class OnGpu:
    """A problem as it is on a GPU that is not here."""

    def __init__(self, shape: tuple[int, ...], kv_len: int, dtype: torch.dtype, v_dim: int, mask: Any, score: Any, learns: bool, options: Options) -> None:
        query = torch.empty(shape, dtype=dtype, requires_grad=learns)
        key = torch.empty((shape[0], shape[1], kv_len, shape[3]), dtype=dtype)
        self._problem = make_problem(query, key, torch.empty((*key.shape[:3], v_dim), dtype=dtype), mask, score, options)[0]
        self.device = torch.device("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)


Chooses = Callable[..., Choice]


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> Chooses:
    monkeypatch.setattr(triton, "NO_TRITON", None)
    monkeypatch.setattr(gluon, "NO_GLUON", None)
    monkeypatch.setattr(gluon, "finds_map_addresses", lambda: True)  # asks the CUDA driver
    monkeypatch.setattr(nvrtc, "refusal", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    def chosen(
        capability: tuple[int, int],
        shape: tuple[int, ...] = (1, 16, 4096, 64),
        *,
        kv_len: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        v_dim: int | None = None,
        mask: Any = None,
        score: Any = None,
        learns: bool = False,
        backend: str = "auto",
        needs_lse: bool = False,
        **options: Any,
    ) -> Choice:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        problem: Any = OnGpu(shape, kv_len or shape[2], dtype, v_dim or shape[3], mask, score, learns, Options(**options))
        return choose(problem, Request(backend, "a test", needs_lse, False), ask_all=True)

    return chosen


LARGE, SMALL, DECODING = {"shape": (1, 16, 4096, 64)}, {"shape": (1, 2, 256, 64)}, {"shape": (4, 8, 1, 128), "kv_len": 8192}
FLUX = {"shape": (1, 24, 4608, 128)}

# docs/choosing.md has the same table, with the reasons.
TABLE = [
    (H100, LARGE, "cuda"),
    (H100, FLUX, "cuda"),
    (H100, {**FLUX, "learns": True}, "cuda"),
    (H100, {**LARGE, "mask": masks.causal}, "cuda"),
    (H100, {"shape": (1, 16, 4096, 256)}, "cuda"),
    (H100, {**LARGE, "mask": masks.causal, "score": scores.softcap(30.0)}, "cuda"),
    (H100, {**LARGE, "score": scores.relative_bias(torch.zeros(16, 129))}, "cuda"),
    (H100, {**LARGE, "mask": masks.causal, "score": scores.alibi(16)}, "cuda"),
    (H100, {**LARGE, "score": scores.alibi(16)}, "gluon"),
    (H100, {**LARGE, "mask": masks.document(torch.arange(4096) // 500), "score": scores.alibi(16)}, "gluon"),
    (H100, {**LARGE, "mask": masks.causal, "score": lambda s, b, h, q, kv: s * 2}, "cuda"),
    (H100, {**LARGE, "mask": masks.document(torch.arange(4096) // 500)}, "cuda"),
    (H100, {**LARGE, "mask": masks.causal, "score": scores.alibi(16), "dropout_p": 0.1, "seed": 1}, "cuda"),
    (H100, {**LARGE, "mask": masks.causal, "score": lambda s, b, h, q, kv: sum((s * n for n in range(2, 40)), s)}, "gluon"),
    (H100, SMALL, "fa2"),
    (H100, {**SMALL, "mask": masks.causal}, "triton"),
    (H100, DECODING, "fa2"),
    (H100, {**DECODING, "mask": lambda b, h, q, kv: kv < 100}, "triton"),
    (H100, {"shape": (1, 16, 4096, 320)}, "triton"),
    (H100, {**LARGE, "dtype": torch.float32}, "native"),
    (B200, LARGE, "triton"),
    (B200, SMALL, "fa2"),
    (B200, DECODING, "fa2"),
    *[(small, call, "fa2") for small in (A100, RTX_3090, RTX_4090, RTX_5090) for call in (LARGE, SMALL, DECODING, FLUX)],
    *[(small, {**LARGE, "mask": masks.causal}, "triton") for small in (A100, RTX_4090, RTX_5090)],
    (RTX_4090, {"shape": (1, 2, 256, 208), "learns": True}, "triton"),
    (RTX_4090, {"shape": (1, 2, 256, 256), "learns": True}, "fa2"),
    (T4, LARGE, "native"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("mask", "score", "is_left"),
    [
        (None, lambda s, b, h, q, kv: s * 2, False),
        (None, scores.alibi(2), True),
        (masks.causal, scores.alibi(2), False),
        (masks.causal & masks.sliding_window(5), lambda s, b, h, q, kv: s - 0.1 * (q - kv), False),
        (masks.causal, lambda s, b, h, q, kv: s + torch.where(q - kv < 3, -9.0, 0.0), True),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_score_is_looked_at_while_compiling(mask: Any, score: Any, is_left: bool, dynamic: bool) -> None:
    def left(query: Tensor) -> Tensor:
        return query + int(faster_elsewhere(make_problem(query, query, query, mask, score, Options())[0]) is not None)

    torch._dynamo.reset()
    assert torch.compile(left, fullgraph=True, backend="eager", dynamic=dynamic)(torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)).max() == is_left


@pytest.mark.parametrize(("gpu", "call", "engine"), TABLE)
def test_who_serves_what(gpu: tuple[int, int], call: dict[str, Any], engine: str, chooses: Chooses) -> None:
    found = chooses(gpu, **call).engine
    assert found is not None and found.name == engine


@pytest.mark.parametrize("gpu", [A100, RTX_4090, H100, B200, RTX_5090])
@pytest.mark.parametrize("backend", ["auto", "flash", "flex"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_but_its_name_hands_sdpa_a_call_that_may_reach_cudnn(gpu: tuple[int, int], backend: str, dtype: torch.dtype, chooses: Chooses) -> None:
    calls: list[dict[str, Any]] = [LARGE, SMALL, DECODING, FLUX, {"shape": (1, 2, 64, 60)}, {"v_dim": 32}, {"deterministic": True}, {"learns": True}]
    for call in calls:
        choice = chooses(gpu, dtype=dtype, backend=backend, **call)
        assert choice.engine is not None and choice.engine.name != "native"
        said = {v.engine: v.reason for v in choice.verdicts}
        assert "cuDNN" in str(said["native"]) if "native" in said else backend == "flex"
    assert chooses(gpu, dtype=dtype, backend="native", **LARGE).engine.name == "native"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"dtype": torch.float32}, "float16 and bfloat16, got torch.float32"),
        ({"mask": masks.causal}, "without mask"),
        ({"score": scores.softcap(3.0)}, "without mask, score"),
        ({"dropout_p": 0.1, "seed": 1}, "or dropout"),
        ({"shape": (1, 2, 64, 60)}, "multiple of 8 up to 256, got 60"),
        ({"shape": (1, 2, 64, 264)}, "up to 256, got 264"),
        ({"v_dim": 32}, "got 64 and 32"),
        ({"scale": -0.5}, "positive scale, got -0.5"),
        ({"scale": 0.0}, "positive scale, got 0.0"),
        ({"shape": (65536, 1, 8, 8)}, "up to 65535 batch elements"),
        ({"needs_lse": True}, "lse"),
        ({"deterministic": True}, "use_deterministic_algorithms"),
    ],
)
def test_fa2_refuses_with_a_reason(call: dict[str, Any], reason: str, chooses: Chooses) -> None:
    choice = chooses(A100, backend="fa2", **call)
    assert choice.engine is None and reason in str(choice.verdicts[0].reason)


def test_fa2_tells_who_is_faster(chooses: Chooses) -> None:
    said = {v.engine: v.reason for v in chooses(H100, **LARGE).verdicts}
    assert "faster by 'cuda'" in str(said["fa2"])
    assert chooses(H100, backend="fa2", **LARGE).engine.name == "fa2"


def test_a_torch_without_the_kernel(chooses: Chooses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    choice = chooses(A100, **LARGE)
    assert choice.engine is not None and choice.engine.name == "triton"


def test_torch_compile_has_another_engine(chooses: Chooses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    choice = chooses(A100, **LARGE)
    assert choice.engine is not None and choice.engine.name == "triton"


def test_replays_of_fa2_ask_torch_for_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scale of the call, and nothing else; torch's own kernel for CPUs stands in."""
    asked: list[tuple[Any, ...]] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float) -> tuple[Tensor, ...]:
        asked.append((*others, scale))
        return torch._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)

    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention", kernel)
    query, key, value = torch.randn(3, 1, 2, 64, 16).requires_grad_().unbind()
    p = make_problem(query, key, value, None, None, Options(scale=0.3))[0]
    plan = Fa2Engine().plan(p)
    assert isinstance(plan, FlashPlan)
    wanted = torch.softmax(query @ key.mT * 0.3, -1) @ value
    for output in (plan.replay(query, key, value, ()), Fa2Engine().forward(p, plan)):
        assert isinstance(output, Output)
        torch.testing.assert_close(output.out, wanted)
        (found,), (gradient,) = (torch.autograd.grad(out.square().sum(), query, retain_graph=True) for out in (output.out, wanted))
        torch.testing.assert_close(found, gradient)
    assert asked == [(0.0, False, False, 0.3)] * 2


def test_the_kernel_is_called_as_torch_has_it() -> None:
    schema = str(torch.ops.aten._scaled_dot_product_flash_attention.default._schema)
    assert "Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None" in schema


def test_the_threshold_is_where_it_says(chooses: Chooses) -> None:
    """4 * heads * length^2 * head dim FLOPs."""
    length = 1024
    heads = int(fa2.WORTH_LEAVING / (4 * length**2 * 64))
    assert [chooses(H100, (1, heads + more, length, 64)).engine.name for more in (0, 1)] == ["fa2", "cuda"]


def test_native_on_old_gpus_and_other_makers(chooses: Chooses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability 7.5 has no cuDNN attention, AMD's GPUs have none at all."""
    assert chooses(T4, dtype=torch.float16, **LARGE).engine.name == "native"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert (
        NativeEngine().refuse_request(OnGpu((1, 2, 8, 8), 8, torch.float16, 8, None, None, False, Options()), Request("auto", "a test", False, False)) is None
    )


def test_sizes_that_torch_compile_does_not_know_count_as_large() -> None:
    from tilewise.sizes import less

    taken = torch.compile(lambda t: t + 1 if less(t.shape[0], 100) else t - 1, fullgraph=True, backend="eager", dynamic=True)
    assert [float(taken(torch.zeros(n))[0]) for n in (10, 200, 20)] == [1, -1, 1]

    class Model(torch.nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            found = t.nonzero()  # of as many rows as there are
            return found + 1 if less(found.shape[0], 4) else found - 1

    exported = torch.export.export(Model(), (torch.ones(5),)).module()
    assert exported(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])).tolist() == [[-1], [0], [1]]


@pytest.mark.parametrize(("built_for", "system", "reason"), [(None, "linux", "it needs an NVIDIA GPU"), ("13.0", "win32", "library for Linux, got win32")])
def test_gpus_that_kernels_cannot_be_launched_on(chooses: Chooses, monkeypatch: pytest.MonkeyPatch, built_for: str | None, system: str, reason: str) -> None:
    """ROCm's GPUs are "cuda" devices to torch, with compute capabilities of their own; docs/support.md says what serves there."""
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr("sys.platform", system)
    choice = chooses(H100, **LARGE, mask=masks.causal, score=scores.softcap(30.0))
    said = {verdict.engine: verdict.reason for verdict in choice.verdicts}
    assert all([reason in str(said[engine]) for engine in ("cuda", "gluon", "triton")])
    assert choice.engine is not None and choice.engine.name == "blocked"


@pytest.mark.parametrize(("package", "version", "usable"), [("pytorch-triton-rocm", "3.3.1", True), ("triton-windows", "3.2.0.post1", False), (None, "", True)])
def test_triton_is_known_by_any_package_that_brings_it(monkeypatch: pytest.MonkeyPatch, package: str | None, version: str, usable: bool) -> None:
    def version_of(name: str) -> str:
        if name != package:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    assert (limits.triton_older_than((3, 3)) is None) == usable
