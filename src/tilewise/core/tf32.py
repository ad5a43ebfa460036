"""Whether torch allows float32 products in TF32.

torch has an older switch for it (`allow_tf32`, `set_float32_matmul_precision`) and, from 2.9 on, a newer one (`fp32_precision`). The
newer one tells of both; to ask the older one after the newer was set is an error.
"""

import torch

_matmul = torch.backends.cuda.matmul

if hasattr(torch._C, "_get_fp32_precision_getter"):  # what fp32_precision asks, a microsecond sooner: every float32 call comes here

    def allows_tf32() -> bool:
        return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32")
elif hasattr(_matmul, "fp32_precision"):

    def allows_tf32() -> bool:
        return bool(_matmul.fp32_precision == "tf32")
else:

    def allows_tf32() -> bool:
        return bool(_matmul.allow_tf32)
