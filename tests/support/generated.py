"""Random programs: expression trees of integers, floats and booleans over the indices, the score and captured tensors.

A tree is nested tuples, so that a failing example prints as what it is; `function_of` turns it into a score function.
"""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Tree = Any
DTYPES = {d: getattr(torch, d) for d in ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")}


def captures(seed: int) -> dict[str, Tensor]:
    """Tensors of several ranks and dtypes; the same seed gives the same contents."""
    random = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3e38, 0.1])
    large = torch.tensor([2**53 + 1, -(2**53) - 1, 2**62 + 3, 2**63 - 1, -(2**63), 2**31, 5, -1])
    return {
        "documents": integers(0, 3, 12).cumsum(0),
        "lengths": integers(0, 20, 2).int(),
        "places": integers(-4, 9, 3, 5),
        "bytes": integers(0, 256, 9).to(torch.uint8),
        "grid": integers(-100, 100, 2, 3, 4).to(torch.int16),
        "large": large[torch.randperm(8, generator=random)],
        "marks": integers(0, 2, 7).bool(),
        "pairs": integers(0, 2, 4, 6).bool(),
        "slopes": integers(-8, 9, 5) / 4,
        "table": integers(-8, 9, 3, 6).double() / 4,
        "coarse": (integers(-8, 9, 6) / 8).bfloat16(),
        "odd": odd[torch.randperm(8, generator=random)],
        "offset": integers(-3, 4).squeeze(),
        "switch": integers(0, 2).squeeze().bool(),
        "scale": torch.tensor(0.3),
        "wide": torch.tensor(0.1, dtype=torch.float64),
    }


# Captures by kind, with their ranks. Those without dimensions only stand beside something that varies: alone, they are torch's business.
INTEGER_CAPTURES = {"documents": 1, "lengths": 1, "places": 2, "bytes": 1, "grid": 3, "large": 1}
BOOLEAN_CAPTURES = {"marks": 1, "pairs": 2}
FLOAT_CAPTURES = {"slopes": 1, "table": 2, "coarse": 1, "odd": 1}
SMOOTH_CAPTURES = {"slopes": 1, "table": 2}
SINGLE = {"i": ["offset"], "f": ["scale", "wide"], "b": ["switch"]}

SMALL = st.integers(-9, 9)
EXTREME = st.sampled_from([2**31, -(2**31) - 1, 2**53 + 1, -(2**62), 2**63 - 1, 255, 1000])
WHOLE = st.one_of(SMALL, SMALL, SMALL, EXTREME)
QUARTERS = st.integers(-12, 12).map(lambda n: n / 4)
REAL = st.one_of(QUARTERS, QUARTERS, st.sampled_from([0.1, -0.3, 1e30, -3e38, 1e-40, 70000.0, float("inf"), -float("inf"), float("nan")]))
NUMBERS = {"i": WHOLE, "f": REAL, "b": st.booleans()}

ARITHMETIC = ("+", "-", "*")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
ROUNDING = ("floor", "ceil", "round", "trunc", "sign", "relu", "neg", "abs")
EXPONENTIALS = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sinh", "cosh", "asinh", "acosh")
ANGLES = ("sin", "cos", "atan")
ACTIVATIONS = ("tanh", "sigmoid", "erf", "erfc", "silu", "softplus", "gelu", "gelu_tanh")
WAVES = (*EXPONENTIALS, *ANGLES, *ACTIVATIONS)


def constants(numbers: st.SearchStrategy[Any], single: list[str]) -> st.SearchStrategy[Tree]:
    return st.one_of(numbers.map(lambda n: ("number", n)), numbers.map(lambda n: ("number", n)), st.sampled_from([("load", name) for name in single]))


@st.composite
def trees(draw: st.DrawFn, kind: str, depth: int) -> Tree:
    """An expression of kind i(nteger), f(loat) or b(oolean), nested at most `depth` deep."""

    def sub(kind: str) -> Tree:
        return draw(trees(kind, depth - 1))

    def operand(kind: str) -> Tree:
        """A subexpression, a Python number or a 0-d capture."""
        return draw(constants(NUMBERS[kind], SINGLE[kind])) if draw(st.integers(0, 2)) == 0 else sub(kind)

    def pair(*operators: str, kinds: tuple[str, str]) -> Tree:
        left, right = sub(kinds[0]), operand(kinds[1])
        symbol = draw(st.sampled_from(operators))
        return (symbol, right, left) if draw(st.booleans()) else (symbol, left, right)

    def load(tensors: dict[str, int]) -> Tree:
        name = draw(st.sampled_from(sorted(tensors)))
        first = [("number", draw(st.integers(-2, 1))) if draw(st.integers(0, 5)) == 0 else sub("i") for _ in range(tensors[name] - 1)]
        return ("load", name, *first, sub("i"))

    def cast(kind: str, *dtypes: str) -> Tree:
        return ("cast", draw(st.sampled_from(dtypes)), sub(kind))

    def reduced(reduction: str, operator: str, tensors: dict[str, int], kind: str) -> Tree:
        """A row of a capture beside a single value, reduced."""
        name = draw(st.sampled_from(sorted(n for n, rank in tensors.items() if rank > 1)))
        return (reduction, (operator, ("load", name, *[sub("i") for _ in range(tensors[name] - 1)]), ("unsqueeze", sub(kind))))

    def choice(kind: str) -> Tree:
        return ("where", sub("b"), sub(kind), operand(kind))

    leaf = {"i": [("index", "q"), ("index", "kv"), ("index", "b"), ("index", "h")], "f": [("score",)], "b": [("<", ("index", "q"), ("index", "kv"))]}
    if depth <= 0:
        return draw(st.sampled_from(leaf[kind]))
    shapes: dict[str, list[Callable[[], Tree]]] = {
        "i": [
            lambda: draw(st.sampled_from(leaf["i"])),
            lambda: pair(*ARITHMETIC, kinds=("i", "i")),
            lambda: pair(*ARITHMETIC, kinds=("i", "i")),
            lambda: (draw(st.sampled_from(("//", "%"))), sub("i"), ("number", draw(WHOLE.filter(bool)))),
            lambda: (draw(st.sampled_from(("//", "%"))), operand("i"), draw(st.sampled_from((("+", ("abs", sub("i")), ("number", 1)), sub("i"))))),
            lambda: pair("&", "|", "^", kinds=("i", "i")),
            lambda: pair("<<", ">>", kinds=("i", "i")),
            lambda: ("**", sub("i"), ("number", draw(st.integers(0, 3)))),
            lambda: ("**", operand("i"), sub("i")),
            lambda: (draw(st.sampled_from(("neg", "abs", "sign", "relu", "floor", "~"))), sub("i")),
            lambda: (draw(st.sampled_from(("minimum", "maximum"))), sub("i"), sub("i")),
            lambda: ("fmod", sub("i"), draw(st.sampled_from((("number", draw(WHOLE.filter(bool))), sub("i"))))),
            lambda: (draw(st.sampled_from(("clamp_min", "clamp_max"))), sub("i"), operand("i")),
            lambda: load(INTEGER_CAPTURES),
            lambda: load(INTEGER_CAPTURES),
            lambda: reduced(draw(st.sampled_from(("sum", "prod", "amax", "amin", "argmax"))), draw(st.sampled_from(ARITHMETIC)), INTEGER_CAPTURES, "i"),
            lambda: choice("i"),
            lambda: cast(draw(st.sampled_from("ifb")), "int8", "uint8", "int32", "int64"),
            lambda: pair(*ARITHMETIC[::2], kinds=("b", "i")),
        ],
        "f": [
            lambda: ("score",),
            lambda: pair(*ARITHMETIC, "/", "//", "%", kinds=("f", draw(st.sampled_from("fi")))),
            lambda: pair(*ARITHMETIC, "/", kinds=("i", "f")),
            lambda: pair("/", kinds=("i", "i")),
            lambda: ("**", sub("f"), ("number", draw(st.sampled_from((0, 1, 2, 3, -1, 0.5, -2.0, 1.5))))),
            lambda: pair("**", kinds=("f", "f")),
            lambda: (draw(st.sampled_from(ROUNDING)), sub("f")),
            lambda: (draw(st.sampled_from(WAVES)), sub("f")),
            lambda: (draw(st.sampled_from(WAVES)), cast("i", "float32", "float64", "float16", "bfloat16")),
            lambda: (draw(st.sampled_from(("minimum", "maximum"))), sub("f"), sub(draw(st.sampled_from("fi")))),
            lambda: (draw(st.sampled_from(("atan2", "logaddexp", "fmod"))), sub("f"), sub("f")),
            lambda: ("atan2", sub("i"), sub(draw(st.sampled_from("fi")))),
            lambda: ("tan", ("sin", sub("f"))),  # away from its poles, where the last bit of what it is of decides everything
            lambda: (draw(st.sampled_from(("clamp_min", "clamp_max"))), sub("f"), operand("f")),
            lambda: load(FLOAT_CAPTURES),
            lambda: load(FLOAT_CAPTURES),
            lambda: reduced(draw(st.sampled_from(("sum", "mean", "amax", "amin"))), draw(st.sampled_from(ARITHMETIC)), FLOAT_CAPTURES, "f"),
            lambda: choice("f"),
            lambda: cast(draw(st.sampled_from("if")), "float32", "float64", "float16", "bfloat16"),
        ],
        "b": [
            lambda: pair(*COMPARISONS, kinds=("i", "i")),
            lambda: pair(*COMPARISONS, kinds=("i", "i")),
            lambda: pair(*COMPARISONS, kinds=("f", "f")),
            lambda: pair(*COMPARISONS, kinds=("i", "f")),
            lambda: pair("&", "|", "^", "==", "!=", "<", "+", "*", kinds=("b", "b")),
            lambda: pair("&", "|", "^", kinds=("b", "b")),
            lambda: (draw(st.sampled_from(("~", "sign", "logical_not"))), sub("b")),
            lambda: (draw(st.sampled_from(("logical_and", "logical_xor"))), sub("b"), sub(draw(st.sampled_from("ifb")))),
            lambda: load(BOOLEAN_CAPTURES),
            lambda: reduced(draw(st.sampled_from(("any", "all"))), draw(st.sampled_from(COMPARISONS)), INTEGER_CAPTURES, "i"),
            lambda: choice("b"),
            lambda: cast(draw(st.sampled_from("if")), "bool"),
            lambda: (draw(st.sampled_from(("isfinite", "isnan", "isinf"))), sub(draw(st.sampled_from("ifb")))),
        ],
    }
    return draw(st.sampled_from(shapes[kind]))()


Q, KV, H = ("index", "q"), ("index", "kv"), ("index", "h")
SMALL_INTEGERS = st.sampled_from([Q, KV, H, ("-", Q, KV), ("load", "places", H, KV), ("load", "documents", ("-", KV, ("number", 9))), ("%", KV, ("number", 3))])


@st.composite
def smooth_trees(draw: st.DrawFn, depth: int) -> Tree:
    """A float expression to derive: everything that has a derivative or cuts it, ties at whole numbers included."""

    def sub() -> Tree:
        return draw(smooth_trees(depth - 1))

    def operand() -> Tree:
        return draw(constants(QUARTERS, SINGLE["f"])) if draw(st.integers(0, 2)) == 0 else sub()

    def load() -> Tree:
        name = draw(st.sampled_from(sorted(SMOOTH_CAPTURES)))
        return ("load", name, *(draw(SMALL_INTEGERS) for _ in range(SMOOTH_CAPTURES[name])))

    if depth <= 0:
        return draw(st.sampled_from((("score",), ("score",), ("load", "slopes", ("index", "q")), ("load", "slopes", ("index", "kv")))))
    shapes: list[Callable[[], Tree]] = [
        lambda: (draw(st.sampled_from((*ARITHMETIC, "/", "%", "//"))), sub(), operand()),
        lambda: (draw(st.sampled_from((*ARITHMETIC, "/", "%"))), ("number", draw(QUARTERS)), sub()),
        lambda: (draw(st.sampled_from((*ARITHMETIC, "/"))), draw(SMALL_INTEGERS), sub()),
        lambda: ("**", sub(), ("number", draw(st.sampled_from((0, 1, 2, 3, -1, 0.5, 1.5))))),
        lambda: ("**", sub(), sub()),
        lambda: ("**", ("number", draw(st.sampled_from((2, 0.5, 0, 3)))), sub()),
        lambda: (draw(st.sampled_from(("neg", "abs", "relu", "detach", "floor", "sign"))), sub()),
        lambda: (draw(st.sampled_from(WAVES)), sub()),
        lambda: (draw(st.sampled_from(("minimum", "maximum"))), sub(), sub()),
        lambda: (draw(st.sampled_from(("atan2", "logaddexp"))), sub(), sub()),
        lambda: ("fmod", sub(), operand()),
        lambda: ("tan", ("sin", sub())),
        lambda: (draw(st.sampled_from(("clamp_min", "clamp_max"))), sub(), operand()),
        load,
        lambda: (draw(st.sampled_from(("sum", "mean", "amax"))), ("*", ("load", "table", draw(SMALL_INTEGERS)), ("unsqueeze", sub()))),
        lambda: ("where", ("<", draw(SMALL_INTEGERS), draw(SMALL_INTEGERS)), sub(), operand()),
        lambda: ("where", ("<", sub(), sub()), sub(), operand()),
    ]
    return draw(st.sampled_from(shapes))()


OPERATORS: dict[str, Callable[..., Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "**": lambda x, y: x**y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "<<": lambda x, y: x << y,
    ">>": lambda x, y: x >> y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "~": lambda x: ~x,
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def function_of(tree: Tree, tensors: dict[str, Tensor]) -> Callable[..., Any]:
    """The tree as a function of (score, b, h, q, kv)."""

    def function(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        given = {"b": b, "h": h, "q": q, "kv": kv}

        def value(node: Tree) -> Any:
            name, *rest = node
            if name == "number":
                return rest[0]
            if name == "index":
                return given[rest[0]]
            if name == "score":
                return score
            if name == "cast":
                return value(rest[1]).to(DTYPES[rest[0]])
            if name == "load":
                tensor = tensors[rest[0]]
                return tensor[tuple(value(r) for r in rest[1:])] if rest[1:] else tensor
            f = OPERATORS.get(name) or getattr(torch, name)
            return f(*(value(r) for r in rest))

        return value(tree)

    return function
