"""What a mask or score function must not do: the errors, with what to write instead and where in the user's code."""

import sys
from types import FrameType

import torch

from tilewise.errors import TraceError

LOOKED_UP = (
    "a dict, a set or a cache is looked up by one concrete value, and b, h, q, kv and score have another for every element: put a dict's values in a "
    "tensor and index that, and write (h == 1) | (h == 3), or torch.isin with a tensor, instead of `h in {1, 3}`"
)
BRANCHING = (
    "Python cannot branch on a value that differs for every (b, h, q, kv): `if`, `and`, `or`, `not`, `in`, chained "
    "comparisons and min()/max() need one concrete value. Write torch.where(condition, a, b) instead of `if`, "
    "`&`, `|`, `~` (with parentheses) instead of `and`, `or`, `not`, `(a <= x) & (x < b)` instead of `a <= x < b`, and "
    "torch.minimum/torch.maximum instead of min/max"
)
AS_MASK = "mask= (in flex_attention, block_mask=create_block_mask(...))"
AS_SCORE = "score= (in flex_attention, score_mod=)"
WRITING = "a mask or score function must not write to a tensor; return the new value instead"

# How users write the operations that do not take every dtype, and what to do about it.
WRITTEN = {
    "sub": "a difference (-)",
    "floordiv": "a quotient (//)",
    "mod": "a remainder (%)",
    "neg": "the negative (-)",
    "pos": "the positive (+)",
    "and": "the conjunction (&)",
    "or": "the disjunction (|)",
    "xor": "the exclusive or (^)",
    "not": "the inversion (~)",
    "shl": "a shift (<<)",
    "shr": "a shift (>>)",
    "where": "torch.where",
}
CONVERT = " is not defined, as in torch; convert first, for instance with .long(), .float() or .bool()"
ADVICE = {
    "sub": " is not defined for booleans, as in torch; use ~ or ^, or convert with .int()",
    "dot": " is not defined, as in torch; count with (a * c).sum(), or convert the captured tensors outside the function",
    "where": " is not defined: its condition must be boolean; compare, for instance x != 0",
}


def location() -> str:
    """Where in the user's own code we are, as ' at file:line'."""
    if torch.compiler.is_compiling():
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not (module.startswith("tilewise.") or module == "torch" or module.startswith("torch.")):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def refuse(message: str) -> TraceError:
    return TraceError(f"{message} (in a mask or score function{location()})")


def undefined(op: str, dtypes: list[torch.dtype]) -> TraceError:
    """For an operation that does not take values of these dtypes."""
    return refuse(f"{WRITTEN.get(op, op)} of {' and '.join([str(d) for d in dtypes])} values{ADVICE.get(op, CONVERT)}")


def of_numpy(name: str) -> TraceError:
    """For one of numpy's functions."""
    return refuse(f"numpy's {name} needs numbers, and cannot be traced; use torch{f'.{name}' if hasattr(torch, name) else chr(39) + 's functions'}")
