"""The Hopper kernels compiled without a GPU: every variant, and what the compiler made of their loops."""

import re
from collections import Counter

import pytest
import torch

from tests.support.machine_code import loops_of_products, machine_code
from tilewise import masks, scores
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gluon import NO_GLUON

pytestmark = [pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON)), pytest.mark.usefixtures("empty_store")]


def problem(dim: int, v_dim: int | None = None, mask: object = None, score: object = None, **options: object) -> Problem:
    query, key = (torch.empty(1, heads, 512, dim, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    value = torch.empty(1, 2, 512, v_dim or dim, dtype=torch.bfloat16, device="meta")
    return make_problem(query, key, value, mask, score, Options(enable_gqa=True, **options))[0]


def spills(body: str) -> int:
    return len(re.findall(r"\b(?:LDL|STL)\b", body))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, masks.causal], ids=["full", "causal"])
@pytest.mark.parametrize("anchored", [False, True], ids=["exact", "anchored"])
def test_the_forwards_loop_hides_softmax_under_the_products(anchored: bool, mask: object, dim: int) -> None:
    """Both products are issued before the exponentials, and P V is awaited after them; nothing spills."""
    from tilewise.engines.gluon import aot

    code = machine_code(aot.forward_launches(problem(dim, mask=mask, max_scores=not anchored))[0]()[0], 90)
    loops = [body for body in loops_of_products(code) if "MUFU.EX2" in body]
    assert len(loops) == (3 if dim == 64 else 2)  # one for each warpgroup
    for body in loops:
        assert spills(body) == 0
        last_product, first_exp, last_exp = body.rindex("HGMMA"), body.index("MUFU.EX2"), body.rindex("MUFU.EX2")
        if anchored and mask is None:
            assert "FMNMX" not in body and "FMUL" not in body  # no maximum, no rescale
        assert last_product < first_exp < last_exp < body.rindex("WARPGROUP.DEPBAR")
        assert len(re.findall("WARPGROUP.DEPBAR", body)) == 2  # a serialised kernel waits for every product


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_parts_leave_from_registers(dim: int) -> None:
    """In fp32, two elements at a time; loops are those of other outputs, which nothing that is stored touches."""
    from tilewise.engines.gluon import aot

    p = problem(dim, mask=masks.causal)
    part, whole = (machine_code(aot.forward_launches(q)[0]()[0], 90) for q in (p.replaced(partial=True), p))
    assert len(re.findall(r"STG\.E\.64", part)) == (3 if dim == 64 else 2) * dim // 4
    assert "UTMASTG" in whole and "UTMASTG" not in part
    for mine, theirs in zip(*([body for body in loops_of_products(code) if "MUFU.EX2" in body] for code in (part, whole)), strict=True):
        assert spills(mine) == 0 and all([mine.count(name) == theirs.count(name) for name in ("HGMMA", "MUFU.EX2", "WARPGROUP.DEPBAR")])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, masks.causal], ids=["full", "causal"])
def test_the_backwards_loop_waits_only_where_it_must(mask: object, dim: int) -> None:
    from tilewise.engines.gluon import aot

    code = machine_code(aot.backward_launches(problem(dim, mask=mask))[1]()[0], 90)
    loops = [body for body in loops_of_products(code) if "MUFU.EX2" in body]
    assert len(loops) == 2
    for body in loops:
        products, waits = len(re.findall("HGMMA", body)), len(re.findall("WARPGROUP.DEPBAR", body))
        assert waits <= 4 < products  # a serialised kernel waits for every product
        assert spills(body) == 0


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"dim": 96}, id="padded"),
        pytest.param({"dim": 192, "v_dim": 128, "mask": masks.causal}, id="other V"),
        pytest.param({"dim": 128, "mask": masks.causal, "score": scores.softcap(30.0)}, id="softcap"),
        pytest.param({"dim": 64, "mask": masks.causal, "score": [scores.softcap(30.0), scores.sinks(torch.zeros(4))]}, id="sinks"),
        pytest.param({"dim": 128, "mask": masks.causal, "dropout_p": 0.1, "seed": 1}, id="dropout"),
        pytest.param({"dim": 256, "mask": masks.causal, "score": scores.softcap(30.0), "dropout_p": 0.1, "seed": 1}, id="wide, softcap and dropout"),
        pytest.param({"dim": 64, "mask": lambda b, h, q, kv: (q // 7 + b * h) % 3 == kv % 3}, id="a mask per head"),
    ],
)
def test_every_variant_compiles(asked: dict[str, object]) -> None:
    from tilewise.engines.gluon import aot
    from tilewise.engines.gluon.refusals import refuse_backward
    from tilewise.engines.gpu.kernel_cache import load_or_build
    from tilewise.engines.gpu.launch import request_of

    p = problem(**asked)
    launches = aot.forward_launches(p) + (aot.backward_launches(p) if refuse_backward(p, learns=False) is None else [])
    assert len(launches) == (7 if p.mask is not None else 5)  # a mask has bits, of either pass
    for make in launches:
        launch = make()[0]
        assert load_or_build(request_of(launch, 90), launch.table)["cubin"]


@pytest.mark.parametrize(
    ("score", "more"),
    [
        pytest.param(scores.softcap(30.0), {"MUFU": 64, "FMUL": 64}, id="softcap"),  # the tanh, and its argument's scale
        pytest.param(scores.alibi(torch.ones(4)), {"FFMA": 128, "I2FP": 2}, id="alibi"),  # distances are made of a number a row, and constants
    ],
)
def test_scores_cost_what_they_must(score: object, more: dict[str, int]) -> None:
    """Instructions of a step of 64 x 128, of which a thread has 64, beyond those of plain causal attention."""
    from tilewise.engines.gluon import aot

    def counted(score: object) -> list[dict[str, int]]:
        code = machine_code(aot.forward_launches(problem(128, mask=masks.causal, score=score))[0]()[0], 90)
        bodies = [body for body in loops_of_products(code) if "MUFU.EX2" in body]
        return [{name: len(re.findall(rf"\b{name}\b", body)) for name in ("MUFU", "FMUL", "FFMA", "FADD", "I2FP", "FSETP")} for body in bodies]

    for with_score, without in zip(counted(score), counted(None), strict=True):
        extra = {name: with_score[name] - without[name] for name in without}
        assert all([count <= more.get(name, 0) + 4 for name, count in extra.items()]), extra


def test_masks_share_the_large_kernels() -> None:
    """A new mask is compiled into its stencils, and into what mends unsound rows, not into the kernels that take seconds."""
    from tilewise.engines.gluon import aot
    from tilewise.engines.gpu.launch import request_of

    def requests(mask: object) -> set[object]:
        p = problem(128, mask=mask)
        return {request_of(make()[0], 90) for make in aot.forward_launches(p) + aot.backward_launches(p)}

    shared = {request.kernel for request in requests(masks.causal) & requests(lambda b, h, q, kv: (q // 7 + h) % 3 == kv % 3)}
    assert shared == {"hopper_fwd", "hopper_bwd_preprocess", "hopper_bwd"}


def test_a_table_of_distances_costs_loads_alone() -> None:
    """Where all places lie before the end, what the compiler knows of them is part of the loads' instructions: a thread's 64 have two addresses."""
    from tilewise.engines.gluon import aot

    table = torch.empty(4, 2 * 512 - 1, device="meta")
    p = problem(128, mask=masks.causal, score=lambda s, b, h, q, kv: s + table[h, q - kv + 511])
    code = machine_code(aot.forward_launches(p)[0]()[0], 90)
    loops = [body for body in loops_of_products(code) if "MUFU.EX2" in body]
    assert len(loops) == 2
    for body in loops:
        bases = Counter(re.findall(r"LDG\.\S+ R\d+, \S*\[(R\d+)\.64", body))
        assert sum([count for _, count in bases.most_common(2)]) >= 60, bases


def test_patches_keep_the_loop_in_order() -> None:
    from tilewise.engines.gluon import aot
    from tilewise.engines.gluon.patches import grid_width

    query = torch.empty(1, 2, 128 * 128, 128, dtype=torch.bfloat16, device="meta")
    p = make_problem(query, query, query, masks.neighborhood((128, 128), 13), None, Options())[0]
    assert grid_width(p) == 128
    for launches, kernel in ((aot.forward_launches(p), 0), (aot.backward_launches(p), 1)):
        code = machine_code(launches[kernel]()[0], 90)
        loops = [body for body in loops_of_products(code) if "MUFU.EX2" in body]
        assert len(loops) == 2 and all([spills(body) == 0 for body in loops])
