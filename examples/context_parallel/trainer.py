"""transformers' Trainer on packed documents that several processes share (context parallelism): a tiny Qwen3, some of whose layers have a window.

    torchrun --standalone --nproc-per-node 2 examples/context_parallel/trainer.py --share 2

The last line it prints is JSON: the loss and the gradients' norm of every step. They are the same without torchrun, in one process.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import tilewise
from tilewise import distributed as twd
from tilewise import masks


class ContextParallelTrainer(Trainer):
    """Each batch of DataCollatorWithFlattening is one sequence, shared by `share` processes; with more processes than that, others have other batches.

    Trainer's own context parallelism stays off: it takes no attention but sdpa, and no mask but causal.
    """

    def __init__(self, *given: Any, share: int, **options: Any) -> None:
        self.share = share
        super().__init__(*given, **options)
        if share > 1:
            shape = (self.args.world_size // share, share)
            self.group = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp", "cp"))["cp"]

    def get_cp_size(self) -> int:
        """By which Trainer divides its count of tokens: it adds up those of all processes."""
        return self.share

    def _get_dataloader(self, *given: Any, **options: Any) -> DataLoader[Any]:
        loader = super()._get_dataloader(*given, **options)
        if self.share > 1:  # accelerate gives every process batches of its own
            shards = loader.batch_sampler
            shards.num_processes, shards.process_index = self.args.world_size // self.share, self.args.process_index // self.share
        return loader

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
        """What surrounds forward and backward, and this process's part of the inputs."""
        if self.share == 1:
            return nullcontext, inputs
        positions, config = inputs["position_ids"], self.model.config
        sizes = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        length, ranks = positions.shape[1], self.share
        # Tokens are dealt in chunks of 128. Fewer chunks than ranks would leave some without any, and transformers cannot compute nothing.
        even = [length // ranks + (rank < length % ranks) for rank in range(ranks)] if length <= 128 * (ranks - 1) else None
        plan = twd.plan(self.masks(positions[0]), length=length, group=self.group, batch=1, **sizes, shard_sizes=even)
        labels = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]  # the next token's, which may be on another rank
        whole = {"input_ids": inputs["input_ids"], "position_ids": positions, "labels": labels, "shift_labels": labels}
        return partial(twd.context, plan), {name: plan.shard(tensor, 1) for name, tensor in whole.items()}

    def masks(self, positions: Tensor) -> dict[str, Any]:
        """The mask of every type of layer, and how many there are of it. A document begins at each position 0."""
        full, config = masks.document((positions == 0).cumsum(0)) & masks.causal, self.model.config
        types = Counter(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
        if "sliding_attention" not in types:
            return {"full_attention": (full, types["full_attention"])}
        window = masks.sliding_window(config.sliding_window - 1, 0)  # transformers counts the token itself
        return {"full_attention": (full, types["full_attention"]), "sliding_attention": (full & window, types["sliding_attention"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=int, default=1, help="Processes that share a sequence; their number must be a multiple of it.")
    parser.add_argument("--batch", type=int, default=4, help="Documents of a sequence.")
    given = parser.parse_args()

    tilewise.integrations.transformers.register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    windows = {"use_sliding_window": True, "sliding_window": 50, "layer_types": ["full_attention", "sliding_attention"]}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=100, initializer_range=0.2, **sizes, **windows, attn_implementation="tilewise"))
    rows = [torch.randint(1, 100, (length,)).tolist() for length in (150, 40, 210, 90, 60, 300, 17, 120, 80, 200, 33, 70)]
    with tempfile.TemporaryDirectory() as folder:
        steps = {"max_steps": 3, "per_device_train_batch_size": given.batch, "learning_rate": 1e-2, "logging_steps": 1, "optim": "sgd"}
        arguments = TrainingArguments(output_dir=folder, **steps, report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True)
        documents = [{"input_ids": row, "labels": row} for row in rows]
        trainer = ContextParallelTrainer(model, arguments, DataCollatorWithFlattening(), documents, share=given.share)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": [entry["loss"] for entry in logged], "norms": [float(entry["grad_norm"]) for entry in logged]}))
    if dist.is_initialized():
        dist.barrier()  # gloo's threads let go of the last collective's tensors before Python ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
