"""On PYTHONPATH of SimpleTuner's processes where there is no GPU: its data loader pins memory, which torch refuses without one."""

import torch

if not torch.cuda.is_available():
    torch.Tensor.pin_memory = lambda self, device=None: self
