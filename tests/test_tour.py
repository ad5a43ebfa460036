"""A tour of tilewise: what one can ask for, shortest first. Read it from top to bottom."""

import torch

import tilewise as tw
from tilewise import masks, scores

B, H, S, D = 2, 4, 200, 16
q, k, v = (torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3))


def test_attention() -> None:
    out = tw.attention(q, k, v)
    torch.testing.assert_close(out, torch.softmax(q @ k.mT / D**0.5, -1) @ v, rtol=1e-4, atol=1e-5)


def test_a_mask_is_a_function() -> None:
    """Of batch, head, query and key: true where the query may attend to the key. Any torch-flex mask works as it is."""
    document = torch.arange(S) // 50
    out = tw.attention(q, k, v, mask=lambda b, h, i, j: (document[i] == document[j]) & (i >= j))
    assert out.shape == (B, H, S, D)

    # The same from the library: masks have names and combine with & | ~.
    mask = masks.document(document) & masks.causal
    assert mask.name == "document & causal"
    assert torch.equal(out, tw.attention(q, k, v, mask=mask))


def test_a_score_is_a_function() -> None:
    """Of the score and the same four indices. Several apply in order; tensors they read may be learned."""
    table = torch.zeros(H, 2 * S, requires_grad=True)
    out = tw.attention(q, k, v, is_causal=True, score=[scores.softcap(30.0), lambda s, b, h, i, j: s + table[h, i - j]])
    out.sum().backward()
    assert table.grad is not None and table.grad.abs().sum() > 0


def test_options() -> None:
    out, lse = tw.attention(q, k, v, mask=masks.sliding_window(32), dropout_p=0.1, seed=1, scale=0.2, return_lse=True)
    assert lse.shape == (B, H, S)
    again = tw.attention(q, k, v, mask=masks.sliding_window(32), dropout_p=0.1, seed=1, scale=0.2)
    assert torch.equal(out, again)

    few = k[:, :1], v[:, :1]  # one key head for four query heads
    assert tw.attention(q, *few, enable_gqa=True).shape == q.shape


def test_layouts() -> None:
    expected = tw.attention(q, k, v, is_causal=True)
    sequence_first = (t.transpose(1, 2) for t in (q, k, v))
    torch.testing.assert_close(tw.attention(*sequence_first, is_causal=True, layout="bshd").transpose(1, 2), expected)
    flat = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
    torch.testing.assert_close(tw.attention(*flat, is_causal=True, heads=H).unflatten(2, (H, D)).transpose(1, 2), expected)


def test_a_query_with_nothing_to_attend_gives_zero() -> None:
    out = tw.attention(q, k, v, mask=lambda b, h, i, j: i >= 100)
    assert (out[:, :, :100] == 0).all() and out.isfinite().all()


def test_packed_sequences() -> None:
    """No padding is stored or computed. Masks and scores see positions inside each sequence."""
    tokens = torch.randn(60, H, D)
    out = tw.varlen_attention(tokens, tokens, tokens, torch.tensor([0, 10, 45, 60]), mask=masks.causal & masks.sliding_window(8))
    first = tokens[None, :10].transpose(1, 2)
    torch.testing.assert_close(out[:10], tw.attention(first, first, first, mask=masks.causal & masks.sliding_window(8))[0].transpose(0, 1))


def test_tile_maps() -> None:
    """Which tiles a mask leaves empty, partial or full; a million tokens take no N x N anything."""
    tiles = tw.tile_map(masks.causal & masks.sliding_window(4096), q_len=2**20, kv_len=2**20)
    assert tiles.sparsity > 0.99
    small = tw.tile_map(masks.causal, q_len=S, kv_len=S)
    assert (small.partial_tiles, small.full_tiles, small.total_tiles) == (2, 1, 4)
    assert torch.equal(tw.attention(q, k, v, mask=small), tw.attention(q, k, v, mask=masks.causal, backend="flex"))


def test_the_engine_is_your_choice() -> None:
    with tw.attention_backend("math"):  # for all calls inside, on this thread
        exact = tw.attention(q, k, v, mask=masks.causal)
    torch.testing.assert_close(tw.attention(q, k, v, mask=masks.causal, backend="flex"), exact, rtol=1e-4, atol=1e-5)

    explanation = tw.explain(q, k, v, mask=masks.sliding_window(16), backend="blocked")
    assert explanation.engine == "blocked" and explanation.computed_tiles == B * H * 4
    print(explanation)  # every engine, its verdict and the reason


def test_compile() -> None:
    attend = torch.compile(lambda q, k, v: tw.attention(q, k, v, mask=masks.causal, score=scores.softcap(5.0)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(attend(q, k, v), tw.attention(q, k, v, mask=masks.causal, score=scores.softcap(5.0)))


def test_drop_ins() -> None:
    """torch's own signatures."""
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(tw.functional.scaled_dot_product_attention(q, k, v, is_causal=True), expected, rtol=1e-4, atol=1e-5)

    block_mask = tw.flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu")
    torch.testing.assert_close(tw.flex.flex_attention(q, k, v, block_mask=block_mask), expected, rtol=1e-4, atol=1e-5)
