"""tilewise.functional against torch's own scaled_dot_product_attention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tilewise as tw
from tilewise import masks
from tilewise.functional import scaled_dot_product_attention, sdpa_kernel

LEADS = {2: (), 3: (3,), 4: (2, 3), 5: (2, 2, 3)}


def tensors(lead: tuple[int, ...], q_len: int = 9, kv_len: int = 13, kv_lead: tuple[int, ...] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(lead))
    others = lead if kv_lead is None else kv_lead
    shapes = ((*lead, q_len, 8), (*others, kv_len, 8), (*others, kv_len, 6))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def assert_like_torch(inputs: list[Tensor], *args: Any, theirs: Any = None, leaves: list[Tensor] | None = None, **options: Any) -> None:
    """Output and gradients; `theirs` is torch's mask where it takes another."""
    out = scaled_dot_product_attention(*inputs, *args, **options)
    expected = F.scaled_dot_product_attention(*inputs, *(args if theirs is None else (theirs, *args[1:])), **options)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    sources = [*inputs, *(leaves or [])]
    found, wanted = (torch.autograd.grad((t * weights).sum(), sources) for t in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dims", LEADS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.0, "is_causal": False}], ids=str)
def test_every_number_of_dimensions(dims: int, options: dict[str, Any]) -> None:
    assert_like_torch(tensors(LEADS[dims]), **options)


MASK_SHAPES = [
    (2, (9, 13)),
    (2, (1, 13)),
    (2, (9, 1)),
    (3, (9, 13)),
    (3, (3, 9, 13)),
    (3, (1, 9, 13)),
    (3, (3, 1, 13)),
    (4, (9, 13)),
    (4, (3, 9, 13)),
    (4, (2, 3, 9, 13)),
    (4, (2, 1, 9, 13)),
    (4, (1, 3, 9, 13)),
    (4, (2, 1, 1, 13)),
    (4, (1, 1, 1, 1)),
    (5, (9, 13)),
    (5, (3, 9, 13)),
    (5, (2, 3, 9, 13)),
    (5, (2, 1, 9, 13)),
    (5, (1, 1, 9, 13)),
    (5, (2, 2, 3, 9, 13)),
    (5, (2, 1, 3, 9, 13)),
    (5, (1, 2, 1, 1, 13)),
]


@pytest.mark.parametrize(("dims", "shape"), MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["boolean", "additive", "additive with -inf"])
def test_mask_tensors(dims: int, shape: tuple[int, ...], kind: str) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    coins = torch.rand(shape, generator=generator) < 0.7
    coins[..., 0] = True  # every query sees a key
    additive = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = {"boolean": coins, "additive": additive, "additive with -inf": torch.where(coins, additive, -torch.inf)}[kind]
    assert_like_torch(tensors(LEADS[dims]), mask)


def test_a_learned_additive_mask() -> None:
    bias = torch.randn(3, 9, 13, dtype=torch.float64, requires_grad=True)
    assert_like_torch(tensors((2, 3)), bias, leaves=[bias])


def test_a_square_mask_is_never_taken_for_padding() -> None:
    """(9, 13) over a batch of 9 with 13 keys: torch reads a 2-D mask as (queries, keys), and so does this."""
    mask = torch.rand(9, 13, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[:, 0] = True
    assert_like_torch(tensors((9, 2)), mask)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")  # rows that see nothing give 0 here
@pytest.mark.parametrize("lengths", [(9, 9), (9, 13), (13, 9)])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("dims", [3, 4])
def test_causal_bias(lengths: tuple[int, int], bias: Any, dims: int) -> None:
    q, k, v = tensors(LEADS[dims], *lengths)
    given = bias(*lengths)
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    allowed = i + (lengths[1] - lengths[0] if bias is causal_lower_right else 0) >= j
    out = scaled_dot_product_attention(q, k, v, given)
    expected = F.scaled_dot_product_attention(q, k, v, allowed)  # rows that see nothing give 0 in both
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dims", [3, 4, 5])
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)])
def test_gqa(dims: int, heads: tuple[int, int]) -> None:
    lead = LEADS[dims][:-1]
    assert_like_torch(tensors((*lead, heads[0]), kv_lead=(*lead, heads[1])), is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("sizes", [((2, 4), (2, 1), (2, 1)), ((2, 4), (1, 4), (2, 4)), ((1, 1), (2, 4), (2, 4)), ((4,), (1,), (4,))], ids=str)
def test_sizes_of_1_are_broadcast(sizes: tuple[tuple[int, ...], ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    assert_like_torch([torch.randn(*lead, 5, 8, generator=generator, dtype=torch.float64).requires_grad_() for lead in sizes])


def test_positional_arguments_are_torchs() -> None:
    inputs = tensors((2, 4), kv_lead=(2, 2))
    mask = torch.rand(9, 13) < 0.9
    mask[:, 0] = True
    assert_like_torch(inputs, mask, 0.0, False, enable_gqa=True, scale=0.2)


def test_dropout_drops() -> None:
    q, k, v = tensors((2, 3))
    torch.manual_seed(0)
    one, other = (scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    again = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_masks_of_tilewise_are_taken_too() -> None:
    q, k, v = tensors((2, 3), 9, 9)
    i, j = torch.arange(9)[:, None], torch.arange(9)
    allowed = (i - j).abs() <= 2
    for mask in (masks.sliding_window(2), lambda b, h, i, j: (i - j).abs() <= 2, tw.tile_map(masks.sliding_window(2), q_len=9, kv_len=9)):
        assert_like_torch([q, k, v], mask, theirs=allowed)


def test_a_causal_bias_says_it_all() -> None:
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        scaled_dot_product_attention(*tensors((2, 3)), causal_lower_right(9, 13), is_causal=True)


@pytest.mark.parametrize("engine", ["reference", "blocked", "cpp", "auto"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 2.0}], ids=str)
@pytest.mark.parametrize("dims", [(0, 6), (8, 0), (0, 0)], ids=str)
def test_head_dims_of_0(dims: tuple[int, int], options: dict[str, Any], engine: str) -> None:
    q, k, v = (torch.randn(2, 3, 9, d, dtype=torch.float64, requires_grad=True) for d in (dims[0], dims[0], dims[1]))
    with tw.attention_backend(engine):
        assert_like_torch([q, k, v], **options)


def test_is_causal_joins_a_mask() -> None:
    """torch's fused CPU kernel applies both, its other ones refuse."""
    q, k, v = tensors((2, 3))
    mask = torch.rand(9, 13) < 0.8
    expected = F.scaled_dot_product_attention(q, k, v, mask & torch.ones(9, 13, dtype=torch.bool).tril())
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask, is_causal=True), expected, rtol=1e-9, atol=1e-10)


def test_bad_dimensions() -> None:
    q, k, v = tensors((2, 3))
    with pytest.raises(tw.InputError, match="same number of dimensions, at least 2, got 4, 3 and 4"):
        scaled_dot_product_attention(q, k[0], v)
    with pytest.raises(tw.InputError, match="at least 2, got 1, 1 and 1"):
        scaled_dot_product_attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0])


# -- sdpa_kernel -----------------------------------------------------------------------------------------------------


def test_sdpa_kernel_is_a_scope() -> None:
    q, k, v = (t.detach() for t in tensors((2, 3)))
    asked = {SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "native", SDPBackend.CUDNN_ATTENTION: "native"}
    for backend, name in asked.items():
        with sdpa_kernel(backend):
            assert tw.explain(q, k, v).backend == name
            torch.testing.assert_close(scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=1e-9, atol=1e-10)
        with sdpa_kernel([backend], set_priority=True):
            assert tw.explain(q, k, v).backend == name
    assert tw.explain(q, k, v).backend == "auto"


def test_sdpa_kernel_with_several_kernels_chooses_among_them() -> None:
    """A mask that flash would refuse: torch falls back to the next kernel of the list, and so does this."""
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    mask = torch.rand(20, 20) < 0.7
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_sdpa_kernel_refuses_what_it_does_not_know() -> None:
    for given in ([], [SDPBackend.OVERRIDEABLE]):
        with pytest.raises(tw.InputError, match="sdpa_kernel takes one or more of MATH, FLASH_ATTENTION"), sdpa_kernel(given):
            pass


@pytest.mark.parametrize(("queries", "keys"), [(8, 0), (0, 8)])
def test_native_by_name_takes_mask_tensors_of_empty_problems_as_torch_does(queries: int, keys: int) -> None:
    q, k, mask = torch.randn(1, 2, queries, 16), torch.randn(1, 2, keys, 16), torch.ones(queries, keys, dtype=torch.bool)
    with tw.attention_backend("native"):
        found = scaled_dot_product_attention(q, k, k, attn_mask=mask)
    wanted = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    torch.testing.assert_close(found, wanted, equal_nan=True)
