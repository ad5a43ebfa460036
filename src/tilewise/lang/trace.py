"""Tracing: a Python mask or score function, called once with symbols, becomes a program.

Written so that torch.compile can follow it too: under `fullgraph=True` the user's function, its closure and graph
intermediates it captures are all seen by the compiler, and only the finished program's text enters the graph.
"""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.errors import TraceError
from tilewise.lang.checkpoints import allow_a_mode
from tilewise.lang.program import INDICES, BoundProgram, CaptureSpec, Instruction, finish, program_of
from tilewise.lang.refusals import AS_MASK, AS_SCORE, WRITING, refuse
from tilewise.lang.rows import Row
from tilewise.lang.stand_ins import STANDS_IN, StandIns
from tilewise.lang.symbol import Symbol
from tilewise.lang.torch_calls import called
from tilewise.lang.tracer import Tracer, has_symbol
from tilewise.lang.types import DTYPE_OF, NAME_OF


def trace_mask(function: Callable[..., Any], device: Any = None) -> BoundProgram:
    """The program of a mask function f(b, h, q, kv)."""
    tracer = Tracer(torch.device("cpu") if device is None else device)
    symbols = [Symbol(tracer, tracer.tape.index(name)) for name in INDICES]
    result = _call(tracer, function, symbols, "mask", "(b, h, q, kv)")
    at = _operand_of_result(tracer, result, function)
    if not tracer.tape.type(at).is_bool:
        raise TraceError(
            f"mask function {name_of(function)}{defined_at(function)} returned {DTYPE_OF[tracer.tape.type(at).dtype]} values; a mask returns a "
            f"boolean, true where attention is allowed, for instance q >= kv; a function that changes the score goes to {AS_SCORE}"
        )
    return _finish(tracer, at)


def trace_score(functions: tuple[Callable[..., Any], ...], dtype: torch.dtype = torch.float32, device: Any = None) -> BoundProgram:
    """The program of score functions f(score, b, h, q, kv), applied in order. `dtype` is the precision scores are kept in."""
    tracer = Tracer(torch.device("cpu") if device is None else device)
    symbols = [Symbol(tracer, tracer.tape.index(name)) for name in INDICES]
    score = Symbol(tracer, tracer.tape.score(NAME_OF[dtype]))
    for function in functions:
        result = _call(tracer, function, [score, *symbols], "score", "(score, b, h, q, kv)")
        found = Symbol(tracer, _operand_of_result(tracer, result, function))
        if tracer.tape.type(found.at).is_bool:
            raise TraceError(f"score function {name_of(function)}{defined_at(function)} returned booleans; a function that allows or forbids goes to {AS_MASK}")
        score = tracer.cast(found, NAME_OF[dtype])
    return _finish(tracer, score.at)


def name_of(function: Any) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))


def defined_at(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def _call(tracer: Tracer, function: Callable[..., Any], symbols: list[Symbol], kind: str, signature: str) -> Any:
    if torch.compiler.is_dynamo_compiling():
        allow_a_mode()
        if not STANDS_IN:
            with _Watch():
                return function(*symbols)
        stand_ins = StandIns()
        given = [stand_ins.hide(s) for s in symbols]
        before = _item_assignments()
        with _Watch(stand_ins):
            result = function(*given)
        if _item_assignments() != before:
            raise refuse("an item of a tensor is assigned to; a mask or score function must not have side effects")
        return stand_ins.reveal(result)
    _check_parameters(function, len(symbols), kind, signature)
    watch = _Watch()
    with watch:
        result = function(*symbols)
    tracer.repeatable = tracer.repeatable and not watch.computed
    return result


def _item_assignments() -> int:
    """How many assignments to items of tensors (`table[0] = 1`) the graph being compiled has: from torch 2.14 on, Dynamo hands them to no mode."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return len(InstructionTranslator.current_tx().output.graph.find_nodes(op="call_function", target=operator.setitem))


# Dynamo runs the function as it is and goes on with the number. What torch.compiler.assume_constant_result does, which would import Dynamo with tilewise.
_item_assignments._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take any


class _Watch(TorchFunctionMode):
    """Sees `tensor[symbol]`, which torch would not hand to the symbol, and stops writes to captured tensors."""

    def __init__(self, stand_ins: StandIns | None = None) -> None:
        super().__init__()
        self.stand_ins = stand_ins
        self.computed = False  # whether the function computed with tensors of its own

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.stand_ins is not None:
            if func is torch.Tensor.as_subclass:  # symbol_of
                return self.stand_ins.reveal(args[0])
            func, args, kwargs = self.stand_ins.opened(func, args, kwargs)
        if has_symbol(args) or has_symbol(tuple(kwargs.values())):
            found = called(func, args, kwargs)
            return found if self.stand_ins is None else self.stand_ins.hide(found)
        name = _WRITERS.get(func, "") if torch.compiler.is_compiling() else getattr(func, "__name__", "")
        if name == "__set__":
            raise refuse("to assign to .data, or another attribute of a tensor, changes it in place; a mask or score function must not have side effects")
        if _writes(name) or kwargs.get("inplace"):
            raise refuse(f"{name} changes a tensor in place; a mask or score function must not have side effects")
        if kwargs.get("out") is not None:
            raise refuse(WRITING)
        if name not in _METADATA:
            self.computed = True
        return func(*args, **kwargs)


_IN_PLACE = {f"__i{n}__" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")}


def _writes(name: str) -> bool:
    """Whether torch's function of this name changes a tensor in place."""
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.startswith("_"))


_WRITERS = {getattr(torch.Tensor, name): name for name in dir(torch.Tensor) if _writes(name)}  # torch.compile tells functions apart, but not their names

_MODULES = "tilewise.nn"
_LIBRARY = ("tilewise.masks", "tilewise.scores")
_METADATA = {"__get__", "dim", "size", "stride", "numel", "__len__", "is_floating_point"}


def _check_parameters(function: Any, count: int, kind: str, signature: str) -> None:
    if not callable(function):
        hint = "; scores.bias(tensor) adds one to the scores" if kind == "score" and isinstance(function, torch.Tensor) else ""
        raise TraceError(f"a {kind} must be a function of {signature}, got {type(function).__name__}{hint}")
    if isinstance(function, torch.nn.Module) and type(function).__module__ == _MODULES:
        made = f"the module {type(function).__name__}, which makes one: call it, and pass what it returns"
        raise TraceError(f"a {kind} must be a function of {signature}, got {made}")
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # builtins without a signature: calling them will tell
        return
    try:
        parameters.bind(*range(count))
    except TypeError:
        if type(function).__module__ in _LIBRARY:  # a mask or score: calling it will tell (named.py)
            return
        given = len(parameters.parameters)
        other = {
            ("mask", 5): f" It looks like a score function: pass it as {AS_SCORE}.",
            ("score", 4): f" It looks like a mask function: pass it as {AS_MASK}.",
        }
        found = f"{name_of(function)}{defined_at(function)} takes {given} parameters: {parameters}."
        maker = " It makes one: call it, and pass what it returns." if getattr(function, "__module__", None) in _LIBRARY else ""
        raise TraceError(f"a {kind} function takes {signature}, but {found}" + (maker or other.get((kind, given), ""))) from None


def _operand_of_result(tracer: Tracer, result: Any, function: Callable[..., Any]) -> int:
    problem = None
    if result is None:
        problem = "None; a mask or score function must return its value"
    elif isinstance(result, torch.Tensor) and result.dim() != 0:
        problem = f"a captured tensor of shape {tuple(result.shape)} whole; index it with b, h, q or kv, for instance tensor[h] or tensor[q, kv]"
    elif isinstance(result, Row):
        problem = result.described()
    if problem is not None:
        raise TraceError(f"{name_of(function)}{defined_at(function)} returned {problem}")
    return tracer.operand(result)


def _finish(tracer: Tracer, result: int) -> BoundProgram:
    """The program of the result, and the arguments it uses: what was met on the way but not needed is forgotten."""
    specs = tuple([CaptureSpec(NAME_OF[t.dtype], t.dim()) for t in tracer.captures])
    program = finish(tracer.tape, (result,), specs)
    used: dict[str, list[int]] = {"load": [], "int": [], "float": []}
    for op, _, attr, _ in program.instructions:
        if op in used and int(attr) not in used[op]:
            used[op].append(int(attr))
    kept = [
        Instruction(op, args, str(used[op].index(int(attr))), type) if op in used else Instruction(op, args, attr, type)
        for op, args, attr, type in program.instructions
    ]
    program = program_of(kept, program.results, tuple([specs[k] for k in used["load"]]))
    captures = tuple([tracer.captures[k] for k in used["load"]])
    return BoundProgram(program, captures, tuple([tracer.ints[k] for k in used["int"]]), tuple([tracer.floats[k] for k in used["float"]]), tracer.repeatable)
