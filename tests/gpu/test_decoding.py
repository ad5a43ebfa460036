"""Decoding on a GPU: the kernels in one split and in several, generate() of transformers, steps without synchronisation, captured steps."""

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import scores
from tilewise.engines.gpu import structure
from tilewise.engines.triton import run
from tilewise.frontend import call_cache
from tilewise.integrations.step_masks import Sight, mask_of

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    call_cache.forget()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Rows without keys are 0, and nothing else: a mask may leave none to any row."""
    assert bool((found[(wanted == 0).all(-1)] == 0).all())
    assert float((found.double() - wanted).norm()) <= 5e-3 * float(wanted.norm())


def forms(batch: int, keys: int, generator: torch.Generator) -> dict[str, dict[str, Any]]:
    visible = torch.arange(keys) >= torch.randint(0, keys - 1, (batch, 1), generator=generator)
    position = torch.tensor(keys // 3, device=DEVICE)
    return {
        "all keys": {},
        "left padding": {"mask": mask_of(Sight(visible=visible.to(DEVICE)))},
        "right padding": {"mask": mask_of(Sight(visible=visible.flip(-1).to(DEVICE)))},
        "a static cache": {"mask": mask_of(Sight(offset=position))},
        "a window in it, padding, a softcap": {"mask": mask_of(Sight(position, 100, None, visible.flip(-1).to(DEVICE))), "score": scores.softcap(5.0)},
        "sinks": {"score": scores.sinks(torch.randn(8, generator=generator).to(DEVICE)), "mask": mask_of(Sight(visible=visible.to(DEVICE)))},
    }


@pytest.mark.parametrize("splits", [None, 1, 2, 7])
@pytest.mark.parametrize(("batch", "keys", "dim"), [(1, 4096, 128), (3, 1000, 64), (64, 777, 128), (2, 640, 256)])
def test_kernels(batch: int, keys: int, dim: int, splits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if splits is not None:
        monkeypatch.setattr(run, "split_count", lambda p: splits)
        monkeypatch.setattr(structure, "_prepared", {})
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(batch, h, n, dim, generator=generator).bfloat16().to(DEVICE) for h, n in ((8, 1), (2, keys), (2, keys)))
    for options in forms(batch, keys, generator).values():
        found = tw.attention(query, key, value, enable_gqa=True, backend="triton", **options)
        close(found, tw.attention(query.double(), key.double(), value.double(), enable_gqa=True, backend="reference", **options))


def tiny(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    settings |= {"head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    windows = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    else:
        config = transformers.Gemma2Config(**settings | windows | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0})
        model = transformers.Gemma2ForCausalLM(config)
    return model.to(DEVICE).eval()


@pytest.fixture
def registered() -> Any:
    pytest.importorskip("transformers")
    from tilewise.integrations import transformers as client

    client.register()
    yield client
    client.unregister()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_generate(kind: str, cache: str, padded: bool, backend: str, registered: Any) -> None:
    model = tiny(kind)
    ids, keep = torch.randint(1, 40, (3, 40), device=DEVICE), torch.ones(3, 40, dtype=torch.long, device=DEVICE)
    if padded:
        keep[0, :30], keep[1, :7] = 0, 0
    options = {"attention_mask": keep, "max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    model.set_attn_implementation("eager")
    wanted = model.generate(ids, **options)
    model.set_attn_implementation("tilewise")
    with tw.attention_backend(backend):
        found = model.generate(ids, **options)
    for a, b in zip(found.logits[:2], wanted.logits[:2], strict=True):  # later ones may follow another token, if two were as likely
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cache", ["grows", "static", "window"])
def test_masks_of_padded_tokens_are_made_without_synchronisation(cache: str, registered: Any) -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    config, keep = object(), torch.ones(2, 90, dtype=torch.bool, device=DEVICE)
    keep[0, :60] = False
    with torch.no_grad():
        registered.make_mask(2, 64, 64, attention_mask=keep[:, :64], config=config)  # the prompt is looked at
        try:
            torch.cuda.set_sync_debug_mode("error")
            if cache == "grows":
                mask = registered.make_mask(2, 1, 80, 79, attention_mask=keep[:, :80], config=config)
            elif cache == "static":
                position = torch.full((), 79, device=DEVICE)
                mask = registered.make_mask(2, 1, 128, position, attention_mask=keep[:, :80], config=config)
            else:
                window = sliding_window_causal_mask_function(16)
                mask = registered.make_mask(2, 1, 16, 79, 64, mask_function=window, attention_mask=keep[:, :80], config=config)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    seen = tw.flex.create_mask(mask.mask.function, 2, 1, 1, mask.shape[-1], device=DEVICE).sum(-1).flatten().tolist()
    assert seen == ([16, 16] if cache == "window" else [20, 80])


def test_a_captured_step_follows_its_cache(registered: Any) -> None:
    """A step over a static buffer, captured once: the mask's position is the cache's, and is copied within the graph."""
    position = torch.full((), 40, device=DEVICE)
    query, key, value = (torch.randn(1, h, n, 64, device=DEVICE, dtype=torch.bfloat16) for h, n in ((4, 1), (2, 256), (2, 256)))
    module = torch.nn.Module()

    def step() -> torch.Tensor:
        mask = registered.make_mask(1, 1, 256, position)
        out: torch.Tensor = registered.attention_forward(module, query, key, value, mask)[0]
        return out

    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
    for at in (40, 41, 200):
        position.fill_(at)
        graph.replay()
        wanted = tw.attention(query.double(), key[:, :, : at + 1].double(), value[:, :, : at + 1].double(), enable_gqa=True, backend="reference")
        close(out.transpose(1, 2), wanted)
