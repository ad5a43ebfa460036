"""The Hopper engine's kernels by name. Importing this imports Triton and Gluon."""

from collections.abc import Mapping
from typing import Any

from tilewise.engines.gluon.kernels import backward, backward_wide, bwd_pre_post, forward, fwd_fixup, mask_bits

KERNELS: Mapping[str, Any] = {
    "hopper_fwd": forward.fwd,
    "hopper_fwd_fixup": fwd_fixup.fwd_fixup,
    "hopper_bwd_preprocess": bwd_pre_post.bwd_preprocess,
    "hopper_bwd": backward.bwd,
    "hopper_bwd_wide": backward_wide.bwd,
    "hopper_bwd_postprocess": bwd_pre_post.bwd_postprocess,
    "pack_mask_bits": mask_bits.pack_mask_bits,
}
