"""The error rule on whole models: outputs and parameter gradients on tilewise against the same model in fp64 on torch's attention.

Plain PyTorch, the measure, is the same model in the tested dtype on torch's own kernels: their errors differ by luck, so several are taken.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import tilewise as tw
from tests.support.error_rule import FORWARD, errors_of, hold, hold_gradient
from tilewise.frontend.dispatch import candidates

ModelCall = Callable[[nn.Module, torch.dtype], Tensor]
OTHER_SEEDS = range(2, 7)  # of outputs' gradients, for parameters of few elements (see error_rule)
MATTERS = 1e-3  # leaving attention out moves the output by at least this share of its size


class Without(TorchFunctionMode):
    """The control: every SDPA call gives zeros, and so does nn.MultiheadAttention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            query, value = (args[k] if len(args) > k else kwargs[name] for k, name in ((0, "query"), (2, "value")))
            return query.new_zeros(*query.shape[:-1], value.shape[-1]) + 0 * query[..., :1]
        if func is functional.multi_head_attention_forward:
            return torch.zeros_like(args[0]), None
        return func(*args, **(kwargs or {}))


class Exactly(TorchFunctionMode):
    """fp64 stays fp64: models turn to fp32 in places, which would spoil the truth."""

    CASTS = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.softmax, functional.softmax)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.CASTS and isinstance(args[0], Tensor) and args[0].dtype != torch.float32:
            if func is torch.Tensor.float:
                return args[0].double()
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {name: torch.float64 if a is torch.float32 else a for name, a in kwargs.items()}
        if func is torch.functional.einsum:  # takes one dtype only
            args = tuple(a.double() if isinstance(a, Tensor) else a for a in args)
        return func(*args, **kwargs)


Scope = Callable[[nn.Module], AbstractContextManager[Any]]
TORCHS_OWN: tuple[Scope, ...] = (lambda model: nullcontext(), lambda model: sdpa_kernel(SDPBackend.MATH))


def check(
    model: nn.Module,
    call: ModelCall,
    on_tilewise: Scope,
    *,
    backend: str = "flex",
    dtype: torch.dtype = torch.float32,
    plain: tuple[Scope, ...] = TORCHS_OWN,
    without: Scope = lambda model: Without(),
) -> "tw.watch":
    """Hold a model to the rule, with tilewise's engine `backend`; gives what was watched, for more to be asked of it.

    `plain` are the ways to run it on torch alone, the first in fp64 for the truth; `without` leaves attention out.
    """
    __tracebackhide__ = True
    model = model.to(dtype)
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "disable_gradient_checkpointing"):
        exact.disable_gradient_checkpointing()  # what is computed again in the backward is out of the reach of Exactly
    with plain[0](exact), Exactly():
        truth = _results(exact, call, torch.float64)
    measures = []
    for scope in plain:
        with scope(model):
            measures.append(_results(model, call, dtype))
    with on_tilewise(model), tw.attention_backend(backend), tw.watch(model) as watched:
        tested = _results(model, call, dtype)
    with without(model), torch.no_grad():
        moved = (call(model, dtype) - measures[0]["output"]).abs().max()
    assert moved > MATTERS * measures[0]["output"].abs().max(), f"attention hardly matters here: without it the output moves by {float(moved):.3g}"
    largest = max(float(g.abs().max()) for name, g in truth.items() if name != "output")

    def in_other_draws(name: str) -> Tensor:
        with plain[0](exact), Exactly():
            truths = [_results(exact, call, torch.float64, seed)[name] for seed in OTHER_SEEDS]
        with plain[0](model):
            return errors_of([(_results(model, call, dtype, seed)[name], other) for seed, other in zip(OTHER_SEEDS, truths, strict=True)])

    for name, expected in truth.items():
        errors = errors_of([(found[name], expected) for found in measures])
        if name == "output":
            hold(name, tested[name], expected, errors, FORWARD)
        else:
            hold_gradient(name, tested[name], expected, errors, largest, partial(in_other_draws, name))
    assert any(float(g.abs().max()) > 0 for name, g in tested.items() if name != "output")
    return watched


def _results(model: nn.Module, call: ModelCall, dtype: torch.dtype, seed: int = 1) -> dict[str, Tensor]:
    """The output, and the gradient of every parameter that gets one; `seed` draws the output's gradient."""
    model.zero_grad(set_to_none=True)
    out = call(model, dtype)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    (out * weights).sum().backward()
    found = {"output": out.detach()}
    found |= {f"gradient of {name}": p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def reached(watched: "tw.watch") -> None:
    """Every attention layer was served by tilewise's own engines, and none went elsewhere."""
    assert watched.layers, "no attention layer was found"
    assert not watched.bypassing, str(watched)
    served_by_flex(watched)


def served_by_flex(watched: "tw.watch") -> None:
    assert watched.engines and set(watched.engines) <= {e.name for e in candidates("flex")}, str(watched)


def engine_of(backend: str, is_causal: bool = False) -> str:
    """The engine that a backend means here, for plain or causal attention in fp32 on the CPU."""
    q = torch.zeros(1, 1, 4, 8)
    engine = tw.explain(q, q, q, is_causal=is_causal, backend=backend).engine
    assert engine is not None
    return engine


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The same numbers in every dtype: rounded as bf16 does."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(dtype)
