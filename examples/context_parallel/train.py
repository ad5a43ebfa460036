"""Train a tiny transformers model on sequences that the processes share (context parallelism), with FSDP2 around it.

    torchrun --standalone --nproc-per-node 2 examples/context_parallel/train.py --model packed-llama --compare
    torchrun --standalone --nproc-per-node 2 examples/context_parallel/train.py --model gpt-oss --compare

Every process holds some tokens of every document, and a part of the weights. --compare repeats the run with the whole sequences in one process and
transformers' own attention, and ends with an error if the losses are not the same.
"""

import argparse
import copy
import os
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

import tilewise
from tilewise import distributed as twd
from tilewise import masks

IGNORED = -100  # the label of tokens that predict nothing
CLOSE = {"losses": 1e-5, "gradients": 1e-3}  # relative, of a tensor's largest: rounding, and what AdamW makes of it


class Sequence(NamedTuple):
    """Documents end to end, (1, tokens) each."""

    lengths: list[int]
    ids: Tensor
    labels: Tensor  # the next token of the same document: shifted before the sequence is cut, because a token's neighbour may be on another rank
    positions: Tensor  # inside the document


def draw(step: int, tokens: int, vocabulary: int, device: torch.device) -> Sequence:
    """A step's documents, the same in every process. They are tokens that count up by the document's stride: something to learn."""
    random = torch.Generator().manual_seed(step)
    cuts = torch.randperm(tokens - 1, generator=random)[:4].add(1).sort().values.tolist()
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = masks.ids_of_lengths(lengths)
    strides, starts = (torch.randint(1, 8, (len(lengths),), generator=random)[documents] for _ in range(2))
    ids = (starts + strides * positions) % vocabulary
    labels = torch.where(documents == documents.roll(-1), ids.roll(-1), IGNORED)
    labels[-1] = IGNORED
    return Sequence(lengths, *[t.to(device)[None] for t in (ids, labels, positions)])


def make_model(name: str) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if name == "packed-llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, attn_implementation="tilewise"))
    # Layers of gpt-oss attend to a window and to everything in turn, all of them with learned sinks.
    config = GptOssConfig(**sizes, num_hidden_layers=4, sliding_window=100, num_local_experts=4, num_experts_per_tok=2, attn_implementation="tilewise")
    return GptOssForCausalLM(config)


def masks_of(config: Any, lengths: list[int]) -> dict[str, tuple[Any, int]]:
    """The masks of the whole sequence by the names that transformers gives to types of layers, and how many layers of each type there are."""
    full = masks.document(lengths=lengths) & masks.causal
    types = Counter(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if "sliding_attention" not in types:
        return {"full_attention": (full, types["full_attention"])}
    window = masks.sliding_window(config.sliding_window - 1, 0)  # transformers counts the token itself
    return {"full_attention": (full, types["full_attention"]), "sliding_attention": (full & window, types["sliding_attention"])}


def make_plan(config: Any, lengths: list[int]) -> twd.Plan:
    """Who holds which tokens. Collective, and made anew whenever the documents change."""
    sizes = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    length, ranks = sum(lengths), dist.get_world_size()
    # Tokens are dealt in chunks of 128. Fewer chunks than ranks would leave some without any, and transformers cannot compute nothing.
    even = [length // ranks + (rank < length % ranks) for rank in range(ranks)] if length <= 128 * (ranks - 1) else None
    return twd.plan(masks_of(config, lengths), length=length, **sizes, batch=1, shard_sizes=even)


class Trained(NamedTuple):
    losses: list[float]  # of every step
    gradients: dict[str, Tensor]  # of the last: losses alone would not tell a wrong factor, because AdamW takes no notice of one


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items() if grad is not None}


def summed_loss(model: nn.Module, ids: Tensor, labels: Tensor, positions: Tensor, **other: Any) -> Tensor:
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **other).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


# -- shared by all processes -------------------------------------------------------------------------------------------


def train_shared(model: Any, given: argparse.Namespace, device: torch.device) -> Trained:
    config, ranks, losses = model.config, dist.get_world_size(), []
    if given.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(given.steps):
        whole = draw(step, given.tokens, config.vocab_size, device)
        began = time.perf_counter()
        plan = make_plan(config, whole.lengths)
        planned = time.perf_counter() - began
        ids, labels, positions = [plan.shard(t, 1) for t in whole[1:]]
        predicted = int((whole.labels != IGNORED).sum())  # by all ranks together
        with twd.context(plan):  # the backward too: checkpointed layers are computed again in it
            share = summed_loss(model, ids, labels, positions) / predicted
            (share * ranks).backward()  # FSDP (as DDP) averages gradients over ranks, and shares have to be summed
        gradients = gradients_of(model) if given.compare else {}
        optimizer.step()
        optimizer.zero_grad()
        loss = share.detach()
        dist.all_reduce(loss)
        losses.append(float(loss))
        if dist.get_rank() == 0:
            print(
                f"step {step}: documents of {whole.lengths} tokens, {plan.local_length} of them here, planned in {planned * 1e3:.0f} ms; loss {losses[-1]:.6f}"
            )
            if step == 0:
                print(plan)
    return Trained(losses, gradients)


# -- in one process ----------------------------------------------------------------------------------------------------


def train_alone(model: Any, given: argparse.Namespace, device: torch.device) -> Trained:
    """As train_shared, of whole sequences, with transformers' eager attention and masks of (tokens, tokens)."""
    model.set_attn_implementation("eager")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    row = torch.arange(given.tokens, device=device)
    for step in range(given.steps):
        whole = draw(step, given.tokens, model.config.vocab_size, device)
        dense = {name: mask(0, 0, row[:, None], row) for name, (mask, _) in masks_of(model.config, whole.lengths).items()}
        added = {name: torch.where(allowed, 0.0, -torch.inf)[None, None] for name, allowed in dense.items()}
        attention_mask = added if len(added) > 1 else added["full_attention"]
        loss = summed_loss(model, *whole[1:], attention_mask=attention_mask) / (whole.labels != IGNORED).sum()
        loss.backward()
        gradients = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, gradients)


def compare(shared: Trained, alone: Trained) -> None:
    print("step  shared      one process")
    for step, (ours, theirs) in enumerate(zip(shared.losses, alone.losses, strict=True)):
        print(f"{step:4d}  {ours:.8f}  {theirs:.8f}")
    differences = {
        "losses": max([abs(ours / theirs - 1) for ours, theirs in zip(shared.losses, alone.losses, strict=True)]),
        "gradients": max([float((shared.gradients[name] - exact).abs().max() / exact.abs().max()) for name, exact in alone.gradients.items()]),
    }
    print("largest relative difference: " + ", ".join([f"{what} {largest:.1e}" for what, largest in differences.items()]))
    if any(largest > CLOSE[what] for what, largest in differences.items()):
        sys.exit(f"more than rounding: {CLOSE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=["packed-llama", "gpt-oss"], default="packed-llama", help="Tiny, with random weights.")
    parser.add_argument("--tokens", type=int, default=613, help="Tokens of a sequence, over all processes; any number.")
    parser.add_argument("--steps", type=int, default=3, help="Optimizer steps; each has documents of its own, and a plan of its own.")
    parser.add_argument("--checkpoint", action="store_true", help="Checkpoint activations: layers are computed again in the backward.")
    parser.add_argument("--compare", action="store_true", help="Repeat the run in one process, and fail if the losses differ by more than rounding.")
    given = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    tilewise.integrations.transformers.register()
    torch.manual_seed(0)
    model = make_model(given.model).to(device)
    untrained = copy.deepcopy(model) if given.compare and dist.get_rank() == 0 else None
    trained = train_shared(model, given, device)
    dist.barrier()  # gloo's threads let go of the last collective's tensors before Python ends: FSDP keeps them running
    dist.destroy_process_group()
    if untrained is not None:
        compare(trained, train_alone(untrained, given, device))


if __name__ == "__main__":
    main()
