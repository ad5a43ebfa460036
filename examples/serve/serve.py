"""Continuous batching on tilewise.PagedCache: requests come and go, and every step is one packed batch of pieces of prompts and single tokens.

    python examples/serve/serve.py --model llama
    python examples/serve/serve.py --model gpt-oss --pages 16 --budget 24

The models are transformers' own, tiny and with random weights. Greedy tokens of every request are compared with those of generate() for its prompt alone.
"""

import argparse
import sys
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from tilewise import PagedCache, masks, scores

# -- attention: the model calls this in every layer, with what Server passes on as `paged` ---------------------------------


@lru_cache
def seen(window: int | None) -> masks.Mask:
    return masks.causal if window is None else masks.causal & masks.sliding_window(window - 1, 0)


def attention(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    scaling: float,
    paged: Any,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(1, heads, tokens, head dim) in, (1, tokens, heads, head dim) out."""
    cache, step = paged
    query, key, value = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    cache.write(layer.layer_idx, step, key, value)
    sinks = None if s_aux is None else scores.sinks(s_aux)
    return cache.attention(layer.layer_idx, step, query, mask=seen(sliding_window), score=sinks, scale=scaling).unsqueeze(0), None


AttentionInterface.register("paged", attention)
AttentionMaskInterface.register("paged", lambda *_, **__: None)  # positions say it all


# -- the server ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    arrives: int  # at this step
    prompt: list[int]
    most: int  # new tokens
    tokens: list[int]  # the prompt's, and those that followed
    slot: int = -1  # in the cache, once admitted

    @property
    def longest(self) -> int:
        return len(self.prompt) + self.most


class Server:
    """First come, first served. A request is admitted when there are a slot and pages for all tokens it may have, so that none has to be stopped midway."""

    def __init__(self, model: Any, cache: PagedCache, budget: int) -> None:
        self.model, self.cache, self.budget = model, cache, budget  # tokens of a step
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def promised(self) -> int:
        return sum(self.cache.pages_for(request.longest) for request in self.running)

    def admit(self) -> None:
        pages = self.cache.pages_free + self.cache.pages_in_use
        while self.waiting and self.cache.slots_free and self.promised() + self.cache.pages_for(self.waiting[0].longest) <= pages:
            request = self.waiting.popleft()
            request.slot = self.cache.allocate()
            self.running.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One forward of the model: returns the requests that are done."""
        self.admit()
        batch: list[tuple[Request, list[int]]] = []
        left = self.budget
        for request in self.running:
            new = request.tokens[self.cache.length(request.slot) :][:left]  # of a prompt, as many as there is room for; else the last token
            left -= len(new)
            if new:
                batch.append((request, new))
        step = self.cache.append({request.slot: len(new) for request, new in batch})
        ids = torch.tensor([[token for _, new in batch for token in new]], device=self.cache.lengths.device)
        ends = step.cu_seqlens_q[1:] - 1
        logits = self.model(ids, position_ids=step.positions.unsqueeze(0), use_cache=False, logits_to_keep=ends, paged=(self.cache, step)).logits
        for (request, _), token in zip(batch, logits[0].argmax(-1).tolist(), strict=True):
            if self.cache.length(request.slot) == len(request.tokens):  # else the rest of its prompt comes first
                request.tokens.append(token)
        done = [r for r in self.running if len(r.tokens) == r.longest or (r.tokens[-1] == self.model.config.eos_token_id and len(r.tokens) > len(r.prompt))]
        for request in done:
            self.running.remove(request)
            self.cache.free(request.slot)
        print(f"{len(batch):5} sequences, {ids.shape[1]:3} tokens, {self.cache.pages_in_use:3} pages in use, {len(done)} done")
        return done


# -- a run -----------------------------------------------------------------------------------------------------------------


def make_model(name: str) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    if name == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_hidden_layers=2))
    else:  # layers attend to a window and to everything in turn, all of them with learned sinks
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        experts = {"num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        layers = ["sliding_attention", "full_attention"]
        config = GptOssConfig(**sizes, **tokens, **experts, num_hidden_layers=2, layer_types=layers, sliding_window=8, rope_parameters=rope)
        model = GptOssForCausalLM(config)
    for weights in model.parameters():
        if weights.dim() > 1 or len(weights) == 4:  # matrices and sinks: with the library's own small numbers, attention would hardly matter
            nn.init.normal_(weights, std=0.3)
    return model.eval()


def draw_requests(count: int, seed: int) -> list[Request]:
    """Prompts of 1 to 40 tokens, of which a few arrive in every step."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length, most = (int(torch.randint(1, limit, (), generator=random)) for limit in (41, 13))
        prompt = torch.randint(2, 64, (length,), generator=random).tolist()
        found.append(Request(number // 2, prompt, most, list(prompt)))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama", "gpt-oss"], default="llama")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--slots", type=int, default=6, help="most sequences at one time")
    parser.add_argument("--pages", type=int, default=24, help="pages of the cache")
    parser.add_argument("--page-size", type=int, default=8, help="tokens of a page")
    parser.add_argument("--budget", type=int, default=32, help="most tokens of a step; longer prompts are cut")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, requests = make_model(options.model).to(device), draw_requests(options.requests, options.seed)
    longest = max(request.longest for request in requests)
    if options.pages * options.page_size < longest:
        parser.error(f"a request may have {longest} tokens: give the cache more than {options.pages} pages of {options.page_size}")
    cache = PagedCache(
        layers=2, pages=options.pages, page_size=options.page_size, kv_heads=2, head_dim=16, slots=options.slots, max_tokens=longest, device=device
    )

    model.set_attn_implementation("paged")
    server, done, steps = Server(model, cache, options.budget), [], 0
    while len(done) < len(requests):
        server.waiting.extend(request for request in requests if request.arrives == steps)
        done += server.step() if server.waiting or server.running else []
        steps += 1
    model.set_attn_implementation("eager")
    for request in requests:
        alone = model.generate(torch.tensor([request.prompt], device=device), max_new_tokens=request.most, do_sample=False)[0].tolist()
        if alone != request.tokens:
            sys.exit(f"prompt {request.prompt}: generate() gave {alone}, the server {request.tokens}")
    taken = sum(cache.pages_for(len(request.tokens)) for request in requests)
    print(f"{len(done)} requests in {steps} steps, tokens as of generate(); {taken} pages were taken from {options.pages}")
    print(cache)


if __name__ == "__main__":
    main()
