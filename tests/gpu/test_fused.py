"""What only a GPU can tell of the fused engines."""

import sys
import threading
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import masks, scores
from tilewise.engines.gpu import bwd_chunks, structure
from tilewise.engines.gpu.kernel_cache import Counts
from tilewise.frontend import call_cache

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
fused = pytest.mark.parametrize("engine", ["triton", pytest.param("gluon", marks=pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU"))])


def tensors(batch: int, heads: int, length: int, dim: int, kv_heads: int | None = None, kv_len: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    def make(h: int, n: int) -> torch.Tensor:
        return torch.randn(batch, h, n, dim, device="cuda", dtype=dtype, requires_grad=True)

    return make(heads, length), make(kv_heads or heads, kv_len or length), make(kv_heads or heads, kv_len or length)


def both_passes(engine: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    out = tw.attention(query, key, value, backend=engine, **options)
    return out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))


@fused
def test_new_lengths_windows_and_documents_compile_nothing(engine: str) -> None:
    def step(length: int, window: int, batch: int, heads: int) -> None:
        ids = torch.arange(length, device="cuda") // window
        both_passes(engine, *tensors(batch, heads, length, 64), mask=lambda b, h, q, kv: (ids[q] == ids[kv]) & (q - kv <= window) & (q >= kv))

    step(300, 64, 1, 2)
    before = Counts.built + Counts.loaded
    for length, window, batch, heads in ((301, 65, 1, 2), (512, 17, 3, 4), (1000, 128, 2, 1), (64, 16, 1, 8)):
        step(length, window, batch, heads)
    assert Counts.built + Counts.loaded == before


def test_a_growing_cache_needs_no_host_work_and_can_be_captured() -> None:
    torch.manual_seed(0)
    query, key, value = (t.detach() for t in tensors(4, 8, 1, 64, 2, 1024))
    lengths = torch.tensor([10, 200, 1, 1000], device="cuda")
    mask = masks.padding(lengths)

    def step() -> torch.Tensor:
        return tw.attention(query, key, value, mask=mask, enable_gqa=True, backend="triton")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        lengths += 5
        graph.replay()
        wanted = tw.attention(query.double(), key.double(), value.double(), mask=masks.padding(lengths.clone()), enable_gqa=True, backend="reference")
        torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


@fused
def test_offsets_past_two_to_the_31(engine: str) -> None:
    """Row 6: the last rows of a tensor of more than 2^31 elements."""
    length, heads, dim = 2**20, 20, 128
    storage = torch.zeros(1, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    storage[:, -256:] = torch.randn(1, 256, heads, dim, device="cuda", dtype=torch.bfloat16)
    assert storage.numel() > 2**31
    tail = storage.transpose(1, 2)[:, -1:, -256:]
    out = tw.attention(tail, tail, tail, mask=masks.causal, backend=engine)
    whole = tw.attention(
        storage.transpose(1, 2)[:, -1:],
        storage.transpose(1, 2)[:, -1:],
        storage.transpose(1, 2)[:, -1:],
        mask=masks.document((torch.arange(length, device="cuda") >= length - 256).long()) & masks.causal & masks.sliding_window(300),
        backend=engine,
    )
    torch.testing.assert_close(whole[:, :, -256:], out, rtol=2e-2, atol=2e-2)


@fused
def test_captured_views_past_two_to_the_31(engine: str) -> None:
    """Few elements, far apart."""
    table = torch.zeros(2**31 + 256, device="cuda", dtype=torch.uint8).as_strided((2, 256), (2**31, 1))
    table[1] = torch.arange(256, device="cuda") % 7
    inputs = [torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    found, wanted = (
        tw.attention(*given, mask=lambda b, h, q, kv: table[h, kv] != 3, score=lambda s, b, h, q, kv: s + table[h, kv], backend=backend)
        for given, backend in ((inputs, engine), ([t.double() for t in inputs], "reference"))
    )
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


@fused
def test_batch_times_heads_above_65535(engine: str) -> None:
    """Row 9."""
    query = torch.randn(70000, 1, 16, 16, device="cuda", dtype=torch.float16)
    out = tw.attention(query, query, query, mask=masks.causal, backend=engine)
    wanted = torch.nn.functional.scaled_dot_product_attention(query[-8:], query[-8:], query[-8:], is_causal=True)
    torch.testing.assert_close(out[-8:], wanted, rtol=1e-2, atol=1e-2)


@fused
def test_other_streams_with_a_busy_producer(engine: str) -> None:
    """Row 18: the kernel waits for what its stream still computes."""
    stream = torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(stream):
            slow = torch.randn(4096, 4096, device="cuda")
            for _ in range(10):
                slow = slow @ slow / 64
            query = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
            query = query + slow.flatten()[0].nan_to_num(0, 0, 0).to(torch.bfloat16) * 0
            out = tw.attention(query, query, query, mask=masks.causal, backend=engine)
        stream.synchronize()
        wanted = tw.attention(query, query, query, mask=masks.causal, backend="reference")
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


@fused
def test_gradients_are_bitwise_the_same_over_30_runs(engine: str) -> None:
    """Row 20."""
    inputs = tensors(2, 4, 777, 64, 2)
    first = both_passes(engine, *inputs, mask=masks.causal, enable_gqa=True, deterministic=True)
    for _ in range(30):
        for a, b in zip(first, both_passes(engine, *inputs, mask=masks.causal, enable_gqa=True, deterministic=True), strict=True):
            assert torch.equal(a, b)


@fused
def test_two_threads_cold(engine: str) -> None:
    """Row 21."""
    query, key, value = (t.detach() for t in tensors(1, 2, 333, 96))
    found: list[torch.Tensor] = []

    def work() -> None:
        found.append(tw.attention(query, key, value, mask=lambda b, h, q, kv: (q >= kv) & (q - kv < 41), backend=engine))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4 and all(torch.equal(found[0], f) for f in found)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("score", [None, scores.softcap(20.0)], ids=["no score", "softcap"])
def test_true_float32_unless_tf32_is_allowed(score: Any, dim: int) -> None:
    inputs = tensors(1, 2, 333, dim, dtype=torch.float32)
    options = {"mask": masks.causal, "score": score}
    exact = both_passes("reference", *[t.detach().double().requires_grad_() for t in inputs], **options)

    def errors() -> list[float]:
        return [float((found.double() - e).abs().max() / e.abs().max()) for found, e in zip(both_passes("triton", *inputs, **options), exact, strict=True)]

    assert max(errors()) < 1e-5
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert all(1e-5 < e < 1e-2 for e in errors())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dim", [40, 64, 96, 128, 192, 256, 320, 512])
def test_every_head_dim_fits(dim: int) -> None:
    """An over-budget configuration steps down by itself."""
    table = torch.randn(2, 601, device="cuda", requires_grad=True)
    out = both_passes("triton", *tensors(1, 2, 300, dim), mask=masks.causal, score=[scores.relative_bias(table), scores.softcap(20.0)])
    assert all(t.isfinite().all() for t in out)


@fused
def test_compiled_fullgraph_equals_eager(engine: str) -> None:
    ids = torch.arange(300, device="cuda") // 50
    inputs = tensors(1, 2, 300, 64)

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return tw.attention(query, key, value, mask=lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), backend=engine)

    eager, compiled = step(*inputs, ids), torch.compile(step, fullgraph=True)(*inputs, ids)
    assert torch.equal(eager, compiled)
    for a, b in zip(torch.autograd.grad(eager.sum(), inputs), torch.autograd.grad(compiled.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)  # the Hopper engine adds up dQ in any order


# -- the Hopper engine -----------------------------------------------------------------------------------------------

hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")


@hopper
def test_hopper_is_the_first_choice_and_says_what_it_refuses() -> None:
    inputs = tensors(1, 16, 2048, 64)
    for backend in ("flex", "flash"):
        assert tw.explain(*inputs, mask=masks.causal, backend=backend).engine == "cuda"
        assert tw.explain(*tensors(1, 16, 2048, 256), mask=masks.causal, backend=backend).engine == "cuda"
        assert tw.explain(*tensors(1, 2, 300, 64), mask=masks.causal, backend=backend).engine == "triton"  # starts sooner
    assert tw.explain(*inputs, mask=masks.causal, score=scores.softcap(30.0), backend="flex").engine == "cuda"
    assert tw.explain(*inputs, mask=masks.causal, score=scores.alibi(16), backend="flex").engine == "cuda"
    assert tw.explain(*inputs, score=scores.alibi(16), backend="flex").engine == "gluon"  # maxima in every step
    for refused, reason in (
        (tensors(1, 2, 300, 64, dtype=torch.float32), "either bfloat16 or float16"),
        (tensors(1, 2, 300, 60), "multiples of 8"),
        (tensors(1, 2, 300, 512), "up to 256"),
        (tensors(1, 2, 1, 64, kv_len=300), "splitting the keys"),
    ):
        said = tw.explain(*refused, backend="flex")
        assert said.engine == "triton" and reason in next(v.reason for v in said.verdicts if v.engine == "gluon")


@hopper
@pytest.mark.parametrize(("engine", "dim"), [("gluon", 64), ("gluon", 128), ("gluon", 256), ("cuda", 64), ("cuda", 128), ("cuda", 256)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hopper_hears_nothing_of_masked_keys(engine: str, dim: int, value: float) -> None:
    """Row 2: a poisoned key changes nothing for queries that do not attend to it, nor for keys that only those attend to, though
    they share tiles with it."""
    torch.manual_seed(0)
    second, bad = 300, 333  # where the second document begins, and its poisoned key
    mask = masks.document((torch.arange(500, device="cuda") >= second).long()) & masks.causal
    query, key, value_ = tensors(2, 4, 500, dim, 2)
    spoilt = [t.detach().clone() for t in (key, value_)]
    for t in spoilt:
        t[:, :, bad] = value
    grad = torch.zeros_like(query)
    grad[:, :, :bad] = torch.randn_like(grad[:, :, :bad])

    def passes(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        k, v = k.detach().requires_grad_(), v.detach().requires_grad_()
        out = tw.attention(query, k, v, mask=mask, enable_gqa=True, backend=engine)
        dq, dk, dv = torch.autograd.grad(out, (query, k, v), grad)
        return [out[:, :, :bad], dq[:, :, :bad], dk[:, :, :second], dv[:, :, :second]]

    for a, b in zip(passes(key, value_), passes(*spoilt), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@hopper
@pytest.mark.parametrize("dims", [(128, 128), (136, 136), (192, 128), (64, 256), (256, 256)], ids=str)
@pytest.mark.parametrize("lengths", [(64, 64), (65, 1), (500, 333), (1100, 1100)], ids=str)  # one step and many, one key tile and many
@pytest.mark.parametrize("what", ["full", "causal", "softcap", "nothing for some keys"])
def test_hopper_gradients_are_those_of_float64(what: str, lengths: tuple[int, int], dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    (n_q, n_kv), (dim, v_dim) = lengths, dims
    options: dict[str, Any] = {
        "full": {},
        "causal": {"mask": masks.causal},
        "softcap": {"mask": masks.causal, "score": scores.softcap(5.0)},
        "nothing for some keys": {"mask": lambda b, h, q, kv: kv < 64},
    }[what]
    query, key, value = (torch.randn(2, h, n, d, device="cuda") for h, n, d in ((4, n_q, dim), (2, n_kv, dim), (2, n_kv, v_dim)))
    grad = torch.randn(2, 4, n_q, v_dim, device="cuda")

    def gradients(engine: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [t.bfloat16().to(dtype).requires_grad_() for t in (query, key, value)]
        out = tw.attention(*inputs, enable_gqa=True, backend=engine, **options)
        return torch.autograd.grad(out, inputs, grad.bfloat16().to(dtype))

    for name, found, wanted in zip(("dq", "dk", "dv"), gradients("gluon", torch.bfloat16), gradients("reference", torch.float64), strict=True):
        error = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-3 * wanted.numel() ** 0.5)
        assert error < 1e-2, f"{name}: {error:.1e}"


@hopper
@pytest.mark.parametrize("engine", ["gluon", "cuda"])
@pytest.mark.parametrize("scale", [1.0, 133120.0])
@pytest.mark.parametrize("mask", [None, masks.causal], ids=["full", "causal"])
def test_hopper_survives_huge_logits(mask: Any, scale: float, engine: str) -> None:
    """Row 5. Weights whose exponent is all rounding may be anything, so several draws: sums of them may be finite until they are scaled."""
    for seed in range(10):
        torch.manual_seed(seed)
        query, key, value = tensors(1, 2, 150, 64)
        big = [(t.detach() * 50).requires_grad_() for t in (query, key)]
        out, *found = both_passes(engine, *big, value, scale=scale, mask=mask)
        assert all(t.isfinite().all() for t in (out, *found)), seed
        assert out.abs().max() <= value.abs().max() + 1e-5


@hopper
@pytest.mark.parametrize("engine", ["gluon", "cuda"])
def test_hopper_kernels_can_be_captured_and_replayed(engine: str) -> None:
    query, key, value = (t.detach() for t in tensors(2, 4, 700, 128))
    step = lambda: tw.attention(query, key, value, mask=masks.causal, backend=engine)
    wanted = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted) and torch.equal(step(), wanted)


@hopper
@pytest.mark.parametrize(("batch", "kv_heads", "count"), [(4, 2, 4), (1, 6, 3), (6, 1, 3)])
def test_hopper_gradients_in_parts_are_those_of_the_whole(batch: int, kv_heads: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.gluon import run

    query, key, value = tensors(batch, 2 * kv_heads, 300, 64, kv_heads)

    def gradients() -> list[torch.Tensor]:
        out, lse = tw.attention(query, key, value, mask=masks.causal, enable_gqa=True, backend="gluon", return_lse=True)
        return list(torch.autograd.grad((out * out).sum() + lse.sum(), (query, key, value)))

    wanted = gradients()
    monkeypatch.setattr(bwd_chunks, "MAX_SUMS_BYTES", batch * 2 * kv_heads * 384 * 64 * 4 // count)
    monkeypatch.setattr(structure, "_prepared", {})
    call_cache.forget()
    parts: list[Any] = []
    all_chunks = run.Backward._chunks
    monkeypatch.setattr(run.Backward, "_chunks", lambda self, *given: [parts.append(chunk) or chunk for chunk in all_chunks(self, *given)])
    for a, b in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert len(parts) == 2 * count  # to prepare the launches, and to run them


@pytest.mark.parametrize("dim", [16, 48, 64, 128])
def test_finite_sums_of_dq_are_not_recomputed(dim: int) -> None:
    """Inputs are NaN, so that recomputed rows would be NaN too."""
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines.gpu.bwd_chunks import padded_rows, sums_rows
    from tilewise.engines.gpu.config import padded_dim
    from tilewise.engines.gpu.launch import prepare
    from tilewise.engines.triton import launches
    from tilewise.engines.triton.config import table_config

    nothing = torch.full((2, 3, 200, dim), torch.nan, dtype=torch.bfloat16, device="cuda")
    problem = make_problem(nothing, nothing, nothing, None, None, Options(scale=0.5))[0]
    rows, width = padded_rows(problem), padded_dim(dim)
    sums = torch.randn((sums_rows(problem), width), device="cuda")
    dq = torch.empty_like(nothing)
    floats = torch.full((2, 3, 200), torch.nan, device="cuda")
    tensors = launches.dq_postprocess_tensors(problem, nothing, floats, floats, dq, sums, None)
    launch = launches.dq_postprocess_launch(problem, tensors, table_config("dkdv_atomic_dq", problem))
    prepare(launch, dq.device).launch(list(tensors))
    in_rows = sums.view(2, 3, rows // 8, width // 8, 2, 8, 4).permute(0, 1, 2, 6, 4, 3, 5).reshape(2, 3, rows, width)
    assert torch.equal(dq, (in_rows[:, :, :200, :dim] * 0.5).to(torch.bfloat16))


@pytest.mark.parametrize(("batch", "kv_heads", "count"), [(4, 2, 4), (1, 6, 3)])
def test_triton_gradients_in_parts_are_those_of_the_whole(batch: int, kv_heads: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.triton import run

    inputs = tensors(batch, 2 * kv_heads, 300, 64, kv_heads)
    wanted = both_passes("triton", *inputs, mask=masks.causal, enable_gqa=True)
    monkeypatch.setattr(bwd_chunks, "MAX_SUMS_BYTES", batch * 2 * kv_heads * 384 * 64 * 4 // count)
    done: list[Any] = []
    one = run.run_backward
    monkeypatch.setattr(run, "run_backward", lambda p, *rest: (done.append(p), one(p, *rest))[1])
    for a, b in zip(both_passes("triton", *inputs, mask=masks.causal, enable_gqa=True), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert len(done) == count


@fused
def test_a_call_like_an_earlier_one_takes_the_short_way(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window = torch.tensor(90, device="cuda")  # a mask that holds a tensor is replayed only while that is unchanged: its map depends on the contents
    ways: dict[str, Any] = {"plain": {}, "causal": {"mask": masks.causal}, "a function": {"mask": lambda b, h, q, kv: q - kv < 100}}
    held = {"mask": lambda b, h, q, kv: q - kv < window}
    call = lambda inputs, options: tw.attention(*inputs, backend=engine, **options)
    first, second = ([t.detach() for t in tensors(2, 2, 300, 64)] for _ in range(2))
    wanted = {name: call(second, options) for name, options in ways.items()}
    calls: list[Any] = []
    attention = sys.modules["tilewise.attention"]
    long_way = attention.run_eager
    monkeypatch.setattr(attention, "run_eager", lambda *given: calls.append(given) or long_way(*given))
    for name, options in ways.items():
        call(first, options)
        assert torch.equal(call(second, options), wanted[name]) and not calls
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            out = call(second, options)
        torch.cuda.current_stream().wait_stream(other)
        assert torch.equal(out, wanted[name]) and not calls
    before = call(second, held)
    window += 200
    assert not torch.equal(call(second, held), before) and len(calls) == 2
    trained = [t.detach().requires_grad_() for t in second]
    assert torch.equal(call(trained, ways["causal"]), wanted["causal"]) and len(calls) == 3
    assert call(trained, ways["causal"]).requires_grad


@pytest.mark.parametrize("engine", ["triton", pytest.param("gluon", marks=hopper)])
def test_dropout_in_a_cuda_graph_is_another_at_every_replay(engine: str) -> None:
    query, key, value = (t.detach() for t in tensors(1, 2, 200, 64))

    def call() -> torch.Tensor:
        return tw.attention(query, key, value, dropout_p=0.5, backend=engine)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replayed(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        found = []
        for _ in range(2):
            graph.replay()
            found.append(out.clone())
        return found

    first, second = replayed(0)
    assert not torch.equal(first, second)
    again = replayed(0)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
