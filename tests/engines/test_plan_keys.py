"""The keys of the plan's three layers (core/plan.py): what each covers changes it, and everything else leaves it alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks, scores
from tilewise.core.map_cache import contents_key, maps
from tilewise.core.pages import Pages
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gpu.limits import NO_TRITON
from tilewise.frontend.call_key import key_of

needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))

# -- the call --------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """One call, whose parts a test changes one at a time."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor
    window: float
    backend: str = "cpp"
    needs_lse: bool = False
    options: Options = Options()  # noqa: RUF009  (immutable)

    def call_key(self) -> Any:
        table, window = self.table, self.window
        mask = lambda b, h, q, kv: (q - kv < window) & (table[q] >= 0)  # one code object for all, with other cells each time
        found = key_of(self.query, self.key, self.value, mask, None, self.options, self.backend, self.needs_lse)
        assert found is not None
        return found.key


def asked() -> Asked:
    return Asked(*(torch.zeros(1, 2, 8, 16) for _ in range(3)), torch.arange(64).view(8, 8)[:, 0].clone(), 3.0)


def replaced(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Asked], None]:
    return lambda a: setattr(a, name, make(getattr(a, name)))


def new_data(make: Callable[[Tensor], Tensor]) -> Callable[[Asked], None]:
    """Swapped behind the tensor's identity and version, as `model.half()` does it."""

    def change(a: Asked) -> None:
        a.table.data = make(a.table.data)

    return change


COVERED: dict[str, Callable[[Asked], None]] = {
    "query's shape": replaced("query", lambda t: torch.zeros(1, 2, 9, 16)),
    "query's strides": replaced("query", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
    "key's length": replaced("key", lambda t: torch.zeros(1, 2, 9, 16)),
    "value's head dim": replaced("value", lambda t: torch.zeros(1, 2, 8, 8)),
    "value's alignment": replaced("value", lambda t: torch.zeros(1 + t.numel())[1:].view(t.shape)),
    "a captured tensor": replaced("table", torch.clone),
    "a captured tensor's dtype": new_data(lambda t: t.view(torch.float64)),
    "a captured tensor's shape": new_data(lambda t: t[:7]),
    "a captured tensor's address": new_data(lambda t: t.clone()),
    "a number": replaced("window", lambda w: 4.0),
    "a backend": replaced("backend", lambda b: "blocked"),
    "lse": replaced("needs_lse", lambda n: True),
    "row maxima": replaced("options", lambda o: o._replace(max_scores=True)),
    "scale": replaced("options", lambda o: o._replace(scale=2.0)),
    "dropout": replaced("options", lambda o: o._replace(dropout_p=0.5)),
    "is_causal": replaced("options", lambda o: o._replace(is_causal=True)),
    "deterministic": replaced("options", lambda o: o._replace(deterministic=True)),
    "a gradient of query": lambda a: a.query.requires_grad_(),
    "a seed": replaced("options", lambda o: o._replace(seed=1)),
}
NOT_COVERED: dict[str, Callable[[Asked], None]] = {
    "query's contents": lambda a: a.query.add_(1),
    "other tensors of the same kind": replaced("query", torch.clone),
    "a captured tensor's contents": lambda a: a.table.add_(1),  # maps made from them have a key of their own
    "the value of a seed": replaced("options", lambda o: o),
}


@pytest.mark.parametrize("what", COVERED)
def test_what_the_call_key_covers(what: str) -> None:
    a = asked()
    before = a.call_key()
    COVERED[what](a)
    assert a.call_key() != before


@pytest.mark.parametrize("what", NOT_COVERED)
def test_what_the_call_key_leaves_out(what: str) -> None:
    a = asked()
    before = a.call_key()
    NOT_COVERED[what](a)
    assert a.call_key() == before


PAGES: dict[str, dict[str, Any]] = {
    "the size of pages": {"size": 8},
    "another table": {"table": torch.zeros((1, 4), dtype=torch.int32)},
    "a table of another form": {"table": torch.zeros((1, 9), dtype=torch.int32)[:, :4]},
    "other lengths": {"lengths": torch.zeros(1, dtype=torch.int32)},
    "lengths of more sequences": {"lengths": torch.zeros(2, dtype=torch.int32)},
    "a mask beside the lengths": {"all_attended": False},
    "the scale of values": {"v_scale": 2.0},
}


def test_the_call_key_covers_pages() -> None:
    """What plans hold of them: addresses and forms, not contents."""
    a, stored = asked(), torch.zeros(6, 2, 16, 16)
    usual: dict[str, Any] = {"table": torch.zeros((1, 4), dtype=torch.int32), "size": 16, "lengths": torch.zeros(1, dtype=torch.int32), "all_attended": True}

    def key(stored: Tensor = stored, **change: Any) -> Any:
        found = key_of(a.query, stored, stored, None, None, a.options, "cpp", False, Pages(**(usual | change)))
        assert found is not None
        return found.key

    keys = [key(), *[key(**change) for change in PAGES.values()], key(stored.to(torch.float8_e5m2)), key(stored[:5])]
    assert len(set(keys)) == len(PAGES) + 3
    usual["table"].add_(1), usual["lengths"].add_(1)
    assert key() == keys[0] == key(torch.ones_like(stored))


@pytest.mark.parametrize("switch", ["deterministic algorithms", "TF32"])
def test_the_call_key_covers_torchs_switches(switch: str) -> None:
    a = asked()
    before = a.call_key()
    deterministic, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    try:
        if switch == "TF32":
            torch.set_float32_matmul_precision("high")
        else:
            torch.use_deterministic_algorithms(True)
        assert a.call_key() != before
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)


def test_the_call_key_covers_the_mode_of_gradients() -> None:
    a = asked()
    before = a.call_key()
    with torch.no_grad():
        assert a.call_key() != before
    table = torch.zeros(8)
    learned = lambda: key_of(a.query, a.key, a.value, None, lambda s, b, h, q, kv: s + table[q], a.options, "cpp", False)
    plain = learned()
    assert plain is not None and plain.key == learned().key
    table.requires_grad_()
    assert plain.key != learned().key


def test_positive_and_negative_zero_are_different_numbers() -> None:
    x = torch.randn(1, 1, 4, 8)

    def attend(c: float, engine: str) -> Tensor:
        return tw.attention(x, x, x, mask=lambda b, h, q, kv: (1.0 + 0 * kv) / c > 0, backend=engine)

    for engine in ("cpp", "blocked"):
        everything, nothing = attend(0.0, engine), attend(-0.0, engine)
        assert everything.abs().sum() > 0 and nothing.abs().sum() == 0
        assert torch.equal(attend(0.0, engine), everything)


def test_sizes_a_mask_is_made_for_are_checked_after_a_good_call_too() -> None:
    """Both masks are the same function, q + 10 >= kv."""
    query, key = torch.randn(1, 1, 30, 8), torch.randn(1, 1, 40, 8)
    tw.attention(query, key, key, mask=masks.causal_lower_right(30, 40), backend="cpp")
    with pytest.raises(tw.InputError, match="made for 10 queries"):
        tw.attention(query, key, key, mask=masks.causal_lower_right(10, 20), backend="cpp")


# -- contents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t.add_(1), id="in place"),
        pytest.param(lambda t: setattr(t, "data", t.data.t()), id="strides"),
        pytest.param(lambda t: setattr(t, "data", t.data.view(2, 8)), id="shape"),
        pytest.param(lambda t: setattr(t, "data", t.data.view(torch.int32)), id="dtype"),
        pytest.param(lambda t: setattr(t, "data", t.data.clone()), id="address"),
    ],
)
def test_what_the_contents_key_covers(change: Callable[[Tensor], Any]) -> None:
    t = torch.zeros(4, 4)
    before = contents_key((t,))
    assert before == contents_key((t,))
    change(t)
    assert contents_key((t,)) != before
    assert contents_key((torch.zeros(4, 4),)) != before


def test_inference_tensors_have_no_contents_key() -> None:
    with torch.inference_mode():
        assert contents_key((torch.zeros(2),)) is None


def test_a_transposed_mask_gives_a_new_map() -> None:
    """`.data` swaps strides behind the tensor's identity, version and address."""
    allowed = torch.ones(64, 64, dtype=torch.bool).tril()
    x = torch.randn(1, 1, 64, 8)
    mask = lambda b, h, q, kv: allowed[q, kv]
    for engine in ("cpp", "blocked"):
        lower = tw.attention(x, x, x, mask=mask, backend=engine)
        allowed.data = allowed.data.t()
        upper = tw.attention(x, x, x, mask=mask, backend=engine)
        torch.testing.assert_close(upper, tw.attention(x, x, x, mask=mask, backend="reference"))
        assert not torch.allclose(lower, upper)
        allowed.data = allowed.data.t()


def test_what_no_map_depends_on_builds_none() -> None:
    ids = torch.arange(256) // 50
    x = torch.randn(1, 2, 256, 8)
    mask = lambda b, h, q, kv: ids[q] == ids[kv]
    tw.attention(x, x, x, mask=mask, backend="cpp")
    built = maps.built
    for options in ({"scale": 2.0}, {"score": scores.softcap(3.0)}, {"dropout_p": 0.5}, {"deterministic": True}, {"return_lse": True}):
        tw.attention(x + 1, x, x.double().float(), mask=mask, backend="cpp", **options)
    assert maps.built == built


# -- structure -------------------------------------------------------------------------------------------------------


def problem(
    length: int = 512,
    batch: int = 1,
    heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    mask: Any = masks.causal,
    score: Any = None,
    strided: bool = False,
    **options: Any,
) -> Problem:
    shape = (batch, heads, length, dim)
    t = torch.empty((*shape[:3], dim + 1), dtype=dtype, device="meta")[..., :dim] if strided else torch.empty(shape, dtype=dtype, device="meta")
    return make_problem(t, t, t, mask, score, Options(**options))[0]


def kernel_key(p: Problem) -> str:
    from tilewise.engines.gpu.kernel_cache import store_key
    from tilewise.engines.gpu.launch import request_of
    from tilewise.engines.triton import aot

    return store_key(request_of(aot.forward_launches(p)[0]()[0], 90))


@needs_triton
@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"dim": 128}, id="head dim"),
        pytest.param({"dtype": torch.float16}, id="dtype"),
        pytest.param({"mask": None}, id="no mask"),
        pytest.param({"mask": masks.causal & (lambda b, h, q, kv: q % 3 != kv)}, id="another program"),
        pytest.param({"score": scores.softcap(30.0)}, id="a score"),
        pytest.param({"score": scores.sinks(torch.zeros(2))}, id="sinks"),
        pytest.param({"dropout_p": 0.1, "seed": 1}, id="dropout"),
        pytest.param({"strided": True}, id="rows that are not aligned"),
    ],
)
def test_what_a_kernels_key_covers(other: dict[str, Any]) -> None:
    assert kernel_key(problem(**other)) != kernel_key(problem())


@needs_triton
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({}, {"length": 777}, id="length"),
        pytest.param({}, {"batch": 3, "heads": 5}, id="batch and heads"),
        pytest.param({}, {"scale": 0.5}, id="scale"),
        pytest.param({"mask": masks.sliding_window(100)}, {"mask": masks.sliding_window(300)}, id="window"),
        pytest.param({"score": scores.softcap(30.0)}, {"score": scores.softcap(50.0)}, id="softcap"),
        pytest.param({"dropout_p": 0.1, "seed": 1}, {"dropout_p": 0.2, "seed": 2}, id="dropout's share and seed"),
    ],
)
def test_what_a_kernels_key_leaves_out(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert kernel_key(problem(**one)) == kernel_key(problem(**other))


@needs_triton
def test_a_configurations_key_covers_what_the_tables_read_and_the_score() -> None:
    from tilewise.engines.triton.fitting import fit_key

    same = fit_key(problem(), ("fwd",))
    for other in ({"dim": 128}, {"dtype": torch.float32}, {"mask": None}, {"score": scores.softcap(30.0)}):
        assert fit_key(problem(**other), ("fwd",)) != same
    assert fit_key(problem(), ("dkdv", "dq")) != same
    for other in ({"length": 777}, {"batch": 4}, {"scale": 3.0}, {"mask": masks.sliding_window(9)}):
        assert fit_key(problem(**other), ("fwd",)) == same
