"""Language models: transformers' own classes with random weights, at real widths and few layers, or tiny."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilewise.tools.bench_models.workload import Scale, Workload

DOCUMENTS = (3000, 1200, 700, 4096, 2500, 388, 1500, 3000)  # tokens; 16,384 in all
NEW_TOKENS = 32
HOST_LAYERS = 16
CAUSAL_LM = "ForCausalLM"  # the model with what makes logits of its output


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What a model makes in single precision on purpose (its rotary frequencies) stays so; `.to(dtype)` would round it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make(scale: Scale, family: str, head: str = "Model", **settings: Any) -> Any:
    """transformers' model of a family, such as Llama; the settings are its configuration's."""
    import transformers

    config = getattr(transformers, f"{family}Config")(max_position_embeddings=131072, **settings)
    with scale.building(), default_dtype(scale.dtype):
        return getattr(transformers, f"{family}{head}")(config)


def widths(scale: Scale) -> dict[str, Any]:
    full = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 5632, "vocab_size": 32000}
    tiny = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000}
    return scale.pick(full, tiny)


def tokens(scale: Scale, model: Any, batch: int, length: int) -> Tensor:
    return torch.randint(5, model.config.vocab_size, (batch, length), device=scale.device)


def reads(scale: Scale, model: Any, length: int, call: Any = None) -> Workload:
    """One sequence of `length` tokens through the model, or through `call` in its place."""
    ids, run = tokens(scale, model, 1, length), model if call is None else call
    return Workload(model, lambda turn: run(input_ids=ids, use_cache=False).last_hidden_state)


# -- one sequence ------------------------------------------------------------------------------------------------------


def llama(scale: Scale) -> Workload:
    return reads(scale, make(scale, "Llama", **widths(scale)), scale.pick(16384, 1024))


def llama_compiled(scale: Scale) -> Workload:
    model = make(scale, "Llama", **widths(scale))
    return reads(scale, model, scale.pick(16384, 1024), torch.compile(model, dynamic=False))


def mistral(scale: Scale) -> Workload:
    model = make(scale, "Mistral", sliding_window=scale.pick(4096, 128), **widths(scale))
    return reads(scale, model, scale.pick(32768, 1024))


def gemma2(scale: Scale) -> Workload:
    return reads(scale, make_gemma2(scale, scale.pick(4096, 256)), scale.pick(8192, 512))


def make_gemma2(scale: Scale, window: int, **settings: Any) -> Any:
    heads = scale.pick({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}, {"head_dim": 64})
    return make(scale, "Gemma2", sliding_window=window, **widths(scale) | heads | settings)


def gpt_oss(scale: Scale) -> Workload:
    return reads(scale, make_gpt_oss(scale), scale.pick(8192, 512))


def make_gpt_oss(scale: Scale, **settings: Any) -> Any:
    """Few and small experts: with gpt-oss's own, a step of so few layers would be theirs alone."""
    heads = scale.pick({"num_attention_heads": 32}, {}) | {"head_dim": 64, "intermediate_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2}
    return make(scale, "GptOss", sliding_window=128, **widths(scale) | heads | settings)


# -- several sequences -------------------------------------------------------------------------------------------------


def llama_packed(scale: Scale) -> Workload:
    """The same documents in another order at every turn: a new layout, and the same number of pairs."""
    model = make(scale, "Llama", **widths(scale))
    lengths = [n // scale.pick(1, 16) for n in DOCUMENTS]
    ids = tokens(scale, model, 1, sum(lengths))
    layouts = [positions(lengths[k:] + lengths[:k]).to(scale.device) for k in range(len(lengths))]
    return Workload(model, lambda turn: model(input_ids=ids, position_ids=layouts[turn % len(layouts)], use_cache=False).last_hidden_state)


def positions(lengths: list[int]) -> Tensor:
    """(1, tokens): every document counts from 0, by which transformers knows it."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def llama_padded(scale: Scale) -> Workload:
    model = make(scale, "Llama", **widths(scale))
    length, kept = scale.pick((4096, [4096, 3000, 2000, 900]), (256, [256, 190, 125, 60]))
    ids = tokens(scale, model, len(kept), length)
    keep = (torch.arange(length)[None] < torch.tensor(kept)[:, None]).to(scale.device)
    return Workload(model, lambda turn: model(input_ids=ids, attention_mask=keep.long(), use_cache=False).last_hidden_state * keep[..., None])


# -- generating --------------------------------------------------------------------------------------------------------


def generate(scale: Scale, left_padded: bool = False, **cache: Any) -> Workload:
    return generates(scale, make(scale, "Llama", CAUSAL_LM, **widths(scale) | layers(scale)), left_padded, **cache)


def layers(scale: Scale) -> dict[str, Any]:
    return {"num_hidden_layers": scale.pick(8, 2)}


def generates(scale: Scale, model: Any, left_padded: bool = False, **cache: Any) -> Workload:
    """A prompt and new tokens for each of 8 sequences, greedily; what is compared are the logits of the first new token."""
    ids = tokens(scale, model, 8, scale.pick(2048, 128))
    keep = torch.ones_like(ids)
    if left_padded:
        keep[::2, : scale.pick(700, 40)] = 0
    count = scale.pick(NEW_TOKENS, 8)
    settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}

    def forward(turn: int) -> Tensor:
        return torch.as_tensor(model.generate(ids, attention_mask=keep, **settings, **cache).logits[0])

    return Workload(model, forward)


def generate_padded(scale: Scale) -> Workload:
    return generate(scale, left_padded=True)


def generate_static(scale: Scale) -> Workload:
    return generate(scale, left_padded=True, cache_implementation="static", disable_compile=True)


def generate_compiled(scale: Scale) -> Workload:
    """transformers compiles decoding by itself when the cache is static, on a GPU."""
    return generate(scale, left_padded=True, cache_implementation="static")


def generate_window(scale: Scale) -> Workload:
    """Layers keep no more tokens than their window has."""
    return generates(scale, make(scale, "Mistral", CAUSAL_LM, sliding_window=scale.pick(1024, 64), **widths(scale) | layers(scale)))


def generate_softcap(scale: Scale) -> Workload:
    """Every other layer keeps no more tokens than its window has."""
    return generates(scale, make_gemma2(scale, scale.pick(1024, 64), head=CAUSAL_LM, **layers(scale)))


def generate_sinks(scale: Scale) -> Workload:
    return generates(scale, make_gpt_oss(scale, head=CAUSAL_LM, **layers(scale)))


# -- host time ---------------------------------------------------------------------------------------------------------


def host(scale: Scale, **inputs: Tensor) -> Workload:
    """Layers so small that a GPU waits for the host."""
    settings = widths(scale) | {
        "hidden_size": 256,
        "num_hidden_layers": HOST_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
    }
    model = make(scale, "Llama", **settings | {"vocab_size": 1000})
    ids = tokens(scale, model, 1, host_length(scale))
    given = {name: tensor.to(scale.device) for name, tensor in inputs.items()}
    return Workload(model, lambda turn: model(input_ids=ids, use_cache=False, **given).last_hidden_state[:, -1])


def host_length(scale: Scale) -> int:
    return scale.pick(512, 64)


def host_packed(scale: Scale) -> Workload:
    first = scale.pick(200, 25)
    return host(scale, position_ids=positions([first, host_length(scale) - first]))


def host_padded(scale: Scale) -> Workload:
    keep = torch.ones(1, host_length(scale), dtype=torch.long)
    keep[:, : scale.pick(100, 12)] = 0
    return host(scale, attention_mask=keep)
