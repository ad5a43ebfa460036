"""What cannot be traced is refused with the place, the problem and what to write instead."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import tilewise as tw
from tilewise import masks, scores
from tilewise.errors import InputError, TraceError
from tilewise.lang import trace_mask, trace_score

TABLE = torch.arange(12).view(3, 4)
EMPTY = torch.zeros(0)
COMPLEX = torch.zeros(5, dtype=torch.complex64)
ROW = torch.zeros(5)
PAIRS = torch.zeros(3, 4, dtype=torch.bool)


@torch.library.custom_op("tilewise_tests::add", mutates_args=())
def operator_with_a_known_name(x: torch.Tensor) -> torch.Tensor:
    return x + 42


def branches(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s if q > kv else s * 2


def mutates_by_item(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    ROW[q] = 1.0
    return s


def mutates_by_fixed_item(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    ROW[0] = 1.0
    return s


def writes_to_a_row(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    TABLE[h][0] = 1
    return s


def mutates_a_symbol_by_item(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    s[0] = 1.0
    return s


def loops(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + sum(q)


def unpacks(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    first, *_ = q
    return s + first


@cache
def doubled(x: Any) -> Any:
    return x * 2


LONG = torch.zeros(3, 600)

# The function, and what its error must say besides the place. Every function fails on the line after its `def`, or on its lambda's.
REFUSED: dict[str, tuple[Callable[..., Any], list[str]]] = {
    # Python wants one concrete value.
    "if": (branches, ["`if`", "torch.where(condition, a, b)"]),
    "and": (lambda s, b, h, q, kv: torch.where(q > 1 and kv > 1, s, 0.0), ["`and`", "`&`, `|`, `~` (with parentheses)"]),
    "or": (lambda s, b, h, q, kv: torch.where(q > 1 or kv > 1, s, 0.0), ["`or`", "`&`, `|`, `~` (with parentheses)"]),
    "not": (lambda s, b, h, q, kv: torch.where(not q > 1, s, 0.0), ["`not`", "`&`, `|`, `~`"]),
    "chained comparison": (lambda s, b, h, q, kv: torch.where(0 < q < 3, s, 0.0), ["chained", "(a <= x) & (x < b)"]),
    "min": (lambda s, b, h, q, kv: s + min(q, kv), ["min()/max()", "torch.minimum/torch.maximum"]),
    "max": (lambda s, b, h, q, kv: s + max(q, 3), ["min()/max()", "torch.minimum/torch.maximum"]),
    "in a tuple": (lambda s, b, h, q, kv: s * (q in (1, 2, 3)), ["`in`", "torch.where"]),
    "in a symbol": (lambda s, b, h, q, kv: s * (1 in q), ["`in`"]),
    "in a tensor": (lambda s, b, h, q, kv: s * (q in ROW), ["`in`"]),
    "in a set": (lambda s, b, h, q, kv: s * (h in {1, 3}), ["a set", "(h == 1) | (h == 3)", "torch.isin"]),
    "dict": (lambda s, b, h, q, kv: s + {0: 1.0}[h], ["a dict", "tensor and index that"]),
    "dict of rows": (lambda s, b, h, q, kv: s + {0: 1.0}.get(TABLE[h], 0.0), ["a dict", "tensor and index that"]),
    "cached function": (lambda s, b, h, q, kv: s + doubled(h), ["a cache", "concrete"]),
    "int()": (lambda s, b, h, q, kv: s + int(q), ["int()", ".long()"]),
    "float()": (lambda s, b, h, q, kv: s + float(q), ["float()", ".float()"]),
    "round()": (lambda s, b, h, q, kv: round(s), ["round()", "torch.round"]),
    "math.trunc": (lambda s, b, h, q, kv: math.trunc(s), ["math.trunc", "torch.trunc"]),
    "divmod": (lambda s, b, h, q, kv: s + divmod(q, 3)[0], ["divmod()", "// and %"]),
    "len()": (lambda s, b, h, q, kv: s + len(q), ["length"]),
    "range()": (lambda s, b, h, q, kv: s + len(range(q)), ["range()", "tensor"]),
    "list index": (lambda s, b, h, q, kv: s + [1, 2, 3][q], ["list", "tensor"]),
    "math.sqrt": (lambda s, b, h, q, kv: s + math.sqrt(q), ["math.*", "torch.*"]),
    "math.floor": (lambda s, b, h, q, kv: s + math.floor(s), ["math.*", "torch.*"]),
    "np.sqrt": (lambda s, b, h, q, kv: s + np.sqrt(q), ["numpy's sqrt", "use torch.sqrt"]),
    "np.maximum": (lambda s, b, h, q, kv: s + np.maximum(q, kv), ["numpy's maximum", "use torch.maximum"]),
    "np.add.reduce": (lambda s, b, h, q, kv: s + np.add.reduce(q), ["numpy's add", "use torch.add"]),
    "np.where": (lambda s, b, h, q, kv: np.where(q > kv, s, 0.0), ["numpy's where", "use torch.where"]),
    "np.cbrt": (lambda s, b, h, q, kv: s + np.cbrt(q), ["numpy's cbrt", "use torch's functions"]),
    "np.sqrt of a row": (lambda s, b, h, q, kv: s + np.sqrt(TABLE[h]).sum(), ["numpy's sqrt", "use torch.sqrt"]),
    "an array": (lambda s, b, h, q, kv: s + np.ones(3) * q, ["ndarray", "numbers or tensors"]),
    ".item()": (lambda s, b, h, q, kv: s + q.item(), ["item()", "concrete"]),
    "iterating": (loops, ["iterated"]),
    "unpacking": (unpacks, ["iterated or unpacked"]),
    "indexing a symbol": (lambda s, b, h, q, kv: s[0], ["single values", "indexed"]),
    # Not in the language.
    "unknown function": (lambda s, b, h, q, kv: torch.lgamma(s), ["'lgamma'", "tanh"]),
    "unknown method": (lambda s, b, h, q, kv: s.cumsum(0), ["'cumsum'", "tanh"]),
    "functions of lists": (lambda s, b, h, q, kv: torch.stack([s, s]), ["'stack'"]),
    "functional": (lambda s, b, h, q, kv: F.softmax(s, dim=-1), ["'softmax'"]),
    "custom operator": (lambda s, b, h, q, kv: torch.ops.tilewise_tests.add(s), ["'torch.ops.tilewise_tests.add'"]),
    "keyword": (lambda s, b, h, q, kv: torch.round(s, decimals=1), ["round", "decimals=1", "round(input)"]),
    "method keyword": (lambda s, b, h, q, kv: s.round(decimals=1), ["round", "decimals=1"]),
    "too few arguments": (lambda s, b, h, q, kv: s.minimum(), ["minimum", "minimum(input, other)"]),
    "too many arguments": (lambda s, b, h, q, kv: s.minimum(q, kv), ["minimum", "minimum(input, other)"]),
    "float alpha of integers": (lambda s, b, h, q, kv: torch.add(q, kv, alpha=0.5), ["alpha=0.5"]),
    "rounding mode": (lambda s, b, h, q, kv: s.div(q, rounding_mode="up"), ["rounding_mode", "'up'", "'floor'"]),
    "unknown keyword of a conversion": (lambda s, b, h, q, kv: q.float(nonsense=3), ["float", "nonsense=3", "memory_format"]),
    "unknown keyword of to": (lambda s, b, h, q, kv: q.to("meta", nonsense=3), ["to", "nonsense=3", "device, dtype"]),
    "to two dtypes": (lambda s, b, h, q, kv: q.to(torch.int8, torch.int16), ["torch.int8 and then torch.int16", ".to(dtype)"]),
    "to two dtypes, one by name": (lambda s, b, h, q, kv: q.to(s, dtype=torch.int16), ["torch.float32 and then torch.int16", ".to(dtype)"]),
    "to dtype and device": (lambda s, b, h, q, kv: q.to(torch.int8, "cpu"), ["torch.int8 and then 'cpu'", ".to(device, dtype)"]),
    "a capture to a symbol": (lambda s, b, h, q, kv: TABLE.to(s)[h, q], ["captured tensor", ".to(value.dtype)"]),
    "a capture as a symbol": (lambda s, b, h, q, kv: TABLE.type_as(s)[h, q], ["captured tensor", ".to(value.dtype)"]),
    "to no dtype": (lambda s, b, h, q, kv: q.to("cpu", 3), ["dtype such as torch.float32", "got 3"]),
    "to something else": (lambda s, b, h, q, kv: q.to([1]), ["a dtype, a device or another value", "got [1]"]),
    "type_as of a number": (lambda s, b, h, q, kv: q.type_as(3), ["type_as", "got 3", ".to(dtype)"]),
    "unknown arguments of clone": (lambda s, b, h, q, kv: q.clone(1, 2, 3), ["clone", "int, int, int", "clone(input, memory_format)"]),
    "unknown keyword of contiguous": (lambda s, b, h, q, kv: q.contiguous(nonsense=3), ["contiguous", "nonsense=3"]),
    "unknown keyword of cuda": (lambda s, b, h, q, kv: q.cuda(nonsense=3), ["cuda", "nonsense=3"]),
    "unknown keyword of positive": (lambda s, b, h, q, kv: s.positive(nonsense=3), ["positive(input)", "nonsense=3"]),
    "unknown keyword of new_ones": (lambda s, b, h, q, kv: q.new_ones((), nonsense=3), ["new_ones", "nonsense=3", "size, dtype"]),
    "unknown keyword of new_full": (lambda s, b, h, q, kv: q.new_full((), 3, nonsense=3), ["new_full", "nonsense=3", "size, fill_value, dtype"]),
    "dtype of new_ones by place": (lambda s, b, h, q, kv: q.new_ones((), torch.int8), ["new_ones", "size, dtype"]),
    "unknown keyword of a method": (lambda s, b, h, q, kv: s.round(decimals=q), ["round", "decimals=q"]),
    "sum over another dimension": (lambda s, b, h, q, kv: s.sum(3), ["sum", "dim=3", "0 or -1"]),
    "sum over two dimensions": (lambda s, b, h, q, kv: s.sum((0, -1)), ["sum", "dim=(0, -1)", "0 or -1"]),
    "sum over a value": (lambda s, b, h, q, kv: s.sum(q), ["sum", "dim=q", "0 or -1"]),
    "sum over a fraction": (lambda s, b, h, q, kv: s.sum(0.0), ["sum", "dim=0.0", "0 or -1"]),
    "clamp of nothing": (lambda s, b, h, q, kv: s.clamp(), ["clamp", "min"]),
    "matrix product": (lambda s, b, h, q, kv: s @ q, ["@", "*"]),
    "a new tensor": (lambda s, b, h, q, kv: s + q.new_zeros(3), ["(3,)", "outside"]),
    "conversion to complex": (lambda s, b, h, q, kv: s.to(torch.complex64), ["torch.complex64", "torch.float32"]),
    # Wrong dtypes.
    "difference of booleans": (lambda s, b, h, q, kv: s * ((q > 1) - (kv > 1)), ["(-)", "torch.bool", "~"]),
    "plus of booleans": (lambda s, b, h, q, kv: s * +(q > 1), ["(+)", "torch.bool", ".long()"]),
    "positive of booleans": (lambda s, b, h, q, kv: s * torch.positive(q > 1), ["(+)", "torch.bool", ".long()"]),
    "dot of booleans": (lambda s, b, h, q, kv: s + torch.dot(PAIRS[h], PAIRS[q]), ["dot", "torch.bool", "(a * c).sum()"]),
    "bits of floats": (lambda s, b, h, q, kv: s & 1, ["(&)", "torch.float32", ".long()"]),
    "inverted float": (lambda s, b, h, q, kv: ~s, ["(~)", "torch.float32"]),
    "shifted float": (lambda s, b, h, q, kv: s << 1, ["(<<)", "torch.float32"]),
    "integer condition": (lambda s, b, h, q, kv: torch.where(q, s, 0.0), ["torch.where", "condition must be boolean", "x != 0"]),
    "silu of integers": (lambda s, b, h, q, kv: F.silu(q), ["silu", "torch.int64", ".float()"]),
    # Side effects.
    "in-place method": (lambda s, b, h, q, kv: s.add_(1), ["add_", "in place", "use add"]),
    "in-place of a capture": (lambda s, b, h, q, kv: s + ROW.add_(1)[q], ["add_", "in place"]),
    "in-place with a symbol": (lambda s, b, h, q, kv: s + ROW.add_(s)[q], ["add_", "in place"]),
    "assignment to .data": (lambda s, b, h, q, kv: setattr(ROW, "data", ROW + 1) or s + ROW[q], [".data", "in place"]),
    "item assignment": (mutates_by_item, ["must not write", "return the new value"]),
    "fixed item assignment": (mutates_by_fixed_item, ["in place"]),
    "item assignment to a symbol": (mutates_a_symbol_by_item, ["in place", "torch.where"]),
    "out": (lambda s, b, h, q, kv: torch.add(s, 1, out=ROW), ["must not write", "return the new value"]),
    "out of a capture": (lambda s, b, h, q, kv: s + torch.add(ROW, 1, out=ROW)[q], ["must not write", "return the new value"]),
    "inplace=True": (lambda s, b, h, q, kv: F.relu(s, inplace=True), ["inplace=True", "leave inplace out"]),
    "inplace=True of a capture": (lambda s, b, h, q, kv: s + F.relu(ROW, inplace=True)[q], ["in place"]),
    # Captured tensors.
    "too many indices": (lambda s, b, h, q, kv: s + ROW[b, h], ["2 indices", "(5,)"]),
    "constant index outside": (lambda s, b, h, q, kv: s + TABLE[-4, q], ["index -4", "size 3", "(3, 4)"]),
    "a long row": (lambda s, b, h, q, kv: s + LONG[h].sum(), ["(3, 600)", "1 of its 2 dimensions", "a row has 600 elements, at most 512"]),
    "a long row, element by element": (lambda s, b, h, q, kv: s + (LONG[h] - 1).sum(), ["(3, 600)", "1 of its 2 dimensions", "at most 512"]),
    "a long row, unpacked": (lambda s, b, h, q, kv: s + sum(LONG[h]), ["(3, 600)", "at most 512"]),
    "a long tensor": (lambda s, b, h, q, kv: s + (LONG == q).any(), ["(3, 600)", "used whole", "tensor[h]", "1800", "at most 512"]),
    "a large table of rows": (lambda s, b, h, q, kv: (TABLE[h].unsqueeze(-1) * LONG[h, :200]).sum(), ["(4, 200)", "800", "at most 512"]),
    "rows of other lengths": (lambda s, b, h, q, kv: s + torch.dot(TABLE[h], torch.ones(3, 5)[h]), ["4 and 5", "equally long"]),
    "rows that do not broadcast": (lambda s, b, h, q, kv: (TABLE[h] + LONG[h, :3]).sum(), ["(4,) and (3,)", "broadcast"]),
    "writing to a row": (writes_to_a_row, ["in place", "torch.where"]),
    "a row as a condition": (lambda s, b, h, q, kv: s if TABLE[h] > 0 else 0, ["`if`", "torch.where(condition, a, b)"]),
    "a row's dimension": (lambda s, b, h, q, kv: s + TABLE[h].sum(7), ["sum", "dim=7", "0 or -1"]),
    "a row's dimensions": (lambda s, b, h, q, kv: s + TABLE[h, :, None].sum((0, -2)), ["sum", "dim=(0, -2)", "(4, 1)", "-2 to 1"]),
    "unknown keyword of a reduction": (lambda s, b, h, q, kv: s + TABLE[h].sum(nonsense=1), ["sum(input, dim, keepdim, dtype)", "nonsense=1"]),
    "mean of integers": (lambda s, b, h, q, kv: s + TABLE[h].mean(), ["mean", "torch.int64", ".float()"]),
    "largest of nothing": (lambda s, b, h, q, kv: s + LONG[h, :0].amax(), ["without elements"]),
    "a computed row indexed by a symbol": (lambda s, b, h, q, kv: s + (TABLE[h] + 1)[kv], ["computed row", "index the captured tensor"]),
    "part of a row indexed by a symbol": (lambda s, b, h, q, kv: s + TABLE[h, 1:][kv], ["part of a captured tensor", "outside"]),
    "a row's index outside": (lambda s, b, h, q, kv: s + (TABLE[h] + 1)[4], ["index 4", "size 4"]),
    "rows and slices": (lambda s, b, h, q, kv: TABLE[TABLE[h], :].sum(), ["(3, 4)", "rows and with slices", "outside"]),
    "a slice backwards": (lambda s, b, h, q, kv: s + TABLE[h, ::-1].sum(), ["positive"]),
    "a new dimension too many": (lambda s, b, h, q, kv: s + q.unsqueeze(2).sum(), ["unsqueeze", "dim=2", "-1 to 0"]),
    "dot of single values": (lambda s, b, h, q, kv: s + torch.dot(q, kv), ["x * y"]),
    "float index": (lambda s, b, h, q, kv: s + ROW[q / 2], ["f32", "integers", ".long()"]),
    "boolean index": (lambda s, b, h, q, kv: s + ROW[q > 2], ["bool", "integers"]),
    "rows of complex numbers": (lambda s, b, h, q, kv: s + torch.dot(COMPLEX.view(5, 1)[q], COMPLEX.view(5, 1)[kv]), ["torch.complex64", "torch.float32"]),
    "list of symbols": (lambda s, b, h, q, kv: s + ROW[[q, kv]], ["list"]),
    "complex capture": (lambda s, b, h, q, kv: s + COMPLEX[q], ["torch.complex64", "torch.float32"]),
    "empty capture": (lambda s, b, h, q, kv: s + EMPTY[q], ["(0,)", "no element"]),
    "foreign value": (lambda s, b, h, q, kv: s + "1", ["str '1'", "numbers or tensors"]),
    "huge number": (lambda s, b, h, q, kv: s * (q + 2**63), ["9223372036854775808", "64 bits"]),
    "huge exponent": (lambda s, b, h, q, kv: s * q**2**70, [str(2**70), "64 bits"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_where_what_and_what_instead(name: str) -> None:
    function, expected = REFUSED[name]
    before = ROW.clone()
    with pytest.raises(TraceError) as error:
        trace_score((function,))
    message = str(error.value)
    assert "object at 0x" not in message
    line = function.__code__.co_firstlineno + (function.__name__ != "<lambda>")
    assert f" at {__file__}:{line})" in message
    for words in expected:
        assert words in message
    assert torch.equal(ROW, before)


def test_the_list_of_operations_has_only_names_users_write() -> None:
    with pytest.raises(TraceError) as error:
        trace_score((lambda s, b, h, q, kv: torch.lgamma(s),))
    names = str(error.value).split("operators and ")[1].split(" (in a mask")[0].split(", ")
    assert {"tanh", "where", "clamp", "logical_and", "float", "to"} <= set(names)
    for name in names:
        assert any(hasattr(home, name) for home in (torch, torch.Tensor, F, torch.special)), name


# -- what a function takes and returns -------------------------------------------------------------------------------


def mask_of_three(b: Any, h: Any, q: Any) -> Any:
    return q > 1


def score_like(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s


def mask_like(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q > kv


def silent(b: Any, h: Any, q: Any, kv: Any) -> Any:
    q > kv


def distance(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q - kv


def whole(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return ROW > 0


def row(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (TABLE > 0)[h]


def products(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return TABLE[h] * TABLE[q] > q


def forgets_an_index(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q > ROW


def keeps_a_dimension(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (TABLE[h] == kv).any(-1, keepdim=True)


RETURNS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "too few parameters": (mask_of_three, ["(b, h, q, kv)", "3 parameters"]),
    "a score function": (score_like, ["5 parameters", "score="]),
    "nothing": (silent, ["returned None", "must return"]),
    "integers": (distance, ["returned torch.int64", "boolean", "q >= kv"]),
    "a whole tensor": (whole, ["(5,)", "whole", "tensor[h]"]),
    "a row": (row, ["(3, 4)", "1 of its 2 dimensions", "index all"]),
    "products of rows": (products, ["row of shape (4,)", "all their dimensions", ".sum(-1)"]),
    "a comparison with a whole tensor": (forgets_an_index, ["row of shape (5,)", "tensor[h]", ".any(-1)"]),
    "a row of one": (keeps_a_dimension, ["row of shape (1,)"]),
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_mask_of_another_form_is_refused_by_name_and_place(name: str) -> None:
    function, expected = RETURNS[name]
    with pytest.raises(TraceError) as error:
        trace_mask(function)
    for words in (f"{__file__}:{function.__code__.co_firstlineno}", function.__name__, *expected):
        assert words in str(error.value)


def boolean(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q > kv


@pytest.mark.parametrize(
    ("function", "expected"),
    [(mask_like, "pass it as mask="), (mask_of_three, "(score, b, h, q, kv)"), (boolean, "returned booleans; a function that allows or forbids goes to mask=")],
)
def test_a_score_of_another_form_is_refused_by_name_and_place(function: Callable[..., Any], expected: str) -> None:
    with pytest.raises(TraceError) as error:
        trace_score((function,))
    for words in (f"{__file__}:{function.__code__.co_firstlineno}", function.__name__, expected):
        assert words in str(error.value)


GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a score as a mask": (lambda: trace_mask(scores.softcap(30.0)), r"^Score\(softcap\(30\.0\)\) is a score, not a mask: pass it as score="),
    "sinks as a mask": (lambda: trace_mask(scores.sinks(torch.zeros(2))), r"^Score\(sinks\) is a score, not a mask: pass it as score="),
    "a score in a mask": (lambda: trace_mask(masks.causal & scores.softcap(30.0)), "is a score, not a mask: pass it as score="),
    "a mask as a score": (lambda: trace_score((masks.causal,)), r"^Mask\(causal\) is a mask, not a score: pass it as mask="),
    "a mask among scores": (lambda: trace_score((scores.softcap(30.0), masks.sliding_window(3))), r"^Mask\(sliding_window\(3\)\) is a mask, not a score"),
    "a mask called": (masks.causal, r"^Mask\(causal\) is a mask, .*called with 0 arguments; it is given as it is, without a call$"),
    "a score called": (scores.softcap(30.0), r"is a score, .*called with 0 arguments; it is given as it is, without a call$"),
    "a mask called with two": (lambda: masks.causal(1, 2), r"a function of \(b, h, q, kv\), and was called with 2 arguments$"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_masks_and_scores_of_the_library_in_each_others_place(name: str) -> None:
    call, expected = GIVEN[name]
    with pytest.raises(TraceError, match=expected):
        call()


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(TraceError, match=r"function of \(b, h, q, kv\), got Tensor"):
        trace_mask(ROW)


def test_the_place_is_the_users_even_behind_a_helper_of_the_library() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q.clamp(0, 3) > kv.frobnicate()

    with pytest.raises(TraceError, match="'frobnicate'") as error:
        trace_mask(partial(mask))
    assert f"{__file__}:{mask.__code__.co_firstlineno + 1}" in str(error.value)


def test_an_augmented_assignment_leaves_the_captured_tensor_alone() -> None:
    def shifted(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        table = ROW
        table += 1.0
        return s + table[q]

    call = trace_score((shifted,))
    assert torch.equal(ROW, torch.zeros(5))
    assert torch.equal(call.captures[0], torch.ones(5))


def test_the_functions_own_errors_are_left_alone() -> None:
    def broken(b: Any, h: Any, q: Any, kv: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        trace_mask(broken)


def test_a_refusal_is_also_a_type_error() -> None:
    with pytest.raises(TypeError):
        trace_score((branches,))


ARRAY = np.arange(8)
SLIPS: dict[str, tuple[dict[str, Any], str]] = {
    "a numpy array is indexed": ({"mask": lambda b, h, q, kv: ARRAY[q] == ARRAY[kv]}, r"torch\.from_numpy makes a tensor of it"),
    "a module is given for its score": ({"score": tw.nn.RelativeBias(2, 3)}, "call it, and pass what it returns"),
    "a module among scores": ({"score": [tw.nn.Sinks(2)]}, "call it, and pass what it returns"),
    "a tensor is given for a score": ({"score": torch.zeros(8, 8)}, r"scores\.bias\(tensor\) adds one"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_of_a_call_say_what_to_do(name: str) -> None:
    options, message = SLIPS[name]
    q = torch.randn(1, 2, 8, 8)
    with pytest.raises(TraceError, match=message):
        tw.attention(q, q, q, **options)


def test_members_of_a_matrix() -> None:
    with pytest.raises(TraceError, match=r"isin takes test_elements of one dimension here, got a value of shape \(3, 4\)"):
        trace_mask(lambda b, h, q, kv: torch.isin(kv, TABLE))


def test_a_bias_of_nothing() -> None:
    with pytest.raises(InputError, match="got NoneType"):
        tw.scores.bias(None)  # type: ignore[arg-type]  # the slip


def test_a_causal_bias_is_no_tensor_to_add_or_combine() -> None:
    """Its memory was never written."""
    bias = causal_lower_right(4, 6)
    with pytest.raises(InputError, match="goes to mask="):
        tw.scores.bias(bias)
    for combined in (lambda: masks.causal & bias, lambda: bias & masks.causal, lambda: masks.as_mask(bias)):
        with pytest.raises(InputError, match=r"combine masks\.causal or masks\.causal_lower_right"):
            combined()
