"""diffusers on tilewise: every model family on tiny random weights, and what the dispatcher may pass."""

import copy
import inspect
import itertools
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend, dispatch_attention_fn
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import tilewise as tw
from tests.support.compare import check, engine_of, normal, reached, served_by_flex
from tests.support.diffusers_models import DIRECT, DISPATCHED, Tiny
from tilewise import sparse
from tilewise.core import map_cache
from tilewise.frontend import mask_tensors
from tilewise.integrations import diffusers as client
from tilewise.integrations import route


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    client.register()
    yield
    client.unregister()


def on_dispatcher(model: nn.Module, name: str = "tilewise") -> ExitStack:
    stack = ExitStack()
    stack.enter_context(attention_backend(name))
    return stack


# -- model families ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", DISPATCHED, ids=str)
def test_models_that_use_the_dispatcher(tiny: Tiny) -> None:
    def on_tilewise(model: nn.Module) -> ExitStack:
        stack = on_dispatcher(model)
        if tiny.calls_sdpa:
            stack.enter_context(route(model))
        return stack

    watched = check(tiny.make(), tiny.call, on_tilewise)
    reached(watched)
    assert {use.mask for layer in watched.layers for use in layer.uses} == set(tiny.masks)


@pytest.mark.parametrize("tiny", DIRECT, ids=str)
def test_models_that_call_sdpa_themselves(tiny: Tiny) -> None:
    watched = check(tiny.make(), tiny.call, route)
    assert [layer.name for layer in watched.bypassing] == list(tiny.unrouted), str(watched)
    served_by_flex(watched)
    assert {use.mask for layer in watched.layers if layer.engines for use in layer.uses} == set(tiny.masks)


SOME = [t for t in DISPATCHED + DIRECT if t.name in ("flux", "ltx-video", "sdxl unet")]


@pytest.mark.parametrize("tiny", SOME, ids=str)
def test_in_bfloat16(tiny: Tiny) -> None:
    reached(check(tiny.make(), tiny.call, route, dtype=torch.bfloat16))


@pytest.mark.parametrize("tiny", SOME, ids=str)
def test_with_activations_computed_again(tiny: Tiny) -> None:
    model = tiny.make()
    model.train()
    model.enable_gradient_checkpointing()
    watched = check(model, tiny.call, route)
    reached(watched)


def test_set_attention_backend_and_the_way_back() -> None:
    tiny = DISPATCHED[0]
    model = tiny.make()
    expected = tiny.call(model, torch.float32)
    model.set_attention_backend("tilewise")
    with tw.watch(model) as watched:
        torch.testing.assert_close(tiny.call(model, torch.float32), expected)
    assert not watched.bypassing and copy.deepcopy(model).transformer_blocks[0].attn.processor._attention_backend.value == "tilewise"
    model.reset_attention_backend()
    client.unregister()  # diffusers itself keeps the last backend active
    with tw.watch(model) as watched:
        tiny.call(model, torch.float32)
    assert watched.engines == {} and len(watched.bypassing) == 2
    assert 'model.set_attention_backend("tilewise")' in watched.bypassing[0].remedy


def test_the_name_flex_can_mean_tilewise() -> None:
    tiny = DISPATCHED[0]
    model = tiny.make()
    client.register(replace_flex=True)
    with attention_backend("flex"), tw.watch(model) as watched:
        tiny.call(model, torch.float32)
    assert watched.engines == {engine_of("flex"): 2}
    with attention_backend("flex"), tw.attention_backend("math"), tw.watch(model) as watched:
        tiny.call(model, torch.float32)
    assert watched.engines == {"reference": 2}
    client.unregister()
    assert _AttentionBackendRegistry._backends["flex"].__name__ == "_native_flex_attention" and _AttentionBackendRegistry._constraints["flex"]


# -- registering -------------------------------------------------------------------------------------------------------


def test_registering_twice_and_unregistering() -> None:
    client.register()
    assert [name.value for name in AttentionBackendName].count("tilewise") == 1
    member = AttentionBackendName("tilewise")
    assert member is AttentionBackendName.TILEWISE and pickle.loads(pickle.dumps(member)) is member
    client.unregister()
    client.unregister()
    assert "tilewise" not in [name.value for name in AttentionBackendName]
    with pytest.raises(ValueError, match="tilewise"), attention_backend("tilewise"):
        pass


ENUM_PROBE = """
from enum import Enum
from typing import Any
{source}
class Names(str, Enum):
    FLEX = "flex"
_add_member(Names, "TILEWISE", "tilewise")
assert Names("tilewise") is Names.TILEWISE is Names["TILEWISE"] and [n.value for n in Names] == ["flex", "tilewise"]
assert "tilewise" in {{Names.TILEWISE: 1}} and Names.TILEWISE in Names and Names.TILEWISE.name == "TILEWISE"
_remove_member(Names, "TILEWISE", "tilewise")
assert [n.value for n in Names] == ["flex"] and not hasattr(Names, "TILEWISE")
"""


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_enumeration_is_extended_on_every_python(version: str) -> None:
    """Enumerations are made differently in each."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"python{version} is not installed")
    source = inspect.getsource(client._add_member) + inspect.getsource(client._remove_member)
    subprocess.run([python, "-c", ENUM_PROBE.format(source=source)], check=True, timeout=60)


def test_checks_of_diffusers_may_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_AttentionBackendRegistry, "_checks_enabled", True)
    tiny = DISPATCHED[0]
    with attention_backend("tilewise"):
        tiny.call(tiny.make(), torch.float32)


# -- what the dispatcher may pass --------------------------------------------------------------------------------------

B, SQ, SK, H, D = 2, 6, 9, 4, 8
KEEP = torch.arange(SK) < torch.tensor([[SK], [5]])


def q_k_v(heads: int = H, keys: int = SK, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return normal(B, SQ, H, D, seed=0, dtype=dtype), normal(B, keys, heads, D, seed=1, dtype=dtype), normal(B, keys, heads, D, seed=2, dtype=dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, added: Tensor | float = 0.0, scale: float = D**-0.5) -> tuple[Tensor, Tensor]:
    """By hand, in diffusers' layout."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale + added
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1).transpose(1, 2)


def minus_inf(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)


PER_HEAD = (normal(B, H, SQ, SK, seed=4, dtype=torch.float64) > -0.5) | (torch.arange(SK) == 0)
MASKS = {
    "keys": (KEEP[1], minus_inf(KEEP[1])),
    "batch, keys": (KEEP, minus_inf(KEEP[:, None, None])),
    "batch, keys, added": (torch.where(KEEP, 0.0, -10000.0).double(), minus_inf(KEEP[:, None, None])),
    "queries, keys": (PER_HEAD[0, 0], minus_inf(PER_HEAD[0, 0])),
    "batch, queries, keys": (PER_HEAD[:, 0], minus_inf(PER_HEAD[:, :1])),
    "by head": (PER_HEAD, minus_inf(PER_HEAD)),
    "added by head": (normal(B, H, SQ, SK, seed=5, dtype=torch.float64),) * 2,
    "one for all": (PER_HEAD[:1, :1], minus_inf(PER_HEAD[:1, :1])),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    given, added = MASKS[name]
    found = dispatch_attention_fn(*q_k_v(), attn_mask=given, backend="tilewise")
    torch.testing.assert_close(found, dense(*q_k_v(), added)[0])


def test_causal_and_gqa_as_cosmos_passes_them() -> None:
    q, k, v = q_k_v(heads=2, keys=SQ)
    found = dispatch_attention_fn(q, k, v, is_causal=True, enable_gqa=True, backend="tilewise")
    torch.testing.assert_close(found, dense(q, k, v, minus_inf(torch.ones(SQ, SQ).tril().bool()))[0])


def test_causal_with_a_mask() -> None:
    q, k, v = q_k_v(keys=SQ)
    keep = torch.arange(SQ) < torch.tensor([[SQ], [4]])
    found = dispatch_attention_fn(q, k, v, attn_mask=keep, is_causal=True, backend="tilewise")
    torch.testing.assert_close(found, dense(q, k, v, minus_inf(keep[:, None, None] & torch.ones(SQ, SQ).tril().bool()))[0])


def test_a_scale_of_0_is_a_number() -> None:
    q, k, v = q_k_v()
    torch.testing.assert_close(dispatch_attention_fn(q, k, v, scale=0.0, backend="tilewise"), dense(q, k, v, scale=0.0)[0])


def test_lse() -> None:
    out, lse = dispatch_attention_fn(*q_k_v(), attn_mask=KEEP, attention_kwargs={"return_lse": True}, backend="tilewise")
    expected = dense(*q_k_v(), minus_inf(KEEP[:, None, None]))
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


def test_dropout() -> None:
    q, k, v = q_k_v()
    torch.manual_seed(0)
    first = dispatch_attention_fn(q, k, v, dropout_p=0.5, backend="tilewise")
    second = dispatch_attention_fn(q, k, v, dropout_p=0.5, backend="tilewise")
    torch.manual_seed(0)
    assert torch.equal(first, dispatch_attention_fn(q, k, v, dropout_p=0.5, backend="tilewise")) and not torch.equal(first, second)
    many = torch.stack([dispatch_attention_fn(q, k, v, dropout_p=0.3, backend="tilewise") for _ in range(300)]).mean(0)
    torch.testing.assert_close(many, dense(q, k, v)[0], atol=0.15, rtol=0)


def test_torchs_block_masks() -> None:
    q, k, v = q_k_v()
    block_mask = create_block_mask(lambda b, h, i, j: i + 1 >= j, None, None, SQ, SK, device="cpu", BLOCK_SIZE=4)
    client.register(replace_flex=True)
    found = dispatch_attention_fn(q, k, v, attn_mask=block_mask, backend="flex")
    torch.testing.assert_close(found, dense(q, k, v, minus_inf(torch.arange(SQ)[:, None] + 1 >= torch.arange(SK)))[0])
    block_mask.mask_mod = None
    found = dispatch_attention_fn(q, k, v, attn_mask=block_mask, backend="flex")
    blocks = torch.tensor([[1, 1, 0], [1, 1, 0]]).bool().repeat_interleave(4, 0).repeat_interleave(4, 1)[:SQ, :SK]
    torch.testing.assert_close(found, dense(q, k, v, minus_inf(blocks))[0])


def test_blocks_chosen_from_the_data_reach_tilewise_as_flex() -> None:
    """As trainers write MoBA on 1 x 8 x 16 cubes with torch's BlockMask: lists for every batch element and head, padded places hidden from both sides."""
    grid, heads, kept = (3, 10, 20), 2, 3
    order = sparse.cubes(grid, (1, 8, 16))
    q, k, v = (normal(1, len(order.place), heads, 16, seed=seed, dtype=torch.float64).requires_grad_() for seed in range(3))
    permuted = [order.permute(t, 1) for t in (q, k, v)]
    with torch.no_grad():
        means = [order.means(t.transpose(1, 2)) for t in permuted[:2]]
        chosen = (means[0] @ means[1].transpose(-1, -2)).topk(kept, -1, sorted=False).indices.int()
    room = torch.zeros(1, heads, order.count, order.count - kept, dtype=torch.int32)
    counts = torch.full((1, heads, order.count), kept, dtype=torch.int32)
    valid = order.inside
    block_mask = BlockMask.from_kv_blocks(counts, torch.cat([chosen, room], -1), BLOCK_SIZE=128, mask_mod=lambda b, h, i, j: valid[i] & valid[j])
    client.register(replace_flex=True)
    found = order.unpermute(dispatch_attention_fn(*permuted, attn_mask=block_mask, backend="flex"), 1)

    cube_of = order.place // order.size
    seen = torch.zeros(1, heads, order.count, order.count, dtype=torch.bool).scatter_(-1, chosen.long(), True)[:, :, cube_of][..., cube_of]
    wanted = dense(q, k, v, minus_inf(seen), scale=16**-0.5)[0]
    torch.testing.assert_close(found, wanted)
    for own, other in zip(torch.autograd.grad(found.square().sum(), (q, k, v)), torch.autograd.grad(wanted.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(own, other)


def test_a_mask_is_read_once_for_all_layers_and_never_stale() -> None:
    q, k, v = q_k_v()
    keep = KEEP.clone()
    keep[1, 0] = False  # like no other test's
    looked, built = mask_tensors.looked(), map_cache.maps.built
    for _ in range(6):
        dispatch_attention_fn(q, k, v, attn_mask=keep, backend="tilewise")
    assert (mask_tensors.looked() - looked, map_cache.maps.built - built) == (1, 1)
    dispatch_attention_fn(q, k, v, attn_mask=keep.clone(), backend="tilewise")  # as QwenImage does in every layer
    assert (mask_tensors.looked() - looked, map_cache.maps.built - built) == (1, 1)
    keep[0, 3:] = False
    found = dispatch_attention_fn(q, k, v, attn_mask=keep, backend="tilewise")
    torch.testing.assert_close(found, dense(q, k, v, minus_inf(keep[:, None, None]))[0])


@pytest.mark.parametrize("backend, dtype", list(itertools.product(["auto", "flex", "native", "math"], [torch.float32, torch.bfloat16])), ids=str)
def test_every_backend_of_tilewise(backend: str, dtype: torch.dtype) -> None:
    q, k, v = q_k_v(dtype=dtype)
    with tw.attention_backend(backend):
        found = dispatch_attention_fn(q, k, v, attn_mask=KEEP, backend="tilewise")
    torch.testing.assert_close(found.double(), dense(*(t.double() for t in (q, k, v)), minus_inf(KEEP[:, None, None]))[0], atol=3e-2, rtol=1e-2)


def test_under_torch_compile() -> None:
    """Without a graph break, forward and backward."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return dispatch_attention_fn(q, k, v, attn_mask=mask, backend=AttentionBackendName.TILEWISE)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for mask in (None, KEEP):
        q, k, v = (t.requires_grad_() for t in q_k_v())
        expected = torch.autograd.grad(attend(q, k, v, mask).square().sum(), (q, k, v))
        found = torch.autograd.grad(compiled(q, k, v, mask).square().sum(), (q, k, v))
        torch.testing.assert_close(found, expected)


def test_a_compiled_model() -> None:
    tiny = DISPATCHED[0]
    model = tiny.make()
    expected = tiny.call(model, torch.float32)
    for block in model.transformer_blocks:
        block.attn.set_attention_backend("tilewise")
    for block in model.single_transformer_blocks:
        block.attn.set_attention_backend("tilewise")
    graphs: list[Any] = []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
    with tw.attention_backend("flex"):
        torch.testing.assert_close(tiny.call(compiled, torch.float32), expected, rtol=1e-4, atol=1e-5)
    assert graphs[0].code.count("torch.ops.tilewise.attention(") == 2


MISTAKES = {
    "3 dimensions that may be heads": ({"attn_mask": torch.ones(2, SQ, SK).bool(), "heads": 2}, "write all 4 dimensions"),
    "too many dimensions": ({"attn_mask": torch.ones(1, 1, 1, SQ, SK).bool()}, r"got shape \(1, 1, 1, 6, 9\)"),
    "a wrong length": ({"attn_mask": torch.ones(B, SK + 1).bool()}, "does not broadcast"),
    "an integer mask": ({"attn_mask": torch.ones(B, SK).long()}, "boolean .* or floating point"),
    "fewer heads": ({"kv_heads": 2}, "enable_gqa=True"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str) -> None:
    options, message = MISTAKES[name]
    heads = options.pop("heads", H) if "heads" in (options := dict(options)) else H
    q, k, v = q_k_v(heads=options.pop("kv_heads", heads))
    with pytest.raises(tw.TilewiseError, match=message):
        dispatch_attention_fn(q[:, :, :heads], k, v, backend="tilewise", **options)
