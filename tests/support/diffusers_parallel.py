"""What the processes of test_diffusers_parallel.py do: each compares its part with what one process computes on diffusers' `native`."""

import contextlib
import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from tests.support.compare import normal
from tests.support.diffusers_models import DISPATCHED, Tiny
from tilewise.distributed import DisagreementError
from tilewise.integrations import diffusers as client
from tilewise.integrations import diffusers_parallel

B, H, D = 2, 4, 8


def random(*shape: int, seed: int) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.float64)


def parallel(ring: int = 1, ulysses: int = 1, mesh: Any = None, **options: Any) -> ParallelConfig:
    """As enable_parallelism() makes it."""
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh, **options)
    whole = ParallelConfig(context_parallel_config=config)
    found = mesh if mesh is not None else init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    whole.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=found)
    return whole


# -- the dispatcher ----------------------------------------------------------------------------------------------------


class Call:
    """One call of the dispatcher on all ranks and on one."""

    def __init__(
        self, config: ParallelConfig, queries: list[int], keys: list[int] | None = None, *, heads: int = H, kv_heads: int | None = None, seed: int = 0
    ):
        self.config, self.queries, self.keys = config, queries, queries if keys is None else keys
        self.rank = dist.get_rank(config.context_parallel_config._flattened_mesh.get_group())
        q_len, k_len, kv = sum(self.queries), sum(self.keys), heads if kv_heads is None else kv_heads
        self.q, self.k, self.v = (random(B, length, h, D, seed=seed + n) for n, (length, h) in enumerate(((q_len, heads), (k_len, kv), (k_len, kv))))
        self.weight = random(*self.q.shape, seed=seed + 3)

    def mine(self, tensor: Tensor, dim: int, lengths: list[int]) -> Tensor:
        return tensor.split(lengths, dim)[self.rank]

    def check(self, mask: Tensor | None = None, given: Tensor | None = None, **options: Any) -> None:
        """`mask` of all tokens, and `given` on this rank in its place."""
        whole = [t.clone().requires_grad_() for t in (self.q, self.k, self.v)]
        expected = dispatch_attention_fn(*whole, attn_mask=mask, backend="native", **options)
        wanted = torch.autograd.grad((expected * self.weight).sum(), whole)
        lengths = self.queries, self.keys, self.keys
        local = [self.mine(t.detach(), 1, n).clone().requires_grad_() for t, n in zip(whole, lengths, strict=True)]
        found = self.run(*local, given if given is not None else mask, **options)
        torch.testing.assert_close(found, self.mine(expected, 1, self.queries))
        gradients = torch.autograd.grad((found * self.mine(self.weight, 1, self.queries)).sum(), local)
        for gradient, whole_gradient, n in zip(gradients, wanted, lengths, strict=True):
            torch.testing.assert_close(gradient, self.mine(whole_gradient, 1, n))

    def run(self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, mask: Any = None, **options: Any) -> Any:
        given = [self.mine(whole, 1, n) if t is None else t for t, whole, n in ((q, self.q, self.queries), (k, self.k, self.keys), (v, self.v, self.keys))]
        return dispatch_attention_fn(*given, attn_mask=mask, backend="tilewise", parallel_config=self.config, **options)

    def padding(self, seed: int = 9) -> Tensor:
        """(batch, keys); every row keeps the first key, with which causal rows are never empty."""
        keep = random(B, sum(self.keys), seed=seed) > -0.3
        keep[:, 0] = True
        return keep


def masks(config: ParallelConfig) -> None:
    call = Call(config, [150, 87])
    keep = call.padding()
    local, n = call.mine(keep, 1, call.keys), sum(call.keys)
    rows = (random(B, 1, n, n, seed=5) > 0) | torch.eye(n, dtype=torch.bool)
    added = torch.where(keep, 0.0, -10000.0).double()[:, None, None]
    bias = random(1, H, 1, n, seed=6)
    call.check()
    call.check(keep, local)
    call.check(keep[:, None, None], local[:, None, None])
    call.check(keep[:, None, None])  # of all keys, on every rank
    call.check(keep[:1, None, None], local[0])
    call.check(added, call.mine(added, 3, call.keys))
    call.check(bias, call.mine(bias, 3, call.keys))
    call.check(bias)
    call.check(rows, call.mine(rows, 2, call.queries))
    call.check(rows, call.mine(rows, 3, call.keys))
    call.check(rows)
    call.check(rows[0, 0])
    call.check(is_causal=True)
    call.check(scale=0.0)
    causal = keep[:, None, None] & torch.ones(n, n, dtype=torch.bool).tril()
    torch.testing.assert_close(
        call.run(mask=local, is_causal=True), call.mine(dispatch_attention_fn(call.q, call.k, call.v, causal, backend="native"), 1, call.queries)
    )


def heads_and_lengths(config: ParallelConfig) -> None:
    for heads, kv_heads in ((4, 2), (4, 1), (3, 3), (6, 3), (6, 2)):
        call = Call(config, [64, 65], heads=heads, kv_heads=kv_heads)
        keep = call.padding()
        call.check(keep, call.mine(keep, 1, call.keys), enable_gqa=True)
        call.check(is_causal=True, enable_gqa=True)
    for lengths in ([1, 1], [2, 1], [1, 5], [129, 1]):
        call = Call(config, lengths)
        call.check(is_causal=True)
        keep = call.padding()
        call.check(keep, call.mine(keep, 1, call.keys))


def cross_attention(config: ParallelConfig) -> None:
    for queries, keys in (([150, 87], [9, 4]), ([3, 4], [140, 1]), ([5, 6], [6, 5])):
        call = Call(config, queries, keys)
        keep = call.padding()
        rows = (random(B, H, sum(queries), sum(keys), seed=5) > 0) | (torch.arange(sum(keys)) == 0)
        bias = random(1, H, 1, sum(keys), seed=6)
        call.check()
        call.check(keep[:, None, None], call.mine(keep, 1, keys)[:, None, None])
        call.check(bias, call.mine(bias, 3, keys))
        call.check(rows, call.mine(rows, 2, queries))
        call.check(is_causal=True)


def lse(config: ParallelConfig) -> None:
    for queries, keys in (([20, 13], None), ([20, 13], [5, 6])):
        call = Call(config, queries, keys)
        keep = call.padding()
        out, found = call.run(mask=call.mine(keep, 1, call.keys), attention_kwargs={"return_lse": True})
        expected = dispatch_attention_fn(call.q, call.k, call.v, keep, attention_kwargs={"return_lse": True}, backend="tilewise")
        torch.testing.assert_close(out, call.mine(expected[0], 1, queries))
        torch.testing.assert_close(found, call.mine(expected[1], 1, queries))


def dropout(config: ParallelConfig) -> None:
    """The backward drops what the forward dropped: the output is linear in the values, so they times their gradients give the loss."""
    call = Call(config, [20, 13])
    torch.manual_seed(0)
    v = call.mine(call.v, 1, call.keys).clone().requires_grad_()
    first, second = call.run(v=v, dropout_p=0.5), call.run(dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, call.run(dropout_p=0.5)) and not torch.equal(first, second)
    loss = (first * call.mine(call.weight, 1, call.queries)).sum()
    both = torch.stack([loss.detach(), (torch.autograd.grad(loss, v)[0] * v.detach()).sum()])
    dist.all_reduce(both)
    torch.testing.assert_close(both[0], both[1])


def plans_follow_from_their_keys(config: ParallelConfig) -> None:
    """A call like the last one but for one thing; each must be right, and all but the first few make a plan of their own."""
    group = config.context_parallel_config._flattened_mesh.get_group()
    kept = diffusers_parallel._plans[group]
    call = Call(config, [20, 13])
    keep = call.padding()
    local = call.mine(keep, 1, call.keys).clone()
    kept.clear()
    call.check(keep, local)
    for n in range(3):  # other numbers, another scale, a mask that is equal, dropout
        Call(config, [20, 13], seed=10 * n).check(keep, local.clone(), scale=0.1 * n)
    call.run(mask=local, dropout_p=0.5)
    assert len(kept) == 1
    if call.rank == 1:
        local[0, 1] = not local[0, 1]  # in place, on one rank
    keep[0, 21] = not keep[0, 21]
    call.check(keep, local)
    call.check(keep, local[:, None, None])  # the same contents
    assert len(kept) == 2
    others: list[Callable[[], None]] = [
        lambda: call.check(keep, keep),
        lambda: call.check(torch.where(keep, 0.0, -0.5).double()[:, None, None], torch.where(local, 0.0, -0.5).double()[:, None, None]),
        lambda: call.check(torch.where(keep, 0.0, -10000.0).double()[:, None, None], torch.where(local, 0.0, -10000.0).double()[:, None, None]),
        call.check,
        lambda: call.check(is_causal=True),
        lambda: Call(config, [13, 20]).check(is_causal=True),
        lambda: Call(config, [21, 13]).check(is_causal=True),
        lambda: Call(config, [20, 13], heads=2).check(is_causal=True),
        lambda: Call(config, [20, 13], kv_heads=2).check(is_causal=True, enable_gqa=True),
        lambda: Call(config, [20, 13], [13, 20]).check(is_causal=True),
        lambda: _check_other_tensors(call, lambda t: t[:1]),
        lambda: _check_other_tensors(call, lambda t: t[..., :7]),
        lambda: _check_other_tensors(call, Tensor.float),
    ]
    for number, other in enumerate(others):
        other()
        assert len(kept) == 3 + number, number
    q, k, v = (call.mine(t, 1, [20, 13]) for t in (call.q, call.k, call.v[..., :5]))
    torch.testing.assert_close(call.run(q, k, v), call.mine(dispatch_attention_fn(call.q, call.k, call.v[..., :5], backend="native"), 1, [20, 13]))
    for n in range(20):
        Call(config, [20 + n, 13]).run()
    assert len(kept) == diffusers_parallel.KEPT
    call.check(keep, local)
    fresh = Call(config, [11, 12])
    with torch.inference_mode():
        fresh.run(mask=fresh.mine(fresh.padding(), 1, [11, 12]))
    fresh.check(fresh.padding(), fresh.mine(fresh.padding(), 1, [11, 12]))  # its plan was made without gradients


def _check_other_tensors(call: Call, change: Callable[[Tensor], Tensor]) -> None:
    q, k, v = (change(t) for t in (call.q, call.k, call.v))
    found = call.run(*(call.mine(t, 1, call.queries) for t in (q, k, v)))
    torch.testing.assert_close(found, call.mine(dispatch_attention_fn(q, k, v, backend="native"), 1, call.queries))


def masks_are_gathered_once(config: ParallelConfig) -> None:
    call = Call(config, [30, 31])
    local = call.mine(call.padding(seed=12), 1, call.keys).clone()
    with mock.patch.object(diffusers_parallel, "_whole", wraps=diffusers_parallel._whole) as gathered:
        for _ in range(5):
            call.run(mask=local[:, None, None])
        assert gathered.call_count == 1
        local.numpy()[:] = True  # behind torch's back
        call.check(given=local)
        assert gathered.call_count == 2


def mistakes(config: ParallelConfig) -> None:
    call = Call(config, [8, 7])
    n, rank = sum(call.keys), call.rank
    own = call.queries[rank]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"mask": torch.ones(1, 1, 1, 1, n).bool()[None] if rank == 1 else None}, "rank 1: InputError: a mask tensor must be .*; rank 0: no error"),
        ({"mask": torch.ones(B, own).bool() if rank == 1 else None}, "mask differs: rank 0 none, rank 1 torch.bool of batch 2, heads 1"),
        ({"mask": torch.ones(own, own).bool()}, "does not say which keys of other ranks"),
        ({"mask": torch.ones(B, own + 1 - rank).bool()}, r"a mask must be of the local keys, \[8, 7\] on the ranks in order, or of all 15; got \[9, 7\]"),
        ({"mask": torch.ones(B, n).long()}, "boolean .* or floating point"),
        ({"mask": torch.ones(B, n).bool() if rank == 1 else torch.eye(B, n).bool()}, "mask mask differs"),
        ({"mask": torch.zeros(B, n, dtype=torch.float64).requires_grad_()}, "requires grad"),
        ({"mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, own, own, device="cpu")}, "must be a tensor, got BlockMask"),
        ({"k": call.mine(call.k, 1, call.keys)[:, :, :2], "v": call.mine(call.v, 1, call.keys)[:, :, :2]}, "enable_gqa=True"),
        ({"is_causal": rank == 1}, "is_causal differs: rank 0 False, rank 1 True"),
        ({"scale": 1.0 + rank}, "scale differs"),
    ]
    for options, message in bad:
        with pytest.raises(tw.TilewiseError, match=message):
            call.run(**options)
    call.check(is_causal=True)  # nothing is left of them


def ranks_may_be_told_of_any_error(config: ParallelConfig) -> None:
    call = Call(config, [8, 7])
    failing = mock.patch.object(diffusers_parallel, "four_dimensional", side_effect=RuntimeError("out of memory")) if call.rank == 0 else mock.MagicMock()
    with failing, pytest.raises(DisagreementError, match="rank 0: RuntimeError: out of memory; rank 1: no error"):
        call.run(mask=call.mine(call.padding(), 1, call.keys))


# -- models ------------------------------------------------------------------------------------------------------------


def tiny(name: str, **config: Any) -> Tiny:
    found = next(t for t in DISPATCHED if t.name == name)
    return Tiny(found.name, found.kind, found.config | config, found.inputs)


def model_trains(
    small: Tiny, expected: tuple[Tensor, dict[str, Tensor]], config: ContextParallelConfig, backend: str = "tilewise", again: bool = False
) -> None:
    """The output and the gradients of all parameters, summed over the ranks, are those of one process."""
    model = small.make()
    model.set_attention_backend(backend)
    if again:
        model.train()
        model.enable_gradient_checkpointing()
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):  # it is 0 on a CPU, and diffusers divides by it
        model.enable_parallelism(config=config)
    with tw.watch(model) as watched:
        found = output_and_gradients(small, model)
    assert not watched.bypassing and watched.engines
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=2e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        dist.all_reduce(gradient)
        wanted = expected[1][name]
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5 + 1e-4 * float(wanted.abs().max()), msg=lambda text, name=name: f"{name}: {text}")


def output_and_gradients(small: Tiny, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    out = small.call(model, torch.float32)
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_one(small: Tiny) -> tuple[Tensor, dict[str, Tensor]]:
    model = small.make()
    model.set_attention_backend("native")
    return output_and_gradients(small, model)


def the_guide() -> None:
    """Its example, as it stands, gives the gradients of one process."""
    page = (Path(__file__).parents[2] / "docs" / "clients" / "diffusers.md").read_text()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(None):
        exec(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0], names)
    alone = copy.deepcopy(names["model"])
    alone.set_attention_backend("native")
    alone(**names["inputs"]).sample.square().mean().backward()
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        (parallel,) = [code for code in re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "enable_parallelism" in code]
        exec(parallel, names)
    for found, expected in zip(names["model"].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5)


QWEN = tiny("qwen-image", num_attention_heads=3)  # three heads, prompts of nine and four tokens


def two() -> None:
    """Everything that two processes check."""
    client.register(replace_flex=True)
    ring, ulysses = parallel(ring=2, ring_anything=True), parallel(ulysses=2, ulysses_anything=True)
    for config in (ring, ulysses):
        masks(config)
        heads_and_lengths(config)
        cross_attention(config)
        lse(config)
        dropout(config)
        mistakes(config)
    plans_follow_from_their_keys(ring)
    masks_are_gathered_once(ulysses)
    ranks_may_be_told_of_any_error(ring)
    models = {small.name: (small, on_one(small)) for small in (tiny("flux"), QWEN, tiny("ltx-video"), tiny("wan, text"))}
    anything = {"ring_degree": 2, "ring_anything": True}, {"ulysses_degree": 2, "ulysses_anything": True}
    for (name, (small, expected)), options in itertools.product(models.items(), anything):
        model_trains(small, expected, ContextParallelConfig(**options), backend="flex" if name == "flux" else "tilewise", again=name == "qwen-image")
    model_trains(*models["wan, text"], ContextParallelConfig(ring_degree=2))
    the_guide()
    client.unregister()


def four() -> None:
    """Both degrees at once, and two groups of two that each have a sequence of their own, as SimpleTuner makes them."""
    client.register()
    both = parallel(ring=2, ulysses=2)
    for heads, kv_heads in ((4, 4), (4, 2), (2, 1), (3, 3)):
        call = Call(both, [70, 61, 66, 3], heads=heads, kv_heads=kv_heads)
        keep = call.padding()
        call.check(keep, call.mine(keep, 1, call.keys), enable_gqa=True)
        call.check(is_causal=True, enable_gqa=True)
    Call(both, [70, 61, 66, 3], [3, 4, 5, 6]).check()
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "ring", "ulysses"))
    pair = parallel(ulysses=2, mesh=mesh)
    replica = dist.get_rank() // 2
    for n in range(1 + replica):  # one group makes more calls than the other
        call = Call(pair, [40 + replica, 13 + n], seed=10 * replica)
        call.check(call.padding(), call.mine(call.padding(), 1, call.keys))
    small = tiny("wan, text")
    model_trains(small, on_one(small), ContextParallelConfig(ring_degree=2, ulysses_degree=2))
    client.unregister()
