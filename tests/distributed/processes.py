"""What every process of a spawned test does (spawned.py); an assertion that fails on one rank ends the test."""

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.distributed.cases import BATCH, HEAD_DIM, HEADS, KV_HEADS, LongCase, long_cases, problems
from tests.support.cases import CASES, Case, Inputs, make
from tests.support.error_rule import Results, check, finish
from tilewise import distributed as twd
from tilewise import masks
from tilewise.distributed.exchange import KeyExchange, Stage
from tilewise.distributed.team import GroupHandle
from tilewise.errors import InputError, UnsupportedError
from tilewise.flex import AuxRequest, create_block_mask, flex_attention
from tilewise.functional import scaled_dot_product_attention
from tilewise.varlen import varlen_attention

# -- the shared cases, by the error rule -------------------------------------------------------------------------------


def check_shared_cases(step: str) -> None:
    """Every step-th of the cases that all engines are tested over, in shards of uneven lengths, some of them empty."""
    checked = 0
    for case in [c for c in CASES if _can_be_shared(c)][:: int(step)]:
        for dtype in (torch.float32, torch.bfloat16):
            if dtype in case.dtypes and not has_given_tiles(make(case, dtype, dtype, "cpu").masking.given):
                _check_case(case, dtype)
                checked += 1
    assert checked > 20, checked


def check_generated_cases(count: str) -> None:
    """So many masks and scores of the grammar. All ranks draw the same."""

    @settings(max_examples=int(count), derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(problems())
    def check_one(case: Case) -> None:
        _check_case(case, torch.float32)

    check_one()


def _check_case(case: Case, dtype: torch.dtype) -> None:
    """The first rank has the reference."""
    if dist.get_rank() == 0:
        check(case, "blocked", dtype=dtype, computed=by_ranks)
    else:
        by_ranks(case, make(case, dtype, dtype, "cpu"), "blocked")


def _can_be_shared(case: Case) -> bool:
    square = case.kv == (case.batch, case.kv[1], case.q_len) and case.q_len > 0 and case.batch > 0 and case.heads > 0
    return square and not case.options.get("is_causal")


def has_given_tiles(mask: Any) -> bool:
    """These cannot be shared, and the plan says so."""
    return hasattr(mask, "kv_num_blocks") or (isinstance(mask, tw.TileMap) and mask.given)


def by_ranks(case: Case, inputs: Inputs, engine: str) -> Results:
    ranks = dist.get_world_size()
    lengths = [case.q_len // ranks + (3 if r == 0 else 0) for r in range(ranks - 1)] + [0]
    lengths[-1] = case.q_len - sum(lengths)
    if lengths[-1] < 0:
        lengths = [case.q_len] + [0] * (ranks - 1)
    sizes: dict[str, Any] = {"heads": case.heads, "kv_heads": case.kv[1], "head_dim": case.head_dim, "v_dim": case.values, "batch": case.batch}
    plan = twd.plan(inputs.masking.given, length=case.q_len, shard_sizes=lengths, head_groups=1, **sizes)
    q, k, v = [plan.shard(t, 2) for t in inputs.bhsd]
    options = {name: value for name, value in case.options.items() if name in ("scale", "deterministic", "dropout_p", "seed")}
    out, lse = twd.attention(q, k, v, plan=plan, score=inputs.scores or None, return_lse=True, backend=engine, **options)
    out, lse = plan.unshard(out, 2), plan.unshard(lse, 2)
    found = finish(case, inputs, out, lse if case.returns_lse else None)
    for name in ("query", "key", "value"):  # each rank has those of its own tokens
        if name in found.gradients:
            found.gradients[name] = found.gradients[name].clone()
            dist.all_reduce(found.gradients[name])
    return found


# -- long sequences: dealt chunks, every strategy ------------------------------------------------------------------------


def check_long_cases(length: str, step: str, *ways: str) -> None:
    """Output, lse and every gradient of every step-th case under each way to share it, beside one process."""
    for case in long_cases(int(length))[:: int(step)]:
        whole = _by_one_process(case, int(length))
        for way in ways:
            try:
                _check_long(case, int(length), WAYS[way], whole)
            except AssertionError as error:
                raise AssertionError(f"{case.name}, {way}: {error}") from error


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "auto": lambda: {},
    "needed": lambda: {"strategy": "needed", "head_groups": 1},
    "gather": lambda: {"strategy": "gather", "head_groups": 1},
    "heads": lambda: {"strategy": "heads"},
    "pairs": lambda: {"head_groups": 2},
    "mesh": lambda: {"group": init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("rows", "heads"))},
    "stages": lambda: {"strategy": "needed", "head_groups": 1, "stages": 2},
    "gather in stages": lambda: {"strategy": "gather", "head_groups": 1, "stages": 2},
    "contiguous": lambda: {"order": "contiguous", "head_groups": 1},
}


class Drawn:
    """Tensors of a long case, the same in every process."""

    def __init__(self, length: int) -> None:
        g = torch.Generator().manual_seed(0)
        shapes = ((BATCH, HEADS, length, HEAD_DIM), (BATCH, KV_HEADS, length, HEAD_DIM), (BATCH, KV_HEADS, length, HEAD_DIM), (HEADS, 2 * length + 1), (HEADS,))
        self.leaves = [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]
        self.grad_out = torch.randn(shapes[0], generator=g)
        self.grad_lse = torch.randn(shapes[0][:3], generator=g)


def _by_one_process(case: LongCase, length: int) -> list[Tensor | None]:
    """out, lse and gradients, computed by the first process and sent to the others."""
    drawn = Drawn(length)
    q, k, v, table, logits = drawn.leaves
    out, lse = torch.empty_like(q), torch.empty_like(drawn.grad_lse)
    for leaf in drawn.leaves:
        leaf.grad = torch.full_like(leaf, torch.nan)
    if dist.get_rank() == 0:
        score = None if case.score is None else case.score(table, logits)
        out, lse = tw.attention(q, k, v, mask=case.mask, score=score, enable_gqa=True, return_lse=True, backend="blocked", **case.options)
        gradients = torch.autograd.grad((out, lse), drawn.leaves, (drawn.grad_out, torch.where(lse == -torch.inf, 0.0, drawn.grad_lse)), allow_unused=True)
        for leaf, gradient in zip(drawn.leaves, gradients, strict=True):
            leaf.grad = leaf.grad if gradient is None else gradient
    found = [out.detach().contiguous(), lse.detach().contiguous(), *[t.grad for t in drawn.leaves if t.grad is not None]]
    for tensor in found:
        dist.broadcast(tensor, 0)
    return [None if bool(t.isnan().any()) else t for t in found]


def _check_long(case: LongCase, length: int, way: Callable[[], dict[str, Any]], whole: list[Tensor | None]) -> None:
    drawn = Drawn(length)
    q, k, v, table, logits = drawn.leaves
    plan = twd.plan(case.mask, length=length, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, batch=BATCH, **way())
    score = None if case.score is None else case.score(table, logits)
    out, lse = twd.attention(plan.shard(q, 2), plan.shard(k, 2), plan.shard(v, 2), plan=plan, score=score, return_lse=True, **case.options)
    seen = torch.where(lse == -torch.inf, 0.0, lse)
    (out * plan.shard(drawn.grad_out, 2)).sum().add((seen * plan.shard(drawn.grad_lse, 2)).sum()).backward()
    for name, found, exact in zip(("out", "lse"), (out, lse), whole, strict=False):
        assert exact is not None
        torch.testing.assert_close(found.detach(), plan.shard(exact, 2), rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    for name, leaf, exact in zip(("query", "key", "value"), drawn.leaves, whole[2:], strict=False):
        assert leaf.grad is not None and exact is not None
        torch.testing.assert_close(plan.shard(leaf.grad, 2), plan.shard(exact, 2), rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"gradient of {name}: {m}")
    for name, leaf, exact in zip(("table", "sinks"), drawn.leaves[3:], whole[5:], strict=True):
        assert (leaf.grad is None) == (exact is None)
        if leaf.grad is not None:  # whole on every rank
            torch.testing.assert_close(leaf.grad, exact, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"gradient of {name}: {m}")


# -- what users build on ---------------------------------------------------------------------------------------------------


def check_bits() -> None:
    """In one stage, the forward has the bits of one process, with dropout too; with deterministic=True, so has a second run's backward."""
    length, seeds = 1000, {"dropout_p": 0.3, "seed": 11}
    document = torch.arange(length) // 130
    for mask in (masks.causal, masks.causal & masks.sliding_window(200), lambda b, h, q, kv: document[q] == document[kv]):
        drawn = Drawn(length)
        q, k, v = drawn.leaves[:3]
        plan = twd.plan(mask, length=length, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, strategy="needed", head_groups=1)
        for options in ({}, seeds):
            found, lse = twd.attention(plan.shard(q, 2), plan.shard(k, 2), plan.shard(v, 2), plan=plan, return_lse=True, backend="cpp", **options)
            out, whole_lse = tw.attention(q, k, v, mask=mask, enable_gqa=True, return_lse=True, backend="cpp", **options)
            assert torch.equal(plan.shard(out, 2), found) and torch.equal(plan.shard(whole_lse, 2), lse)
        gradients = []
        for _ in range(2):
            shards = [plan.shard(t, 2).detach().requires_grad_() for t in (q, k, v)]
            twd.attention(*shards, plan=plan, deterministic=True, **seeds).backward(plan.shard(drawn.grad_out, 2))
            gradients.append([t.grad for t in shards])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def check_uses() -> None:
    """shard, unshard, several masks, layouts, the context, what is printed."""
    length = 700
    window = masks.causal & masks.sliding_window(100)
    plan = twd.plan({"full": (masks.causal, 3), "window": (window, 5)}, length=length, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mine = plan.shard(x, 1)
    assert mine.shape[1] == plan.local_length == len(plan.positions) and torch.equal(mine, x[:, plan.positions])
    whole = plan.unshard(mine, 1)
    assert torch.equal(whole, x)
    whole.square().sum().backward()
    assert x.grad is not None and torch.equal(plan.shard(x.grad, 1), 2 * mine)
    q, k, v = (t.detach() for t in Drawn(length).leaves[:3])
    shards = [plan.shard(t, 2) for t in (q, k, v)]
    for name, mask in (("full", masks.causal), ("window", window)):
        expected = plan.shard(tw.attention(q, k, v, mask=mask, enable_gqa=True, backend="blocked"), 2)
        torch.testing.assert_close(twd.attention(*shards, plan=plan[name]), expected)
        turned = twd.attention(*[t.transpose(1, 2) for t in shards], plan=plan[name], layout="bshd")
        torch.testing.assert_close(turned.transpose(1, 2), expected)
        flat = twd.attention(*[t.transpose(1, 2).flatten(2) for t in shards], plan=plan[name], heads=HEADS)
        torch.testing.assert_close(flat.unflatten(2, (HEADS, -1)).transpose(1, 2), expected)
        with twd.context(plan):
            torch.testing.assert_close(tw.attention(*shards, mask=mask, enable_gqa=True), expected)
            torch.testing.assert_close(tw.attention(*shards, mask=name, enable_gqa=True), expected)
            torch.testing.assert_close(tw.attention(shards[0], k, v, enable_gqa=True), tw.attention(shards[0], k, v, enable_gqa=True, backend="math"))
        with twd.context(plan[name]):
            torch.testing.assert_close(tw.attention(*shards, is_causal=True, enable_gqa=True), expected)
            torch.testing.assert_close(scaled_dot_product_attention(*shards, is_causal=True, enable_gqa=True), expected)
            out, lse = flex_attention(*shards, enable_gqa=True, return_lse=True)
            torch.testing.assert_close(out, expected)
            assert lse.shape == out.shape[:3]
            with pytest.raises(InputError, match="the plan's mask is used"):  # of local tokens
                flex_attention(*shards, block_mask=create_block_mask(mask, None, None, plan.local_length, plan.local_length, device="cpu"), enable_gqa=True)
            with pytest.raises(UnsupportedError, match="max_scores"):
                flex_attention(*shards, enable_gqa=True, return_aux=AuxRequest(max_scores=True))
            packed = [t.transpose(1, 2).flatten(0, 1)[: plan.local_length] for t in shards]
            with pytest.raises(InputError, match=r"masks\.document"):
                varlen_attention(*packed, torch.tensor([0, plan.local_length]), enable_gqa=True)
    with twd.context(plan), pytest.raises(InputError, match="the plan's mask is used"):
        tw.attention(*shards, mask=masks.full, enable_gqa=True)
    with twd.context(plan), pytest.raises(InputError, match="several masks"):
        tw.attention(*shards, enable_gqa=True)
    with pytest.raises(InputError, match=r"plan\['full'\]"):
        twd.attention(*shards, plan=plan)
    with pytest.raises(InputError, match="this rank holds"):
        plan.unshard(q, 2)
    with pytest.raises(InputError, match="the plan is for 700"):
        plan.shard(q[:, :, 1:], 2)
    with pytest.raises(InputError, match=r"dimension 7 of a tensor of 4 dimensions, .* does not exist"):
        plan.shard(q, 7)
    with pytest.raises(InputError, match="a tensor is needed, got list"):
        plan.shard([1, 2], 0)  # type: ignore[arg-type]  # on purpose
    for other in (None, masks.causal):
        with pytest.raises(InputError, match=r"plan must be what tilewise.distributed.plan returns"):
            twd.attention(*shards, plan=other)  # type: ignore[call-overload]  # on purpose
    few = [t[:, :, 1:] for t in shards]
    with twd.context(plan["window"]), pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(sys.modules["tilewise.distributed.context"], "warn_once", said.append)
        torch.testing.assert_close(tw.attention(*few, enable_gqa=True), tw.attention(*few, enable_gqa=True, backend="math"))
        assert all("on this rank alone" in text for text in said) and len(said) == 2
    assert "full" in str(plan) and "modelled" in str(plan) and "700 tokens" in repr(plan)
    with tempfile.TemporaryDirectory() as folder:
        assert plan.picture(f"{folder}/plan.png").read_bytes().startswith(b"\x89PNG")


def check_hot_tiles() -> None:
    """Keys that all see go to all at once, and their gradients come back summed, by the collective or, deterministic, by their owner."""
    length, prefix = 2000, lambda b, h, q, kv: (q >= kv) & ((q - kv < 64) | (kv < 100))
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "batch": BATCH}
    layout = twd.plan(prefix, length=length, **sizes, **WAYS["needed"]()).layout
    assert layout.transport == ("needed",) and layout.hot[0].any()
    for options in ({"deterministic": False}, {"deterministic": True}):
        case = LongCase("a prefix that all see", prefix, options=options)
        whole = _by_one_process(case, length)
        for way in ("needed", "stages"):
            _check_long(case, length, WAYS[way], whole)


def check_groups() -> None:
    """Four processes: neighbours that are none, a dimension of a mesh, and two of three."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "rows", "heads"))
    case = next(c for c in long_cases(700) if c.name == "global tokens, sinks")
    whole = _by_one_process(case, 700)
    for group in (halves[dist.get_rank() % 2], mesh["cp"], mesh["dp"], cube["rows", "heads"]):
        _check_long(case, 700, lambda group=group: {"group": group}, whole)


def check_dropout_computed_again() -> None:
    """Activation checkpointing draws the seed again, on which the ranks agree again."""
    plan = twd.plan(masks.causal, length=700, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, strategy="needed", head_groups=1)
    shards = [plan.shard(t.detach(), 2).requires_grad_() for t in Drawn(700).leaves[:3]]

    def attend(*tensors: Tensor) -> Tensor:
        return twd.attention(*tensors, plan=plan, dropout_p=0.4)

    def by(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(dist.get_rank())
        out = function(*shards)
        return [out, *torch.autograd.grad(out.square().sum(), shards)]

    expected, found = by(attend), by(lambda *tensors: checkpoint(attend, *tensors, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def check_on_a_gpu(kernels: str) -> None:
    """Processes that share one GPU: kernels, streams and collectives, beside one process. `kernels`: "hopper" has them serve small problems, too."""
    torch.cuda.set_device(0)
    length, window = 3000, masks.causal & masks.sliding_window(500)
    with pytest.MonkeyPatch.context() as patch:
        if kernels == "hopper":
            patch.setattr("tilewise.engines.gluon.WORTH_IT", 0)
        for mask, stages in ((masks.causal, 1), (window, 2), (masks.sliding_window(64) | masks.global_tokens(20), 1), (masks.causal, 2), (None, 2)):
            for way in ("needed", "gather", "heads"):
                try:
                    _check_on_a_gpu(mask, length, {**WAYS[way](), "stages": stages})
                except AssertionError as error:
                    raise AssertionError(f"{mask}, {way}, {stages} stages: {error}") from error
    if dist.get_backend_config().count("gloo") and dist.get_world_size() > 1:
        _check_errors_on_a_gpu(length)


def _check_on_a_gpu(mask: Any, length: int, options: dict[str, Any]) -> None:
    drawn, sizes = Drawn(length), {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    whole = [t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in drawn.leaves[:3]]
    grad, grad_lse = drawn.grad_out.to("cuda", torch.bfloat16), drawn.grad_lse.cuda()
    plan = twd.plan(mask, length=length, device="cuda", **sizes, **options)
    assert plan.device.type == "cuda"
    shards = [plan.shard(t.detach(), 2).requires_grad_() for t in whole]
    out, lse = twd.attention(*shards, plan=plan, return_lse=True)
    torch.autograd.backward((out, lse), (plan.shard(grad, 2), plan.shard(grad_lse, 2)))
    exact = tw.attention(*whole, mask=mask, enable_gqa=True, return_lse=True)
    expected = torch.autograd.grad(exact, whole, (grad, grad_lse))
    for name, found, right in zip(("out", "lse", "query", "key", "value"), (out, lse, *[t.grad for t in shards]), (*exact, *expected), strict=True):
        torch.testing.assert_close(found, plan.shard(right, 2), rtol=3e-2, atol=3e-2, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(plan.unshard(shards[0].detach(), 2), whole[0])


def _check_errors_on_a_gpu(length: int) -> None:
    plan = twd.plan(masks.causal, length=length, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, device="cuda")
    cut = plan.rank == 0
    q, k, v = [torch.zeros(1, n, plan.local_length - cut, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS)]
    with pytest.raises(twd.DisagreementError, match="rank 0: InputError: query"):
        twd.attention(q, k, v, plan=plan)


def check_one_rank_over_nccl() -> None:
    """As much of NCCL as one rank can have: small messages on the GPU, every collective to itself, in the order of streams."""
    torch.cuda.set_device(0)
    _check_on_a_gpu(masks.causal, 3000, {})
    plan = twd.plan(masks.causal, length=300, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    assert plan.device.type == "cuda"
    with pytest.raises(twd.DisagreementError, match="rank 0: InputError: query has"):
        twd.attention(*[torch.zeros(1, 1, 3, HEAD_DIM, device="cuda")] * 3, plan=plan)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for gathers in (False, True):
                for stages in (1, 2):
                    _check_exchange_with_itself(gathers, stages)
    torch.cuda.synchronize()


def _check_exchange_with_itself(gathers: bool, stages: int) -> None:
    """5000 own tokens; some are sent, to this rank again, and some are hot. All three parts of the pool are attended to."""
    tokens, width = 5000, 64
    sent, hot = torch.arange(0, tokens, 2, device="cuda"), torch.arange(3, tokens, 7, device="cuda")
    order = torch.randperm(tokens + len(sent) + len(hot), device="cuda")
    orders = [order] if stages == 1 else [order[order < tokens], order[order >= tokens]]
    exchange = KeyExchange(
        group=GroupHandle(dist.group.WORLD),
        rank=0,
        own_tokens=tokens,
        send_index=sent,
        sends=(len(sent),),
        receives=(len(sent),),
        hot_index=hot,
        hot=(len(hot),),
        stages=tuple([Stage(o, o, None) for o in orders]),
        moves=True,
        gathers=gathers,
    )
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(8):
        slow = slow @ slow / 64  # what travels is made behind this, so that a collective that did not wait would send something else
    own = torch.arange(tokens * width, device="cuda", dtype=torch.float32).view(tokens, width) + 0 * slow[0, 0]
    fetch = exchange.fetch(own)
    found = [fetch.rows(stage) for stage in range(stages)]
    pool = torch.cat([own, own[sent], own[hot]])
    assert all([torch.equal(rows, pool[o]) for rows, o in zip(found, orders, strict=True)])
    for deterministic in (False, True):
        back = exchange.give_back(found, deterministic)
        expected = own.clone()
        expected[sent] += own[sent]
        expected[hot] += own[hot]
        assert torch.equal(back, expected)
