"""The Triton engine's kernels by name. Importing this imports Triton."""

from collections.abc import Mapping
from typing import Any

from tilewise.engines.triton.kernels import backward, decode, forward

KERNELS: Mapping[str, Any] = {
    "fwd": forward.fwd,
    "decode_split": decode.decode_split,
    "decode_combine": decode.decode_combine,
    "bwd_preprocess": backward.bwd_preprocess,
    "bwd": backward.bwd,
    "dq_postprocess": backward.dq_postprocess,
}
