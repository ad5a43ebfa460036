"""What torch.compile has to be told inside torch.utils.checkpoint, torch.cond and the like.

It refuses whatever changes something outside of such a region, because the region may be run again. What tilewise does there while Dynamo traces it (a mode
that is entered and left again, a mark on a mask) concerns the tracing alone: nothing of it has to happen again. Dynamo runs the functions below as they are,
when it comes to them.
"""

from typing import Any


def allow_changes(allowed: bool) -> bool:
    """Whether changes are to be allowed from now on in the region that is being traced; whether they were. Some older versions of torch always refuse them."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    before = getattr(tracer, ALLOWS, None)
    if before is not None:
        setattr(tracer, ALLOWS, allowed)
    return bool(before)


def allow_a_mode() -> None:
    """To enter a TorchFunctionMode that is left again: the first one counts as a change of the modes outside."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import torch_function

    register = getattr(getattr(torch_function, "TorchFunctionModeStackVariable", None), "register_mutation", None)
    if register is None:  # another version's Dynamo
        return
    before = allow_changes(True)
    try:
        register(InstructionTranslator.current_tx())
    finally:
        allow_changes(before)


ALLOWS = "unsafe_allow_externally_visible_side_effects"
for _function in (allow_changes, allow_a_mode):
    _function.__dict__["_dynamo_marked_constant"] = True  # what torch.compiler.assume_constant_result does, which would import Dynamo with tilewise
