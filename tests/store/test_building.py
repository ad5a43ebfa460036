"""Building ahead without a GPU: every kernel for every architecture, once; what the command line makes of it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.support.machine_code import loops_of_products, machine_code
from tilewise import masks, scores
from tilewise.engines.cuda import nvrtc
from tilewise.engines.gluon import NO_GLUON
from tilewise.engines.gpu.limits import NO_TRITON
from tilewise.tiles import Geometry
from tilewise_cli import entry

pytestmark = [pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON)), pytest.mark.usefixtures("empty_store")]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dim", [64, 128])
def test_causal_kernels_compile_and_a_second_build_does_nothing(arch: str, dim: int) -> None:
    kernels = {64: 5, 128: 6}[dim]  # forward (in two configurations), the look into tiles, deltas, gradients, and what brings dQ from its sums
    if arch == "sm_90" and NO_GLUON is None:
        kernels += 5  # forward; what stands before the backward, the backward, and what follows it; mask bits of the backward
        kernels += 2 * (nvrtc.refusal() is not None)  # the Gluon forward, in the CUDA forward's place, has mask bits and a fix-up
    first = tw.build_kernels([masks.causal], head_dims=[dim], arch=arch)
    looks = 2  # and a stencil's kernel may be there, from another head dim: they do not depend on that
    assert first.wanted == kernels and first.compiled >= kernels - looks  # one that does not fit is compiled again, smaller
    second = tw.build_kernels([masks.causal], head_dims=[dim], arch=arch)
    assert (second.wanted, second.compiled) == (kernels, 0)


def test_a_learned_score_and_decoding_compile() -> None:
    table = torch.zeros(2, 65, requires_grad=True)
    seen: list[tuple[int, int]] = []
    near = masks.on_grid(masks.neighborhood((64, 64), 7).function, (64, 64), 7)  # for a single query, too
    report = tw.build_kernels([near], [scores.relative_bias(table)], [64], ["fp16"], "sm_90", decode=True, progress=lambda d, n, _: seen.append((d, n)))
    wanted = 11 if NO_GLUON is None else 8  # decoding in one split, two ways, or several; on Hopper, another forward, a second kernel that mends, stencils
    assert report.wanted == wanted and seen[-1] == (wanted, wanted)


MASKS = {
    "documents": lambda b, h, q, kv: (torch.arange(4096)[q] == torch.arange(4096)[kv]) & (q >= kv),
    "table per batch and head": lambda b, h, q, kv: torch.ones(1, 2, 64, 64, dtype=torch.bool)[b, h, q // 64, kv // 64],
    "floats": lambda b, h, q, kv: (q / 7 - kv.float().sqrt()).abs() < 2.5,
    "neighborhood": masks.neighborhood((64, 64), 7),
    "everything": lambda b, h, q, kv: True,
}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_looked_into_on_every_architecture(name: str, arch: int) -> None:
    from tilewise.engines.gpu.aot import build
    from tilewise.engines.triton import aot
    from tilewise.tools.build import _problem

    problem = _problem(MASKS[name], None, 64, torch.bfloat16, 4096)
    built = [build(launches(), arch) for launches in aot.map_launches(problem)]
    assert problem.mask is not None
    assert len(built) == 1 and built[0].startswith("base_states" if problem.mask.captures else "classify")


BOUNDED = {  # `classify` has their bounds, which load, too
    "radial": masks.radial(21, 3600),
    "documents": masks.causal & masks.document(torch.arange(75600) // 100),
    "marked tokens": masks.global_tokens(torch.arange(75600) % 1000 == 0),
    "truths": lambda b, h, q, kv: ((q > 5) == (kv >= q)) != (torch.arange(75600).int()[q] < kv),
}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_compile_on_every_architecture(name: str, arch: int) -> None:
    from tilewise.engines.gpu.aot import build
    from tilewise.engines.gpu.mods import bounds_of
    from tilewise.engines.gpu.tile_classifier import classify_launch
    from tilewise.tools.build import _problem

    problem = _problem(BOUNDED[name], None, 64, torch.bfloat16, 75600)
    assert bounds_of(problem) is not None
    states, numbers = (torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.int8, torch.int64))
    launch = classify_launch(problem, Geometry(1, 1, problem.q_len, problem.kv_len, (192, 128)), states, numbers)
    assert build([launch], arch).startswith("classify")


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("tile", "by_keys"), [((16, 16), False), ((192, 128), False), ((128, 64), True), ((64, 96), True)])
def test_schedules_are_made_on_every_architecture(tile: tuple[int, int], by_keys: bool, arch: int) -> None:
    from tilewise.engines.gpu.aot import build
    from tilewise.engines.gpu.device_map import rows_ahead
    from tilewise.tools.build import _problem

    problem = _problem(MASKS["documents"], None, 64, torch.bfloat16, 4096)
    built = [build([launch], arch) for launch in rows_ahead(problem, tile, by_keys)]
    assert [name.split()[0] for name in built] == ["schedule_rows", "order_rows"]


def test_a_mask_of_documents_builds_what_makes_its_schedules() -> None:
    """Along queries and along keys."""
    from tilewise.engines.triton import aot
    from tilewise.tools.build import _problem

    def kernels(*launches: Any) -> list[str]:
        return [make()[0].kernel for make in launches]

    problem = _problem(MASKS["documents"], None, 64, torch.bfloat16, 4096)
    made = ["schedule_rows", "order_rows"]
    assert kernels(*aot.forward_launches(problem)) == ["fwd", "base_states", *made]
    assert kernels(*aot.backward_launches(problem, frozenset())) == ["bwd_preprocess", "bwd", "dq_postprocess", *made, *made]
    if NO_GLUON is None:
        from tilewise.engines.gluon import aot as hopper

        assert kernels(*hopper.forward_launches(problem)) == ["hopper_fwd", "hopper_fwd_fixup", "pack_mask_bits", *made]
        backward = ["hopper_bwd_preprocess", "hopper_bwd", "hopper_bwd_postprocess", "pack_mask_bits", *made]
        assert kernels(*hopper.backward_launches(problem)) == backward


@pytest.mark.parametrize("arch", [80, 90])
def test_decoding_as_models_do_compiles(arch: int) -> None:
    """A static cache, a window, padding, a softcap and sinks; in several splits, and in one."""
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines.gpu.aot import build
    from tilewise.engines.triton import aot
    from tilewise.integrations.step_masks import Sight, mask_of

    query, key = torch.empty(2, 32, 1, 128, dtype=torch.bfloat16, device="meta"), torch.empty(2, 8, 4096, 128, dtype=torch.bfloat16, device="meta")
    mask = mask_of(Sight(torch.tensor(5), 1024, None, torch.ones(2, 4096, dtype=torch.bool)))
    p = make_problem(query, key, key, mask, [scores.softcap(30.0), scores.sinks(torch.zeros(32))], Options(enable_gqa=True))[0]
    built = [build(launches(), arch).split()[0] for launches in aot.forward_launches(p)]
    assert built == ["decode_split", "decode_combine", "decode_split", "decode_split"]


def test_gradients_that_fit_no_tile_are_refused_before_anything_is_compiled() -> None:
    with pytest.raises(tw.BackendError, match=r"got 512 for sm_89, .* and backward=False \(--forward-only\) leaves gradients out"):
        tw.build_kernels(head_dims=[512], dtypes=["fp32"], arch="sm_89")


def test_other_windows_need_no_other_kernel() -> None:
    def build(window: int) -> tw.tools.build.BuildReport:
        return tw.build_kernels([masks.causal & masks.sliding_window(window)], head_dims=[64], arch="sm_90", backward=False)

    build(100)
    assert build(3000).compiled == 0


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [None, masks.causal], ids=["full", "causal"])
def test_no_loop_of_a_kernel_spills_or_waits(mask: object, dim: int) -> None:
    """Registers that overflow to memory inside a loop make a kernel slow, and so does a wait after every product."""
    from tilewise.engines.triton import aot
    from tilewise.tools.build import _problem

    problem = _problem(mask, None, dim, torch.bfloat16, 4096)
    for launches in (*aot.forward_launches(problem), *aot.backward_launches(problem, frozenset())):
        launch = launches()[0]
        loops = loops_of_products(machine_code(launch, 90))
        assert loops or launch.kernel in ("bwd_preprocess", "classify", "dq_postprocess")
        for body in loops:
            spills, waits, products = (len(re.findall(word, body)) for word in (r"\b(?:LDL|STL)\b", "WARPGROUP.DEPBAR", "HGMMA"))
            assert spills == 0, f"{launch.kernel} D{dim}: {spills} spills in a loop of {products} products"
            assert waits < products / 2, f"{launch.kernel} D{dim}: {waits} waits for {products} products"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("bf16x6", "product", "most"), [(True, "HGMMA", 1.0), (False, "FFMA", 0.05)], ids=["bf16x6", "ieee"])
def test_a_forward_in_32_bits_hardly_spills(bf16x6: bool, product: str, most: float, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile a little too large spills as often as it multiplies, and takes ten times as long."""
    from tilewise.engines.gpu import config
    from tilewise.engines.triton import aot
    from tilewise.tools.build import _problem

    monkeypatch.setattr(config, "has_bf16x6", lambda: bf16x6)
    sass = machine_code(aot.forward_launches(_problem(masks.causal, None, dim, torch.float32, 4096))[0]()[0], 90)
    spills, products = (len(re.findall(word, sass)) for word in (r"\b(?:LDL|STL)\b", rf"\b{product}\b"))
    assert products > 0 and spills < most * products, f"D{dim}: {spills} spills beside {products} products"


@pytest.mark.parametrize("dim", [64, 256])
def test_a_bf16x6_backward_has_no_product_that_is_compiled_wrongly(dim: int) -> None:
    """See config.is_miscompiled."""
    from tilewise.engines.triton import aot
    from tilewise.tools.build import _problem

    gradients = aot.backward_launches(_problem(masks.causal, None, dim, torch.float32, 4096), frozenset())[1]()[0]
    sass = machine_code(gradients, 90)
    assert gradients.constants["C"].dq.precision == "bf16x6" and "HMMA" in sass and "HGMMA" not in sass


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backwards_without_a_mask_compile_for_blackwell(deterministic: bool, dim: int) -> None:
    """A configuration that would take more tensor memory than there is, for which Triton makes a kernel that does nothing, is not taken."""
    from tilewise.engines.gpu.aot import build
    from tilewise.engines.gpu.kernel_cache import load_or_build
    from tilewise.engines.gpu.launch import Launch, request_of
    from tilewise.engines.gpu.limits import shared_memory
    from tilewise.engines.triton import aot
    from tilewise.tools.build import _problem

    tried: list[Launch] = []

    class Watched(list[Launch]):
        def __iter__(self) -> Iterator[Launch]:
            for launch in super().__iter__():
                tried.append(launch)
                yield launch

    problem = _problem(None, None, dim, torch.bfloat16, 4096).replaced(deterministic=deterministic)
    for launches in aot.backward_launches(problem, frozenset()):
        build(Watched(launches()), 100)
        facts = json.loads(load_or_build(request_of(tried[-1], 100), tried[-1].table)["facts"])
        assert facts["shared"] <= shared_memory(100)
    assert len(tried) == (5 if dim == 128 and not deterministic else len(aot.backward_launches(problem, frozenset())))


@pytest.mark.parametrize(("tile", "adds"), [(16, ["red", "atomic_add"]), (64, ["red"])])
def test_elements_that_several_threads_hold_are_added_once(tile: int, adds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 16 x 16 is held four times by 128 threads: there, Triton's own atomics have to do."""
    import triton

    from tilewise.engines.gpu import compiler
    from tilewise.engines.gpu.config import Config
    from tilewise.engines.gpu.launch import request_of
    from tilewise.engines.triton import aot, config
    from tilewise.tools.build import _problem

    made: list[str] = []
    compile_ = triton.compile

    def watched(*arguments: object, **options: object) -> object:
        kernel = compile_(*arguments, **options)
        made.append("red" if compiler.RED_ADD in kernel.asm["ptx"] else "atomic_add" if "atom.global" in kernel.asm["ptx"] else "nothing")
        return kernel

    monkeypatch.setattr(triton, "compile", watched)
    monkeypatch.setattr(config, "table_config", lambda role, p: Config(tile, tile, 4, 2))
    problem = _problem(masks.causal, None, 16, torch.bfloat16, 4096)
    launch = aot.backward_launches(problem, frozenset())[1]()[0]
    compiler.compiled(request_of(launch, 90), launch.table())
    assert made == adds


def test_mistakes_say_what_to_do() -> None:
    with pytest.raises(tw.InputError, match="sm_80"):
        tw.build_kernels(arch="sm_70")
    with pytest.raises(tw.InputError, match="bf16, fp16, fp32"):
        tw.build_kernels(dtypes=["int8"], arch="sm_90")
    with pytest.raises(tw.InputError, match="which architecture"):
        tw.build_flex_attention_kernels()


def test_a_failing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(*arguments: object) -> dict[str, bytes]:
        raise RuntimeError("ptxas fell over")

    from tilewise.engines.gpu import compiler

    monkeypatch.setattr(compiler, "compiled", fail)
    with pytest.raises(tw.BackendError, match="Could not compile flex_attention kernels: RuntimeError: ptxas fell over"):
        tw.build_kernels([lambda b, h, q, kv: q * 3 >= kv * 2], head_dims=[64], arch="sm_90")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tilewise", *words], check=False, capture_output=True, text=True, timeout=300)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one process built, another finds, carried there in an archive."""

    def said(*words: str) -> str:
        assert entry.run(words) == 0
        return capsys.readouterr().out

    file = tmp_path / "my_masks.py"
    file.write_text("def my_mask(b, h, q, kv):\n    return (q >= kv) & (q - kv < 100)\n")
    words = ("build", f"{file}:my_mask", "--arch", "sm_90", "--head-dim", "64", "--dtype", "bf16", "--forward-only")
    assert "already there" in run(*words).stdout
    archive = tmp_path / "kernels.zip"
    assert "written to" in said("cache", "export", str(archive))
    said("cache", "verify")
    assert "removed" in said("cache", "clear")
    assert ": 0 kernels" in said("cache", "info")
    said("cache", "import", str(archive))
    assert ": 0 compiled" in run(*words).stdout
    assert entry.run(["build", f"{file}:no_mask", "--arch", "sm_90"]) == 2 and "my_mask" in capsys.readouterr().err


def test_the_doctor() -> None:
    report = run("doctor", "--json")
    findings = {f["what"]: f for f in json.loads(report.stdout)}
    assert report.returncode == 0
    assert findings["blocked on cpu"]["status"] == "ok" and "agrees with the reference" in findings["blocked on cpu"]["detail"]
    assert findings["cpp on cpu"]["status"] == findings["C++ compiler"]["status"]
    assert findings["triton on cpu"]["status"] == "note" and "CUDA" in findings["triton on cpu"]["detail"]


@pytest.mark.parametrize(
    ("mask", "score"),
    [
        pytest.param(lambda: masks.document(lengths=[10, 20]) & masks.causal, None, id="documents"),
        pytest.param(lambda: masks.padding(torch.tensor([3, 4])), None, id="padding"),
        pytest.param(lambda: masks.causal, lambda: scores.alibi(8), id="slopes of 8 heads"),
        pytest.param(lambda: masks.causal, lambda: scores.bias(torch.zeros(3, 8, 10, 10)), id="a bias of 3 batch elements"),
    ],
)
def test_masks_and_scores_are_built_at_the_sizes_they_are_made_for(mask: Any, score: Any) -> None:
    from tilewise.tools.build import LENGTH, _problem

    functions = (mask(), None if score is None else score())
    problem = _problem(*functions, 64, torch.bfloat16, LENGTH)
    for known in (*functions[0].covers, *(() if score is None else functions[1].covers)):
        have = {"b": problem.batch, "h": problem.heads, "q": problem.q_len, "kv": problem.kv_len}[known.axis]
        assert have == known.size
