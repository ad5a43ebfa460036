"""One score function for each function of torch, finite and smooth for the scores of a small problem."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

SCORES: dict[str, Callable[..., Any]] = {
    "log1p": lambda s, b, h, q, kv: torch.log1p(s * s),
    "expm1": lambda s, b, h, q, kv: torch.expm1(s * 0.5),
    "log10": lambda s, b, h, q, kv: torch.log10(s * s + 0.1),
    "tan": lambda s, b, h, q, kv: torch.tan(torch.tanh(s)),
    "atan": lambda s, b, h, q, kv: torch.atan(s * 3.0) + s,
    "atan2": lambda s, b, h, q, kv: s + torch.atan2(s, (q - kv) + 0.5),
    "asin and acos": lambda s, b, h, q, kv: torch.asin(torch.tanh(s) * 0.9) + torch.acos(torch.tanh(s * 0.5)) + s,
    "asinh": lambda s, b, h, q, kv: torch.asinh(s * 3.0) + torch.asinh((s * s + 0.1) * 1e10) * 0.1,
    "acosh and atanh": lambda s, b, h, q, kv: torch.acosh(s * s + 1.1) + torch.acosh((s * s + 0.1) * 1e10) * 0.1 + torch.atanh(torch.tanh(s) * 0.9),
    "lerp and others": lambda s, b, h, q, kv: (
        torch.lerp(s, s * s, 0.3) + torch.logaddexp2(s, -s) + functional.mish(s) + torch.fmax(s, s * 0.5) + torch.frac(kv * 0.3)
    ),
    "sinh": lambda s, b, h, q, kv: torch.sinh(s * 0.5),
    "cosh": lambda s, b, h, q, kv: torch.cosh(s) + s,
    "erfc": lambda s, b, h, q, kv: torch.erfc(-s),
    "gelu": lambda s, b, h, q, kv: functional.gelu(s),
    "gelu by tanh": lambda s, b, h, q, kv: functional.gelu(s, approximate="tanh"),
    "softplus": lambda s, b, h, q, kv: functional.softplus(s * 2.0),
    "softplus with a slope": lambda s, b, h, q, kv: functional.softplus(s, beta=2.0, threshold=3.0),
    "fmod": lambda s, b, h, q, kv: s + 0.25 * torch.fmod(q - kv, 5) + torch.fmod(kv * 0.75, 2.0),
    "remainder": lambda s, b, h, q, kv: s + 0.25 * torch.remainder(q - kv, 5),
    "isfinite": lambda s, b, h, q, kv: torch.where(torch.isfinite(1.0 / (q - kv)), s, -s),
    "logaddexp": lambda s, b, h, q, kv: torch.logaddexp(s, -0.5 * s),
}
