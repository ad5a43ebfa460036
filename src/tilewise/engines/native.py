"""The native engine: torch's scaled_dot_product_attention, for what it can express. Also the way to cuDNN."""

import threading
from typing import NoReturn

import torch
from torch import Tensor

from tilewise.engines.base import Engine, Gradients, Output, on_boundaries
from tilewise.problem import Problem
from tilewise.tiles import dense_capture

SDPA = torch._C._nn.scaled_dot_product_attention  # torch's own, also where somebody replaced the name in torch.nn.functional


class _OwnCall(threading.local):
    running = False


own_call = _OwnCall()  # whether SDPA is being called by tilewise itself: those who intercept or watch SDPA leave that call alone


class NativeEngine(Engine):
    """Called outside the tilewise operator: torch differentiates it itself."""

    name = "native"
    summary = "torch SDPA, for problems it can express"

    def refuse(self, problem: Problem) -> str | None:
        if problem.score is not None or problem.sinks is not None:
            return "SDPA takes no score function or sinks"
        if problem.tiles is not None:
            return "SDPA takes no tile map"
        if problem.mask is not None and not problem.is_causal_only and self._dense(problem) is None:
            return "SDPA takes no mask but causal and a tensor of (queries, keys)"
        if problem.kv_len == 0 or problem.q_len == 0 or problem.batch == 0 or problem.heads == 0:
            return f"SDPA does not define empty problems, got {problem.describe()}"
        if problem.device.type == "cuda" and not all([on_boundaries(t) for t in (problem.query, problem.key, problem.value)]):
            return "SDPA's CUDA kernels need rows of consecutive elements that begin on 16 bytes"
        if problem.deterministic and problem.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            return "SDPA is deterministic on CUDA only under torch.use_deterministic_algorithms(True)"
        return None

    def call(self, problem: Problem) -> Tensor:
        return self.call_with(problem, self._dense(problem), problem.is_causal_only)

    def call_with(self, problem: Problem, mask: Tensor | None, is_causal: bool) -> Tensor:
        """SDPA with a mask as torch takes it, which the problem need not know of."""
        own_call.running = not torch.compiler.is_compiling()
        try:
            return SDPA(
                problem.query, problem.key, problem.value, attn_mask=mask, dropout_p=problem.dropout_p,
                is_causal=is_causal, scale=problem.scale, enable_gqa=problem.heads != problem.kv_heads,
            )  # fmt: skip
        finally:
            own_call.running = False

    @staticmethod
    def _dense(problem: Problem) -> Tensor | None:
        if problem.mask is None or problem.is_causal_only:
            return None
        return dense_capture(problem.mask, (problem.batch, problem.heads, problem.q_len, problem.kv_len))

    def forward(self, problem: Problem) -> Output:
        return self._outside()

    def backward(self, problem: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        return self._outside()

    def _outside(self) -> NoReturn:
        raise NotImplementedError("the native engine is called directly, not through the tilewise operator")
