"""The kernels of the Hopper engine by name, and the types of what the copy engine brings them."""

from typing import Any

from triton.experimental.gluon import language as gl

from tilewise.engines.gluon import around, backward, backward_wide, forward, mend, stencils
from tilewise.engines.triton.launch import Block

KERNELS: dict[str, Any] = {
    "hopper_forward": forward.forward, "mend_forward": mend.mend_forward,
    "prepare_backward": around.prepare, "hopper_backward": backward.backward, "hopper_backward_wide": backward_wide.backward, "finish_backward": around.finish,
    "cut_stencils": stencils.cut_stencils,
}  # fmt: skip
DTYPES = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}


def descriptor_type(block: Block) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(block.sizes), DTYPES[block.dtype])
    return f"tensordesc<{block.dtype}{list(block.sizes)},{layout!r}>"
