"""transformers on tilewise: model families on tiny random weights, padding, packing, caches, generation."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tilewise as tw
from tests.support.compare import Scope, check, normal, reached, seeded
from tilewise.integrations import transformers as client

BATCH, LENGTH, VOCABULARY = 2, 12, 40
LEFT_PADDED = torch.arange(LENGTH) >= torch.tensor([[0], [5]])
RIGHT_PADDED = LEFT_PADDED.flip(-1)
IDS = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def nothing(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> tuple[Tensor, None]:
    """The control: attention that gives zeros."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]) + 0 * query.mean(), None


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    client.register()
    transformers.AttentionInterface.register("nothing", nothing)
    yield
    client.unregister()
    transformers.AttentionInterface._global_mapping.pop("nothing")


def implementation(name: str) -> Scope:
    @contextmanager
    def scope(model: Any) -> Iterator[None]:
        before = model.config._attn_implementation
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        yield
        model.set_attn_implementation(before)

    return scope


SDPA, EAGER = implementation("sdpa"), implementation("eager")

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOWED = ["sliding_attention", "full_attention"]
ENCODER = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Tiny:
    name: str
    model: str
    config: str
    settings: dict[str, Any]
    plain: tuple[Scope, ...] = (SDPA, EAGER)  # torch's own ways to compute it
    scores: bool = False  # its attention has more than a mask

    def make(self) -> Any:
        with seeded():
            model = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.settings))
            for name, parameter in model.named_parameters():
                nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None  # the library's own numbers hide attention
                if "sinks" in name:
                    nn.init.normal_(parameter)
        return model.train()

    def __str__(self) -> str:
        return self.name


LLAMA = Tiny("llama", "LlamaForCausalLM", "LlamaConfig", DECODER)
MISTRAL = Tiny("mistral", "MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 4})
GEMMA2 = Tiny(
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2Config",
    DECODER | {"query_pre_attn_scalar": 16, "sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0, "layer_types": WINDOWED},
    (EAGER,),
    True,
)
GEMMA3 = Tiny("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | {"query_pre_attn_scalar": 16, "sliding_window": 4, "layer_types": WINDOWED})
GPT_OSS = Tiny(
    "gpt-oss",
    "GptOssForCausalLM",
    "GptOssConfig",
    DECODER
    | {
        "sliding_window": 4,
        "layer_types": WINDOWED,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    (EAGER,),
    True,
)
DECODERS = [LLAMA, Tiny("qwen3", "Qwen3ForCausalLM", "Qwen3Config", DECODER), MISTRAL, GEMMA2, GEMMA3, GPT_OSS]
BERT = Tiny("bert", "BertModel", "BertConfig", ENCODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
T5 = Tiny(
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": None,
    },
    (SDPA, EAGER),
    True,
)
CLIP = Tiny(
    "clip",
    "CLIPModel",
    "CLIPConfig",
    {
        "text_config": ENCODER | {"max_position_embeddings": 16, "projection_dim": 16, "eos_token_id": 2},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4},
        "projection_dim": 16,
    },
)


def on(inputs: Callable[[torch.dtype], dict[str, Any]], keep: Tensor | None = None) -> Callable[[nn.Module, torch.dtype], Tensor]:
    """Call a model; where `keep` is false the output is padding, which nobody reads and every implementation fills differently."""

    def call(model: nn.Module, dtype: torch.dtype) -> Tensor:
        out = model(**inputs(dtype), use_cache=False)[0] if "pixel_values" not in inputs(dtype) else clip_outputs(model(**inputs(dtype)))
        return out if keep is None else out[keep]

    return call


def clip_outputs(found: Any) -> Tensor:
    return torch.cat([found.text_model_output[0].flatten(), found.vision_model_output[0].flatten()])


# -- model families ----------------------------------------------------------------------------------------------------


def held(tiny: Tiny, inputs: Callable[[torch.dtype], dict[str, Any]], keep: Tensor | None = None, **options: Any) -> tw.watch:
    watched = check(tiny.make(), on(inputs, keep), implementation("tilewise"), plain=tiny.plain, without=implementation("nothing"), **options)
    reached(watched)
    return watched


@pytest.mark.parametrize("tiny", DECODERS, ids=str)
def test_decoders(tiny: Tiny) -> None:
    watched = held(tiny, lambda dtype: {"input_ids": IDS})
    assert len(watched.layers) == 2


@pytest.mark.parametrize("tiny", DECODERS, ids=str)
def test_decoders_with_left_padding(tiny: Tiny) -> None:
    """Left padding shows a padding mask that is lost; with a window it also leaves queries with nothing to attend."""
    watched = held(tiny, lambda dtype: {"input_ids": IDS, "attention_mask": LEFT_PADDED.long()}, LEFT_PADDED)
    assert all("key_padding" in use.mask for layer in watched.layers for use in layer.uses), str(watched)


@pytest.mark.parametrize("tiny", DECODERS, ids=str)
def test_packed_sequences(tiny: Tiny) -> None:
    """position_ids that start again say where a sequence begins."""
    places = torch.cat([torch.arange(5), torch.arange(7)]).expand(BATCH, -1)
    held(tiny, lambda dtype: {"input_ids": IDS, "position_ids": places})
    if tiny is GPT_OSS:  # this model does not tell its masks of the positions, whatever the implementation
        return
    model = tiny.make().eval()
    model.set_attn_implementation("tilewise")
    packed = model(input_ids=IDS, position_ids=places, use_cache=False)[0]
    torch.testing.assert_close(packed[:, 5:], model(input_ids=IDS[:, 5:], use_cache=False)[0], rtol=1e-4, atol=1e-4)


def test_bert_with_padding() -> None:
    watched = held(BERT, lambda dtype: {"input_ids": IDS, "attention_mask": RIGHT_PADDED.long()}, RIGHT_PADDED)
    assert {use.mask for layer in watched.layers for use in layer.uses} == {"padding"}
    watched = held(BERT, lambda dtype: {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    assert {use.mask for layer in watched.layers for use in layer.uses} == {"none"}  # a mask that hides nothing is none


def test_t5_with_its_position_bias() -> None:
    """The bias is learned: its table gets its gradient through the score."""
    target = IDS.flip(-1)[:, :7]
    watched = held(T5, lambda dtype: {"input_ids": IDS, "attention_mask": RIGHT_PADDED.long(), "decoder_input_ids": target})
    assert len(watched.layers) == 6


def test_clip() -> None:
    held(CLIP, lambda dtype: {"input_ids": IDS, "attention_mask": RIGHT_PADDED.long(), "pixel_values": normal(BATCH, 3, 16, 16, seed=1, dtype=dtype)})


@pytest.mark.parametrize("tiny", [LLAMA, GEMMA2], ids=str)
def test_in_bfloat16(tiny: Tiny) -> None:
    held(tiny, lambda dtype: {"input_ids": IDS, "attention_mask": LEFT_PADDED.long()}, LEFT_PADDED, dtype=torch.bfloat16)


def test_with_activations_computed_again() -> None:
    model = LLAMA.make()
    model.gradient_checkpointing_enable()
    model.set_attn_implementation("tilewise")
    with tw.watch(model) as watched:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert sum(watched.engines.values()) == 4 and not watched.bypassing


SMALL = ENCODER | {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
MORE = {  # one for each thing the families above do not do
    "gpt2": ("GPT2Model", "GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}),
    "llama4, chunks": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        SMALL | {"num_key_value_heads": 2, "head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 32},
    ),
    "modernbert, windows both ways": (
        "ModernBertModel",
        "ModernBertConfig",
        SMALL | {"global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "deepseek, values of another size": (
        "DeepseekV3Model",
        "DeepseekV3Config",
        SMALL
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "bart, encoder and decoder": (
        "BartModel",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "pad_token_id": 0,
        },
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_more_families(name: str) -> None:
    model = Tiny(name, *MORE[name]).make().eval()
    inputs = {"input_ids": IDS, "attention_mask": LEFT_PADDED.long()}
    with torch.no_grad(), SDPA(model):
        expected = model(**inputs)[0]
        gone = model(**inputs | {"attention_mask": None})[0]
    model.set_attn_implementation("tilewise")
    with torch.no_grad(), tw.attention_backend("flex"), tw.watch(model) as watched:
        found = model(**inputs)[0]
    reached(watched)
    torch.testing.assert_close(found[LEFT_PADDED], expected[LEFT_PADDED], rtol=1e-4, atol=1e-4)
    assert (gone - expected)[LEFT_PADDED].abs().max() > 1e-2  # the padding matters


def test_a_model_that_keeps_its_own_attention_is_named() -> None:
    settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    model = Tiny("bloom", "BloomModel", "BloomConfig", settings).make()
    model.set_attn_implementation("tilewise")  # accepted, and without effect
    assert model.config._attn_implementation != "tilewise"
    with tw.watch(model) as watched:
        model(input_ids=IDS)
    assert watched.engines == {} and watched.bypassing[0].uses[0].engine == "softmax written out"
    assert watched.bypassing[0].remedy.startswith("none: its weights are written out")


# -- caches and generation ---------------------------------------------------------------------------------------------


def generated(model: Any, **options: Any) -> Tensor:
    ids, keep = torch.where(LEFT_PADDED, IDS, 0), LEFT_PADDED.long()
    return model.generate(ids, attention_mask=keep, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("tiny", DECODERS, ids=str)
def test_generate_with_a_cache(tiny: Tiny, cache: str) -> None:
    """Prefill with left padding, then decoding a token at a time: past the window, where there is one."""
    model = tiny.make().eval()
    with EAGER(model):
        expected = generated(model, cache_implementation=cache)
    model.set_attn_implementation("tilewise")
    with tw.attention_backend("flex"), tw.watch(model) as watched:
        found = generated(model, cache_implementation=cache)
    assert torch.equal(found.sequences, expected.sequences)
    for step, (a, b) in enumerate(zip(found.logits, expected.logits, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=lambda text, step=step: f"step {step}: {text}")
    reached(watched)
    assert all(layer.calls == 8 for layer in watched.layers)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("tiny", [GEMMA2, GPT_OSS], ids=str)
def test_generate_without_padding(tiny: Tiny, cache: str) -> None:
    """Windows, a softcap, sinks; in inference mode, whose tensors have no versions."""
    model = tiny.make().eval()
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    with EAGER(model):
        expected = model.generate(IDS, **options)
    model.set_attn_implementation("tilewise")
    assert torch.equal(model.generate(IDS, **options), expected)
    with torch.inference_mode():
        assert torch.equal(model.generate(IDS, attention_mask=torch.ones_like(IDS), **options), expected)


# -- work per layer and per token ------------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Counter[str]]:
    """Counts what a step does besides attention: problems made (calls that are not known), traces, masks read, maps built."""
    from tilewise import scores
    from tilewise.core.map_cache import maps
    from tilewise.frontend import call_cache, mask_tensors
    from tilewise.tiles import sources

    counts: Counter[str] = Counter()

    def count(module: Any, name: str, what: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any) -> Any:
            counts[what] += 1
            return original(*args)

        monkeypatch.setattr(module, name, counted)

    count(sys.modules["tilewise.attention"], "make_problem", "problems")
    masks, problem = sys.modules["tilewise.masks.mask"], sys.modules["tilewise.core.problem"]
    for module, name in ((masks, "trace_mask"), (sources, "trace_mask"), (scores, "trace_score"), (problem, "trace_score")):
        count(module, name, "traces")

    def measure(step: Callable[[], Any]) -> Counter[str]:
        call_cache.forget()
        mask_tensors.forget()
        counts.clear()
        before = maps.built, mask_tensors.looked()
        step()
        return counts + Counter(maps=maps.built - before[0], looks=mask_tensors.looked() - before[1])

    return measure


def layers(tiny: Tiny, count: int) -> Any:
    pattern = {"layer_types": WINDOWED * (count // 2)} if "layer_types" in tiny.settings else {}
    model = replace(tiny, settings=tiny.settings | {"num_hidden_layers": count} | pattern).make().eval()
    model.set_attn_implementation("tilewise")
    return model


@pytest.mark.parametrize("inputs", ["packed", "padded"])
def test_a_layer_more_is_no_work_more(inputs: str, work: Any) -> None:
    given = {"packed": {"position_ids": torch.arange(LENGTH)[None].expand(BATCH, -1) % 7}, "padded": {"attention_mask": LEFT_PADDED.long()}}[inputs]
    found = []
    for count in (2, 4):
        model = layers(LLAMA, count)
        work(lambda model=model: model(input_ids=IDS, use_cache=False, **given))  # forms of masks are traced once
        found.append(work(lambda model=model: model(input_ids=IDS, use_cache=False, **{name: t.clone() for name, t in given.items()})))
    assert found[0] == found[1] and found[0]["problems"] == 1 and found[0]["maps"] <= 1
    assert found[0]["looks"] == (inputs == "padded") and found[0]["traces"] == (inputs == "padded")


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("tiny", [LLAMA, GPT_OSS], ids=str)
def test_a_token_more_is_traced_by_nobody(tiny: Tiny, cache: str, padded: bool, work: Any) -> None:
    """With a cache that grows, the calls of a token are new ones: one problem for each kind of layer. With a static one, they are those of the token before."""
    keep = LEFT_PADDED.long() if padded else torch.ones_like(IDS)

    def generate(model: Any, tokens: int) -> Counter[str]:
        options = {"cache_implementation": cache, "disable_compile": True, "do_sample": False}
        counts: Counter[str] = work(lambda: model.generate(IDS, attention_mask=keep, max_new_tokens=tokens, min_new_tokens=tokens, **options))
        return counts

    found = []
    for count in (2, 4):
        model = layers(tiny, count)
        few, many = [[generate(model, tokens) for _ in range(2)][1] for tokens in (3, 6)]  # the first time, forms of masks are traced
        found.append(many - few)
        assert many["traces"] == few["traces"] and many["looks"] == few["looks"] and many["maps"] == few["maps"]
    kinds = 1 if tiny is LLAMA else 2
    assert found[0] == found[1]
    assert found[0]["problems"] <= (3 * kinds if cache == "dynamic" else 0)


def test_compiled_decoding_compiles_once() -> None:
    """With a static cache: the mask is made outside the compiled step, of the same tensors as before."""
    for tiny in (LLAMA, GEMMA3):
        torch.compiler.reset()
        model = tiny.make().eval()
        model.set_attn_implementation("tilewise")
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "disable_compile": True, "attention_mask": LEFT_PADDED.long()}
        expected = model.generate(IDS, **options)
        model.forward = torch.compile(model.forward, backend="eager")
        torch._dynamo.utils.counters.clear()
        assert torch.equal(model.generate(IDS, **options), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # of the prompt, and of a token
    torch.compiler.reset()


def test_a_mask_in_buffers_that_is_held_keeps_its_contents() -> None:
    """generate() still holds the last token's mask when it asks for the next."""

    def seen(mask: Any) -> list[int]:
        return [int(n) for n in tw.flex.create_mask(mask.mask.function, BATCH, 1, 1, 16, device="cpu").sum(-1).flatten()]

    def make(position: int, keep: Tensor | None = None) -> Any:
        with torch.no_grad():
            return client.make_mask(BATCH, 1, 16, torch.tensor(position), attention_mask=keep)

    first, second = make(3), make(4)
    assert seen(first) == [4, 4] and seen(second) == [5, 5] and first.mask is not second.mask
    kept = first.mask
    del first
    third = make(6)
    assert third.mask is kept and seen(third) == [7, 7] and seen(second) == [5, 5]
    padded = make(6, torch.arange(9) >= torch.tensor([[0], [2]]))
    assert seen(padded) == [7, 5]
    del padded
    assert seen(make(12, torch.ones(BATCH, 5, dtype=torch.bool))) == [5, 5]  # what an earlier step wrote after the fifth key is gone
    recorded = client.make_mask(BATCH, 1, 16, torch.tensor(3))  # for autograd: a backward may come late
    assert recorded.mask is not kept and recorded.mask is not client.make_mask(BATCH, 1, 16, torch.tensor(3)).mask


def test_t5_generates() -> None:
    model = T5.make().eval()
    with EAGER(model):
        expected = model.generate(IDS, max_new_tokens=6, do_sample=False)
    model.set_attn_implementation("tilewise")
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), expected)


def test_a_prompt_in_pieces() -> None:
    """The second piece continues the cache: several queries, which stand behind the first key."""
    model = LLAMA.make().eval()
    model.set_attn_implementation("tilewise")
    whole = model(input_ids=IDS).logits
    first = model(input_ids=IDS[:, :7], use_cache=True)
    second = model(input_ids=IDS[:, 7:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(second.logits, whole[:, 7:], rtol=1e-4, atol=1e-4)


def test_no_mask_is_materialised() -> None:
    """Masks travel as functions; a wrong count of tiles would show one that was formed."""
    from tilewise.integrations.traced_mask import TracedMask

    mask = client.make_mask(1, 4096, 4096, mask_function=transformers.masking_utils.sliding_window_causal_mask_function(64))
    assert isinstance(mask, TracedMask) and mask.mask is not None and not mask.mask.traced().captures
    tiles = tw.tile_map(mask.mask, q_len=4096, kv_len=4096)
    assert tiles.sparsity > 0.9


# -- masks the library describes -----------------------------------------------------------------------------------------

OFFSETS = [(0, 0), (5, 0), (5, 3)]


@pytest.mark.parametrize("queries", [6, 1])
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "window", "both ways", "chunked", "packed", "blocks", "or", "and"])
def test_mask_functions_mean_what_sdpa_is_given(kind: str, as_tensor: bool, offsets: tuple[int, int], queries: int) -> None:
    """Both the function and the program that is taken for its trace; twice, because the second mask is made of what the first left."""
    from transformers import masking_utils as library

    from tilewise.lang import evaluate

    (q_offset, kv_offset), keys = offsets, 9
    places = {"b": torch.arange(BATCH).view(-1, 1, 1, 1), "h": torch.zeros(1, 1, 1, 1, dtype=torch.long)}
    places |= {"q": torch.arange(queries).view(1, 1, -1, 1), "kv": torch.arange(keys).view(1, 1, 1, -1)}
    total = keys + kv_offset + 4
    ids = torch.randint(0, 3, (BATCH, total), generator=torch.Generator().manual_seed(1)).sort(-1).values
    function = {
        "causal": library.causal_mask_function,
        "bidirectional": library.bidirectional_mask_function,
        "window": library.sliding_window_causal_mask_function(4),
        "both ways": library.sliding_window_bidirectional_mask_function(3),
        "chunked": library.chunked_causal_mask_function(4, torch.tensor([0, 2])),
        "packed": library.and_masks(library.causal_mask_function, library.packed_sequence_mask_function(ids)),
        "blocks": library.or_masks(library.causal_mask_function, library.blockwise_overlay(ids - 1)),
        "or": library.or_masks(library.causal_mask_function, lambda b, h, q, kv: kv < 2),
        "and": library.and_masks(library.causal_mask_function, lambda b, h, q, kv: (q + kv) % 2 == 0),
    }[kind]
    keep = torch.arange(keys + kv_offset - 1) >= torch.tensor([[0], [2]])  # one shorter than the keys: the last is not written yet
    sizes = {"batch_size": BATCH, "q_length": queries, "kv_length": keys, "kv_offset": kv_offset, "mask_function": function}
    for padding in (None, keep, None, keep.flip(-1)):
        expected = library.sdpa_mask(**sizes, q_offset=q_offset, attention_mask=padding, allow_is_causal_skip=False)
        counter = torch.tensor(q_offset)
        with torch.no_grad():
            made = client.make_mask(**sizes, q_offset=counter if as_tensor else q_offset, attention_mask=padding, device=torch.device("cpu"))
        counter += 100  # as a static cache does
        if made.mask is None:
            assert expected.all()
            continue
        assert torch.equal(tw.flex.create_mask(made.mask.function, BATCH, 1, queries, keys, device="cpu"), expected)
        assert torch.equal(torch.as_tensor(evaluate(made.mask.traced(), places)).expand_as(expected), expected)


# -- what an attention call may be given ---------------------------------------------------------------------------------


def q_k_v(keys: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (normal(1, 2, length, 8, seed=seed, dtype=torch.float64) for seed, length in enumerate((5, keys, keys)))
    return q, k, v


class Module(nn.Module):
    is_causal = True


CAUSAL = {
    "the module says so": (Module(), {}, True),
    "nobody says so": (nn.Linear(1, 1), {}, True),
    "the call says no": (Module(), {"is_causal": False}, False),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_no_mask_may_mean_causal(name: str) -> None:
    module, options, causal = CAUSAL[name]
    found, _ = client.attention_forward(module, *q_k_v(), None, **options)
    torch.testing.assert_close(found.transpose(1, 2), tw.attention(*q_k_v(), is_causal=causal, backend="math"))


def test_no_mask_with_one_query_or_a_window() -> None:
    q, k, v = q_k_v()
    found, _ = client.attention_forward(Module(), q[:, :, :1], k, v, None)
    torch.testing.assert_close(found.transpose(1, 2), tw.attention(q[:, :, :1], k, v))
    found, _ = client.attention_forward(Module(), q, k, v, None, sliding_window=2)
    expected = tw.attention(q, k, v, mask=lambda b, h, i, j: (i >= j) & (i - j < 2), backend="math")
    torch.testing.assert_close(found.transpose(1, 2), expected)


def test_tensors_given_as_masks() -> None:
    q, k, v = q_k_v()
    allowed = torch.ones(1, 1, 5, 9, dtype=torch.bool).tril(1)  # longer than the keys, as for a static cache
    for given in (allowed, torch.where(allowed, 0.0, torch.finfo(torch.float32).min), torch.where(allowed, 0.25, -torch.inf)):
        found, _ = client.attention_forward(Module(), q, k, v, given)
        torch.testing.assert_close(found.transpose(1, 2), tw.attention(q, k, v, mask=allowed[..., :5], backend="math"))


def test_a_scale_of_0_is_a_number() -> None:
    q, k, v = q_k_v()
    found, _ = client.attention_forward(Module(), q, k, v, None, scaling=0.0, is_causal=False)
    torch.testing.assert_close(found.transpose(1, 2), v.mean(2, keepdim=True).expand_as(v))


def test_dropout_is_applied() -> None:
    q, k, v = q_k_v()
    torch.manual_seed(0)
    found, _ = client.attention_forward(Module(), q, k, v, None, dropout=0.5)
    torch.manual_seed(0)
    again, _ = client.attention_forward(Module(), q, k, v, None, dropout=0.5)
    assert torch.equal(found, again) and not torch.allclose(found, client.attention_forward(Module(), q, k, v, None)[0])


def test_under_torch_compile() -> None:
    model = LLAMA.make().eval()
    model.set_attn_implementation("tilewise")
    expected = model(input_ids=IDS, attention_mask=LEFT_PADDED.long(), use_cache=False).logits
    compiled = torch.compile(lambda ids, keep: model(input_ids=ids, attention_mask=keep, use_cache=False).logits, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS, LEFT_PADDED.long())[LEFT_PADDED], expected[LEFT_PADDED], rtol=1e-4, atol=1e-4)


DOGE = Tiny("doge", "DogeForCausalLM", "DogeConfig", DECODER | {"keep_window_size": 8})


def test_a_layer_that_drops_its_mask_is_refused() -> None:
    """Doge's layers build a float mask and leave out any mask that is no tensor."""
    model = DOGE.make().eval()
    inputs = {"input_ids": IDS, "attention_mask": LEFT_PADDED.long(), "use_cache": False}
    model.set_attn_implementation("sdpa")
    expected = model(**inputs).logits
    with tw.integrations.route(model):  # what the error advises
        torch.testing.assert_close(model(**inputs).logits[LEFT_PADDED], expected[LEFT_PADDED], rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("tilewise")
    advice = r"DogeAttention \(layer 0\) was given the mask TracedMask\(causal.* a \(2, 4, 12, 12\) float32 tensor of its own.*route\(model\)"
    for called in (model, torch.compile(model, backend="eager")):
        with pytest.raises(tw.TilewiseError, match=advice):
            called(**inputs)


def test_a_mask_of_the_caller_is_no_dropped_mask() -> None:
    """A 4-D mask replaces what tilewise would make; a mask that was made and thrown away does not count."""
    model = LLAMA.make().eval()
    model.set_attn_implementation("tilewise")
    client.make_mask(BATCH, LENGTH, LENGTH, config=model.config)
    allowed = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    torch.testing.assert_close(model(input_ids=IDS, attention_mask=allowed)[0], model(input_ids=IDS)[0], rtol=1e-4, atol=1e-4)


MISTAKES = {
    "weights": ({"output_attentions": True}, "forms no attention weights"),
    "an unknown cache": ({"cache": object()}, "object is not the paged cache"),
    "a paged cache in training": ({"cache": object(), "dropout": 0.1}, "not served with dropout=0.1"),
    "a paged cache and a bias": ({"cache": object(), "position_bias": torch.zeros(1, 1, 5, 5)}, "not served with a position bias"),
    "keys that an indexer chose": ({"block_indices": torch.zeros(1, 1, 5, 2, dtype=torch.long)}, "chooses its keys by block_indices.*route"),
    "lengths only": ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, "position_ids that start again"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    options, message = MISTAKES[name]
    for window in (None, 2):
        with pytest.raises(tw.InputError, match=message):
            client.attention_forward(Module(), *q_k_v(), None, sliding_window=window, **options)


def test_a_mask_made_for_other_lengths_is_refused() -> None:
    with pytest.raises(tw.InputError, match="made for 4 queries and 9 keys, the call has 5 and 5"):
        client.attention_forward(Module(), *q_k_v(), client.make_mask(1, 4, 9))
    with pytest.raises(tw.InputError, match="slices its attention mask"):
        client.make_mask(1, 4, 9)[:, :, :, :3]


def test_unregistering() -> None:
    client.unregister()
    with pytest.raises(ValueError, match="tilewise"):
        LLAMA.make().set_attn_implementation("tilewise")
