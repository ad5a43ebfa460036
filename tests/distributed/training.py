"""What every process of a spawned training test does: a model of transformers on its part of the tokens, beside the same model on all of them."""

import copy
import importlib.util
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError

import tilewise
from tilewise import distributed as twd
from tilewise import masks
from tilewise.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel" / "train.py"
TOKENS, CPU = 613, torch.device("cpu")


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("context_parallel_train", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Pass(NamedTuple):
    """One forward and backward."""

    loss: Tensor
    gradients: dict[str, Tensor]


class Run:
    """A model, its documents, and what one process makes of them with transformers' eager attention."""

    def __init__(self, name: str) -> None:
        tilewise.integrations.transformers.register()
        self.example = _example()
        torch.manual_seed(0)
        self.model = self.example.make_model(name)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.2)  # so that attention, and its sinks, matter
        self.whole = self.example.draw(0, TOKENS, self.model.config.vocab_size, CPU)
        self.plan = self.example.make_plan(self.model.config, self.whole.lengths)
        self.local = [self.plan.shard(t, 1) for t in self.whole[1:]]

    def alone(self, low: bool = False, attention: str = "eager") -> Pass:
        model, row = copy.deepcopy(self.model), torch.arange(TOKENS)
        model.set_attn_implementation(attention)
        allowed = {name: mask(0, 0, row[:, None], row) for name, (mask, _) in self.example.masks_of(model.config, self.whole.lengths).items()}
        added = {name: torch.where(dense, 0.0, -torch.inf)[None, None] for name, dense in allowed.items()}
        with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
            loss = self.example.summed_loss(model, *self.whole[1:], attention_mask=added if len(added) > 1 else added["full_attention"])
        loss.backward()
        return Pass(loss.detach(), self.example.gradients_of(model))

    def shared(self, wrap: Callable[[Any], Any] = lambda model: model, low: bool = False) -> Pass:
        """`wrap` may do anything to a copy of the model; DDP and FSDP average gradients, and so does this where neither is around the model."""
        model = copy.deepcopy(self.model)
        wrapped = wrap(model)
        with twd.context(self.plan):
            with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
                loss = self.example.summed_loss(wrapped, *self.local)
            (loss * self.plan.ranks).backward()
        gradients = self.example.gradients_of(model)
        if wrap not in (with_ddp, with_fsdp):
            for gradient in gradients.values():
                dist.all_reduce(gradient)
                gradient /= self.plan.ranks
        summed = loss.detach().clone()
        dist.all_reduce(summed)
        return Pass(summed, gradients)


def with_ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def with_fsdp(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def with_checkpoints(model: Any) -> Any:
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WRAPS = {"ddp": with_ddp, "fsdp": with_fsdp, "checkpoints": with_checkpoints, "compiled": compiled}


def check_passes(name: str, *wraps: str) -> None:
    run = Run(name)
    exact = run.alone()
    assert exact.gradients and all(bool(gradient.any()) for gradient in exact.gradients.values())
    for wrap in wraps:
        assert_same(wrap, run.shared(WRAPS[wrap]), exact, 2e-4)


def assert_same(what: str, found: Pass, exact: Pass, tolerance: float) -> None:
    """Of the largest gradient of each parameter."""
    torch.testing.assert_close(found.loss, exact.loss, rtol=tolerance / 10, atol=0, msg=lambda m: f"{what}: {m}")
    assert found.gradients.keys() == exact.gradients.keys()
    for name, gradient in exact.gradients.items():
        off = float((found.gradients[name] - gradient).abs().max() / gradient.abs().max())
        assert off < tolerance, f"{what}, {name}: {off}"


def check_autocast(name: str) -> None:
    """As tilewise in one process under autocast: with other roundings a router chooses other experts."""
    run = Run(name)
    assert_same("autocast", run.shared(low=True), run.alone(low=True, attention="tilewise"), 1e-2)  # each rank's gradients are rounded to bfloat16


def check_example(name: str, checkpoint: str) -> None:
    """The example's own comparison: three steps, new documents and a new plan in each."""
    example = _example()
    tilewise.integrations.transformers.register()
    torch.manual_seed(0)
    model, given = example.make_model(name), Namespace(tokens=500, steps=3, checkpoint=bool(checkpoint), compare=True)
    untrained = copy.deepcopy(model)
    trained = example.train_shared(model, given, CPU)
    example.compare(trained, example.train_alone(untrained, given, CPU))
    wrong = example.Trained(trained.losses, {each: 2 * gradient for each, gradient in trained.gradients.items()})
    with pytest.raises(SystemExit, match="more than rounding"):
        example.compare(wrong, trained)


def check_mistakes() -> None:
    run = Run("gpt-oss")
    model, (ids, labels, positions), plan = run.model, run.local, run.plan
    with twd.context(plan):
        for shape in ((1, plan.local_length), (1, 1, plan.local_length, plan.local_length)):
            with pytest.raises(InputError, match=rf"attention_mask of 1 x .*{plan.local_length}: .* the plan's mask is used.*masks.padding"):
                model(input_ids=ids, position_ids=positions, attention_mask=torch.ones(shape))
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    for mask, has in ((masks.causal, "'mask'"), ({"full": None, "sliding": None}, "'full', 'sliding'")):
        with twd.context(twd.plan(mask, length=TOKENS, **sizes)), pytest.raises(InputError, match=f"the plan has no mask 'sliding_attention'; it has {has}"):
            model(input_ids=ids, position_ids=positions)
    with twd.context(plan), pytest.raises(twd.DisagreementError, match=rf"ranks? .*: InputError: query has .* the plan is for .* of {TOKENS} tokens"):
        model(input_ids=run.whole.ids, position_ids=run.whole.positions)  # not cut by plan.shard
    with twd.context(plan):
        loss = run.example.summed_loss(with_checkpoints(copy.deepcopy(model)), ids, labels, positions)
    with pytest.raises(CheckpointError):  # computed again outside of the block, of local tokens
        loss.backward()
    exact = run.alone().loss
    loss = run.example.summed_loss(model, ids, labels, positions).detach()  # local tokens as a sequence of their own: nothing tells tilewise otherwise
    dist.all_reduce(loss)
    assert abs(loss / exact - 1) > 1e-5
    assert_same("after the mistakes", run.shared(), Pass(exact, run.alone().gradients), 2e-4)


def check_two_processes() -> None:
    """All in one start of the processes, which takes longer than most of the checks."""
    check_passes("packed-llama", "ddp", "fsdp", "checkpoints", "compiled")
    check_autocast("packed-llama")
    check_autocast("gpt-oss")
    check_example("packed-llama", "")
    check_example("gpt-oss", "checkpoint")
    check_mistakes()
