"""What a tensor's memory holds: kernels read it through pointers, so it must be the tensor's values.

torch may keep a negation as a flag (`z.conj().imag` is a view of z's memory with that flag), and zeros without any memory. Its own operations know of
them. So a problem's tensors are resolved when it is made (core/problem.py), gradients when they come in (engines/autograd.py), and lists of tiles where a
schedule is made of them. The torch operator's dispatch resolves its arguments by itself.
"""

import torch
from torch import Tensor
from torch._C import _functorch
from torch.nn import Parameter

from tilewise.errors import InputError


def is_lazy(tensor: Tensor) -> bool:
    return tensor.is_neg() or tensor._is_zerotensor()


def resolved(tensor: Tensor) -> Tensor:
    """The same values in memory; the tensor itself where they already are. Gradients pass."""
    if torch.compiler.is_compiling() or not is_lazy(tensor):
        return tensor
    return tensor.resolve_neg().clone()


def can_be_looked_at(tensor: Tensor) -> bool:
    """Whether the contents of a tensor are known now: not while torch.compile traces, inside torch.func's transforms, or of fake and meta tensors."""
    if torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None:
        return False
    return type(tensor) in (Tensor, Parameter) and not tensor.is_meta


def check_dense(tensor: Tensor, name: str) -> None:
    """Raises unless elements lie in memory by strides."""
    if tensor.layout != torch.strided:
        raise InputError(f"{name} has layout {tensor.layout}; tilewise takes dense tensors: {name}.to_dense() makes one")


def check_kept(tensor: Tensor, name: str) -> None:
    """Raises if the tensor's memory has been freed, as FSDP does with parameters outside of their module's forward."""
    if can_be_looked_at(tensor) and not is_lazy(tensor) and tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)} and no memory: it was freed. FSDP frees the parameters of a module when its forward ends, so shard the "
            "module that calls attention, not one inside it that only makes a score or mask"
        )


def moved(tensor: Tensor, device: torch.device, name: str) -> Tensor:
    """The tensor on a device, its values in memory there."""
    check_kept(tensor, name)
    if tensor.device == device:
        return resolved(tensor)
    if tensor.is_meta:
        raise InputError(f"{name} is on the meta device, so it has no contents, but the query is on {device}; put it there")
    return resolved(tensor.to(device))
