"""The Gluon engine on an emulated Hopper GPU: the PTX of its passes, held to the error rule, and that they wait for all they need, however late that comes."""

import math
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.bands import BANDS, band_case
from tests.support.cases import Case, function, made
from tests.support.error_rule import check
from tests.support.hopper.emulator import EAGER, LATE, MISSING, RANDOM, EmulationError, Emulator, Timing
from tilewise import masks, scores
from tilewise.engines.gpu import device_map

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ATOMIC = {"deterministic": False}  # the fixture turns on torch's switch, and the Triton engine's backward would be taken
LENGTHS = {64: [(300, 300)], 128: [(130, 400), (257, 1)], 256: [(400, 130)]}


@pytest.mark.parametrize("dim", LENGTHS)
def test_bands(emulator: Emulator, dim: int) -> None:
    for limits in {64: BANDS[::3], 128: BANDS, 256: BANDS[1::3]}[dim]:  # the slow ones share them
        for lengths in LENGTHS[dim]:
            check(band_case(dim, lengths, limits, batch=1, heads=2, kv_heads=1, options=ATOMIC), "gluon", "cpu", torch.bfloat16)


def documents(draw: Any) -> Tensor:
    return torch.arange(draw.case.q_len, device=draw.device) * 7 // 900


FORMS: dict[str, Any] = {"full": None, "band": function(masks.causal & masks.sliding_window(190)), "mapped": made(lambda draw: masks.document(documents(draw)))}
EXTRAS: dict[str, dict[str, Any]] = {
    "sinks": {"score": lambda draw: [scores.sinks(draw.normal(4))]},
    "ALiBi": {"score": lambda draw: [scores.alibi(4)]},
    "softcap": {"score": lambda draw: [scores.softcap(20.0)]},
    "relative bias": {"score": lambda draw: [scores.relative_bias(draw.normal(4, 129))]},
    "dropout": {"options": {"dropout_p": 0.3, "seed": 2**33 + 7, **ATOMIC}},
}
CASES = [  # head dims, what decides about elements, what is asked for beside, dtype
    ((64, 64), "mapped", "softcap", torch.float16),
    ((96, 96), "band", "relative bias", torch.bfloat16),
    ((192, 128), "mapped", "ALiBi", torch.bfloat16),
    ((256, 256), "full", "dropout", torch.float16),
    ((256, 256), "mapped", "sinks", torch.bfloat16),
]


@pytest.mark.parametrize(("dims", "form", "extra", "dtype"), CASES, ids=str)
def test_head_dims_and_what_a_call_may_ask(emulator: Emulator, dims: tuple[int, int], form: str, extra: str | None, dtype: torch.dtype) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "batch": 1, "q_len": 330, "head_dim": dims[0], "v_dim": dims[1]}
    check(Case(f"{dims} {form} {extra}", mask=FORMS[form], **sizes, **{"options": ATOMIC, **EXTRAS.get(str(extra), {})}), "gluon", "cpu", dtype)


@pytest.mark.parametrize("dim", [64, 256])
def test_grids_in_patches(emulator: Emulator, dim: int) -> None:
    """TMA reads and writes them where they lie: tensor maps of five dimensions."""
    near = masks.neighborhood((24, 32), 7)
    check(
        Case(f"patches {dim}", mask=made(lambda draw: near), batch=1, heads=2, kv_heads=1, q_len=768, head_dim=dim, options=ATOMIC),
        "gluon",
        "cpu",
        torch.bfloat16,
    )


# -- around the kernels ------------------------------------------------------------------------------------------------


def test_known_calls_follow_the_documents(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile schedules are made by kernels, as on a GPU; a call that is known with its gradients sees what the ids are by then, and other tensors."""
    monkeypatch.setattr(device_map, "interpreted", lambda: True)  # as it says where the CPU's tensors are a GPU's, too
    monkeypatch.setattr(device_map, "device_maps", device_map.DeviceMapCache())
    ids = torch.arange(700) // 300
    mask = masks.document(ids) & masks.causal
    for cut in (300, 300, 90):
        ids.copy_(torch.arange(700) // cut)
        tensors = [t * torch.randn(()) for t in inputs(64, 700)]
        found, wanted = (gradients(given, engine, mask) for given, engine in ((tensors, "cuda"), ([t.double() for t in tensors], "reference")))
        for mine, exact in zip(found, wanted, strict=True):
            assert (mine - exact).norm() <= 6e-3 * exact.norm()
    assert device_map.device_maps.made == 3


def test_captures_that_learn(emulator: Emulator) -> None:
    """The backward is the Triton engine's."""
    table = {"score": lambda draw: [scores.relative_bias(draw.learned(4, 21)), scores.softcap(5.0)], "mask": FORMS["band"]}
    check(Case("learned", heads=4, kv_heads=2, batch=1, q_len=150, head_dim=64, options=ATOMIC, **table), "gluon", "cpu", torch.bfloat16)


# -- rows that go out of hand ------------------------------------------------------------------------------------------


def inputs(dim: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dim)
    return [torch.randn(1, heads, length, dim, generator=generator).bfloat16() for heads in (2, 1, 1)]


def gradients(tensors: list[Tensor], engine: str, mask: Any) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = tw.attention(*leaves, mask=mask, enable_gqa=True, backend=engine, **ATOMIC)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("dim", [64, 256])
def test_what_is_masked_stays_outside(emulator: Emulator, dim: int) -> None:
    """A NaN reaches other rows through the products of whole tiles; the kernels that follow compute them again."""
    q, k, v = inputs(dim, 100)
    k[:, :, 90:], v[:, :, 90:] = math.nan, math.inf
    mask = masks.causal & (lambda b, h, q, kv: kv < 90)
    found, wanted = (gradients(given, engine, mask) for given, engine in (([q, k, v], "gluon"), ([t.double() for t in (q, k, v)], "reference")))
    for mine, exact in zip(found, wanted, strict=True):
        assert (mine - exact).norm() <= 6e-3 * exact.norm()


# -- when things happen ------------------------------------------------------------------------------------------------

TIMINGS = [Timing(EAGER), Timing(LATE), *[Timing(RANDOM, seed) for seed in range(3)]]


@pytest.mark.parametrize(("dim", "form"), [(64, "mapped"), (128, "full"), (256, "mapped")])
def test_the_same_bits_whatever_comes_late(emulator: Emulator, dim: int, form: str) -> None:
    """But dQ's, whose sums are added to in any order."""
    mask = {"full": None, "mapped": masks.document(torch.arange(400) // 130)}[form]
    found = []
    for timing in TIMINGS:
        emulator.timing = timing
        found.append(gradients(inputs(dim, 400), "gluon", mask))
    for out, dq, dk, dv in found[1:]:
        assert all([torch.equal(a, b) for a, b in zip((out, dk, dv), (found[0][0], *found[0][2:]), strict=True)])
        assert (dq - found[0][1]).float().norm() <= 2e-3 * dq.float().norm()


# -- what the machine notices ------------------------------------------------------------------------------------------

REUSED, WRONG = "may not have read yet", "the result is wrong"


class Mistake(NamedTuple):
    said: str  # what comes of it: an expression for the machine's words, or WRONG
    right: str  # an expression for a text in the kernel
    wrong: str  # in its place


STAGED = r"bar\.sync (%r\d+|\d+), 160;"  # a consumer and the store warp
MISTAKES = {
    "fewer bytes expected than come": Mistake("no thread can go on", r"(expect_tx\.shared\.b64 _, \[%r\d+\], )\d+", r"\g<1>64"),
    "dQ staged over what is being sent": Mistake("arrives again", STAGED, ""),
    "a store not awaited": Mistake(REUSED, r"cp\.async\.bulk\.wait_group\.read \d+;", ""),
    "halves of dS not awaited": Mistake(REUSED, r"bar\.sync (%r\d+|\d+), 256;", ""),
    "a product too many left": Mistake("is reading", r"wgmma\.wait_group\.sync\.aligned 1;", "wgmma.wait_group.sync.aligned 2;"),
    "dQ overwritten, not added": Mistake(WRONG, r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add", "cp.async.bulk.tensor.2d.global.shared::cta"),
    "dS transposed": Mistake(REUSED, r"(m64n64k16\S+ \{[^}]*\}, %rd\d+, %rd\d+, %p\d+, 1, 1, )1, 1", r"\g<1>0, 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_backward(emulator: Emulator, name: str) -> None:
    said, right, wrong = MISTAKES[name]

    def change(text: str) -> str:
        if ".entry bwd(" not in text:
            return text
        text, count = re.subn(right, wrong, re.sub(r"[ \t]+", " ", text))
        assert count > 0, f"the kernel has no {right!r}"
        return text

    emulator.change = change
    tensors = inputs(128, 400)
    if said != WRONG:
        with pytest.raises(EmulationError, match=said):
            gradients(tensors, "gluon", None)
        return
    found, wanted = gradients(tensors, "gluon", None), gradients([t.double() for t in tensors], "reference", None)
    assert not all([(mine - exact).norm() <= 6e-3 * exact.norm() for mine, exact in zip(found, wanted, strict=True)])
