"""Whole-model benchmarks: what is measured, what a crash costs, what is printed, kept and merged."""

import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilewise as tw
from tilewise.integrations import diffusers, transformers
from tilewise.tools import bench_model
from tilewise.tools.bench_model import Measured
from tilewise.tools.bench_models import measure, processes, rows
from tilewise.tools.bench_models.processes import Findings, Result, Settings
from tilewise.tools.bench_models.rows import INFERENCE, STEP, Job
from tilewise.tools.bench_models.workload import Scale
from tilewise_cli.app import app
from tilewise_cli.entry import run as command
from tilewise_cli.terminal import console

CPU = Scale(True, torch.device("cpu"))
Event = dict[str, Any]


@pytest.fixture
def clients() -> Iterator[None]:
    """For what runs models here: tilewise is forgotten by the clients afterwards. One thread, as on a busy machine two wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    transformers.unregister()
    diffusers.unregister()


def measured(jobs: list[Job]) -> list[Event]:
    events: list[Event] = []
    measure.run(jobs, CPU, 2, events.append)
    return events


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


# -- in one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job", [Job("llama-padded", STEP, ["sdpa", "tilewise"]), Job("hunyuanvideo", INFERENCE, ["native", "tilewise"])], ids=lambda job: job.row
)
def test_implementations_agree_and_take_turns(job: Job, clients: None) -> None:
    events = measured([job])
    assert [event["implementation"] for event in of(events, "first")] == job.implementations
    assert [event["implementation"] for event in of(events, "time")] == [*job.implementations, *reversed(job.implementations)]
    assert all(event["off"] < 1e-5 and event["beside"] == job.implementations[0] for event in of(events, "first"))
    assert all(event["ms"] > 0 for event in of(events, "time")) and events[-1] == {"event": "done", "row": job.row, "mode": job.mode}


SMALL_TALK = {"hunyuanvideo": ["context_embedder.token_refiner.refiner_blocks.0.attn"]}  # what SDPA may keep: a few tokens of text


@pytest.mark.parametrize("name", [name for name, row in rows.ROWS.items() if not row.needs_gpu and not row.compiles and not name.startswith("generate-")])
def test_the_layers_of_every_model_reach_tilewise(name: str, clients: None) -> None:
    """A row whose model passes by would measure torch's SDPA under our name."""
    row = rows.find(name)
    rows.register(row.client)
    workload = row.build(CPU)
    with rows.attending(row, workload.model, "tilewise"), tw.watch(workload.model) as seen, torch.no_grad():
        workload.forward(0)
    assert [layer.name for layer in seen.bypassing] == SMALL_TALK.get(name, []) and sum(seen.engines.values()) > 0


@pytest.mark.parametrize("name", ["cudnn", "flash", "native"])
def test_kernels_of_sdpa_are_asked_for_where_a_model_calls_it_by_itself(name: str, clients: None) -> None:
    """On a CPU there are none of them, and SDPA's plain way is what is left."""
    row = rows.find("sd3")
    rows.register(row.client)
    workload, before = row.build(CPU), torch.backends.cuda.mem_efficient_sdp_enabled()
    with rows.attending(row, workload.model, name), torch.no_grad():
        assert torch.backends.cuda.cudnn_sdp_enabled() == (name != "flash") and torch.backends.cuda.flash_sdp_enabled() == (name != "cudnn")
        if name == "native":
            workload.forward(0)
    assert torch.backends.cuda.mem_efficient_sdp_enabled() == before


def test_a_step_is_compared_by_its_gradients_too(clients: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation whose forward is right and whose backward is not."""
    import transformers as library

    @contextmanager
    def attending(row: rows.Row, model: Any, implementation: str) -> Iterator[None]:
        model.set_attn_implementation("sdpa" if implementation == "sdpa" else "half")
        yield

    def half(*given: Any, **options: Any) -> Any:
        out, weights = library.AttentionInterface()["sdpa"](*given, **options)
        return out / 2 + out.detach() / 2, weights

    library.AttentionInterface.register("half", half)
    library.AttentionMaskInterface.register("half", library.AttentionMaskInterface()["sdpa"])
    monkeypatch.setattr(measure, "attending", attending)
    first = of(measured([Job("host-causal", STEP, ["sdpa", "tilewise"])]), "first")
    assert first[1]["off"] > 0.1
    for interface in (library.AttentionInterface, library.AttentionMaskInterface):
        interface._global_mapping.pop("half")


def test_packed_documents_change_their_layout_at_every_turn(clients: None) -> None:
    workload = rows.find("llama-packed").build(CPU)
    with torch.no_grad():
        first, second, again = (workload.forward(turn) for turn in (0, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, second)


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA cannot be set; the other implementations can."""
    original = rows.attending

    @contextmanager
    def attending(row: rows.Row, model: Any, implementation: str) -> Iterator[None]:
        if implementation == "sdpa":
            raise ValueError("no such luck\nand more")
        with original(row, model, implementation):
            yield

    monkeypatch.setattr(measure, "attending", attending)


def test_who_cannot_says_why_and_the_others_go_on(clients: None, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch)
    events = measured([Job("host-causal", INFERENCE, ["sdpa", "eager"])])
    assert [(event["why"], event["fatal"]) for event in of(events, "failed")] == [("ValueError: no such luck", False)]
    assert [(event["implementation"], event["beside"]) for event in of(events, "first")] == [("eager", "eager")] and len(of(events, "time")) == 2


def test_a_device_that_died_ends_the_process(clients: None, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch)
    monkeypatch.setattr(measure, "usable", lambda device: False)
    events: list[Event] = []
    with pytest.raises(measure.Unusable):
        measure.run([Job("host-causal", INFERENCE, ["sdpa", "eager"])], CPU, 2, events.append)
    assert events[-1]["why"] == "died: ValueError: no such luck" and events[-1]["fatal"]


# -- in processes of their own ---------------------------------------------------------------------------------------
# A worker that does as the names of its implementations say.

WORKER = """
import json, os, sys, time
order = json.loads(sys.argv[1])
def tell(event, row, **more): print(json.dumps({"event": event, "row": row, **more}), flush=True)
for row, mode, names in order["jobs"]:
    tell("building", row)
    if row == "unbuildable":
        sys.exit("no memory for it")
    for name in names:
        this = {"mode": mode, "implementation": name}
        tell("begin", row, **this)
        if name == "crashes":
            os.abort()
        if name == "hangs":
            time.sleep(60)
        if name == "ends the device":
            tell("failed", row, **this, why="died: illegal memory access", fatal=True)
            os._exit(1)
        tell("first", row, **this, seconds=float(os.getpid()), ms=7.0, gib=None, off=0.0, beside=names[0])
    for name in names:
        this = {"mode": mode, "implementation": name}
        tell("begin", row, **this)
        if name == "crashes later":
            os.abort()
        tell("time", row, **this, ms=5.0)
    tell("done", row, mode=mode)
"""
FAKE = (sys.executable, "-c", WORKER)


def found(jobs: list[Job], **settings: Any) -> tuple[Findings, list[Event]]:
    events: list[Event] = []
    return processes.measure(jobs, Settings(True, "cpu", **settings), events.append, FAKE), events


@pytest.mark.parametrize(
    ("culprit", "why"),
    [("crashes", "died: SIGABRT"), ("crashes later", "died: SIGABRT"), ("hangs", "stopped after 2 s"), ("ends the device", "died: illegal memory access")],
)
def test_a_crash_costs_its_own_result_alone(culprit: str, why: str) -> None:
    jobs = [Job("a", STEP, ["sdpa", "tilewise"]), Job("a", INFERENCE, ["sdpa", culprit, "tilewise"]), Job("b", STEP, ["tilewise"])]
    findings, events = found(jobs, limit=2)
    results = findings.results
    assert {key: result.failed for key, result in results.items() if result.failed} == {("a", INFERENCE, culprit): why}
    assert {key: result.times for key, result in results.items() if not result.failed} == {
        (row, mode, name): [5.0]
        for row, mode, name in [("a", STEP, "sdpa"), ("a", STEP, "tilewise"), ("a", INFERENCE, "sdpa"), ("a", INFERENCE, "tilewise"), ("b", STEP, "tilewise")]
    }
    assert len(of(events, "failed")) == 1
    assert results["a", STEP, "sdpa"].first_s == results["a", INFERENCE, "sdpa"].first_s  # the first process's, in which nothing had been compiled
    assert results["a", STEP, "sdpa"].first_s != results["b", STEP, "tilewise"].first_s


def test_a_model_that_cannot_be_built_costs_its_row_alone() -> None:
    results = found([Job("unbuildable", STEP, ["sdpa", "tilewise"]), Job("b", STEP, ["tilewise"])])[0].results
    assert results["unbuildable", STEP, "sdpa"].failed == results["unbuildable", STEP, "tilewise"].failed == "died: exit code 1, no memory for it"
    assert results["b", STEP, "tilewise"].times == [5.0]


def test_what_was_measured_before_the_deadline_counts() -> None:
    results = found([Job("a", STEP, ["sdpa", "hangs"]), Job("b", STEP, ["sdpa"])], deadline=time.monotonic() + 2)[0].results
    assert {key: (result.ms, result.times) for key, result in results.items()} == {("a", STEP, "sdpa"): (7.0, [])}


@pytest.mark.slow
def test_a_row_in_a_real_process() -> None:
    results = processes.measure([Job("host-causal", INFERENCE, ["sdpa", "eager"])], Settings(True, "cpu", rounds=1, threads=1), lambda event: None).results
    assert all(result.failed is None and len(result.times) == 1 for result in results.values()) and len(results) == 2


# -- the rows --------------------------------------------------------------------------------------------------------


def test_what_a_cpu_cannot_is_left_out() -> None:
    assert rows.jobs_of(rows.find("generate-compiled"), CPU) == []
    assert rows.jobs_of(rows.find("flux"), CPU) == [Job("flux", STEP, ["native", "tilewise"]), Job("flux", INFERENCE, ["native", "tilewise"])]
    assert rows.jobs_of(rows.find("llama"), CPU, [STEP], only=["flex", "fa3"]) == [Job("llama", STEP, ["flex"])]
    assert rows.jobs_of(rows.find("llama"), CPU, skip=["tilewise"])[0].implementations == ["sdpa"]


def test_implementations_are_known_to_their_clients() -> None:
    for row in rows.ROWS.values():
        known = rows.TRANSFORMERS if row.client == "transformers" else rows.DIFFUSERS
        assert {*row.implementations} <= {*known} <= {*rows.IMPLEMENTATIONS} and "tilewise" in row.implementations


# -- the command -----------------------------------------------------------------------------------------------------

MISTAKES = {
    "bench model nothing": (1, "there is no model 'nothing'; there are llama,"),
    "bench model lama": (1, "did you mean 'llama'?"),
    "bench model llama --impl flx": (1, "did you mean 'flex'?"),
    "bench model llama --impl cudnn --device cpu": (1, "cudnn needs a GPU"),
    "bench model llama --impl tilewise --impl fa3 --device cpu": (1, "fa3 needs a GPU and flash_attn_interface, which is not installed"),
    "bench model llama --impl slow": (1, "there is no implementation 'slow'; there are eager,"),
    "bench model llama --mode fast": (1, "llama has no mode 'fast'; it has step and inference"),
    "bench model generate-compiled --mode step": (1, "generate-compiled has no mode 'step'; it has inference"),
    "bench model llama --impl native": (1, "nothing is left to measure of llama"),
    "bench model generate-compiled --device cpu": (1, "nothing is left to measure of generate-compiled on cpu"),
    "bench model llama --out bars.txt": (2, "no picture"),
    "bench --length 64 model llama": (2, "write it after 'model'"),
    "bench frobnicate": (2, "No such command 'frobnicate'"),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_told_in_one_line(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rows, "has_fa3", lambda: False)
    code, said = MISTAKES[line]
    assert command(line.split()) == code
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "diffusers" else original(name, *more))
    assert command(["bench", "model", "flux"]) == 1
    assert "flux needs diffusers, which is not installed: pip install 'tilewise[diffusers]'" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["bench model", "bench model --list"])
def test_the_models_are_listed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(console, "_width", 200)  # made with the width of before
    listed = CliRunner().invoke(app, line.split())
    assert listed.exit_code == 0 and all(name in listed.output for name in [*rows.ROWS, *rows.IMPLEMENTATIONS])
    found = json.loads(CliRunner().invoke(app, [*line.split(), "--json"]).stdout)
    assert [*found["models"]] == [*rows.ROWS] and found["implementations"] == rows.IMPLEMENTATIONS


@pytest.mark.parametrize("broken", [None, "died: SIGABRT"])
def test_it_prints_and_draws(broken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(console, "_width", 200)  # made with the width of before

    def fake(jobs: list[Job], settings: Settings, tell: Any) -> Findings:
        tell({"event": "building", "row": "host-packed"})
        for mode in (STEP, INFERENCE):
            for name in ("sdpa", "tilewise"):
                tell({"event": "begin", "row": "host-packed", "mode": mode, "implementation": name})
                tell({"event": "first", "row": "host-packed", "mode": mode, "implementation": name})
        findings = Findings({("host-packed", mode, "sdpa"): Result([20.0, 22.0, 21.0], 0.5, 21.0, 1.5, 0.0, "sdpa") for mode in (STEP, INFERENCE)}, "a machine")
        findings.results["host-packed", INFERENCE, "tilewise"] = Result([10.0, 10.5, 12.0], 4.25, 10.0, 1.25, 3e-7, "sdpa")
        findings.results["host-packed", STEP, "tilewise"] = Result([22.0, 23.0], 4.25, 10.0, 1.25, 3e-7, "sdpa", broken)
        return findings

    monkeypatch.setattr(processes, "measure", fake)
    picture = tmp_path / "pictures" / "bars.png"
    line = ["bench", "model", "host-packed", "--device", "cpu", "--out", str(picture)]
    assert command(line) == (1 if broken else 0)
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert ["inference", "tilewise", "10.5", "2.00", "1.25", "4.2", "3e-07"] in cells and "inference: tilewise takes -625 us a layer more" in printed
    assert any(broken in cell for line in cells for cell in line) if broken else "step: tilewise takes +94 us a layer more" in printed
    assert picture.read_bytes().startswith(b"\x89PNG") and "FlashAttention" not in printed  # which no CPU could run
    assert command([*line, "--json"]) == (1 if broken else 0)
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "host-packed" and found["tiny"] and found["device"] == "a machine" and found["picture"] == str(picture)
    assert found["results"]["inference"]["tilewise"] == {
        "times": [10.0, 10.5, 12.0],
        "first_s": 4.25,
        "warm_ms": 10.0,
        "gib": 1.25,
        "off": 3e-7,
        "beside": "sdpa",
        "failed": None,
        "ms": 10.5,
    }
    assert found["results"]["step"]["tilewise"]["failed"] == broken


def test_a_column_without_numbers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row, job = rows.find("llama"), Job("llama", STEP, ["sdpa", "tilewise"])
    made = Findings({("llama", STEP, name): Result([ms], 0.5, ms, None, 1e-7, "sdpa") for name, ms in (("sdpa", 20.0), ("tilewise", 10.0))})
    monkeypatch.setattr(processes, "measure", lambda *given: made)
    found = bench_model.measure(row, [job], Settings(True, "cpu"), lambda event: None)
    assert [str(c.header) for c in bench_model.table(found).columns] == ["", "implementation", "ms", "speedup", "first call, s", "difference"]


@pytest.mark.parametrize(
    ("asked", "device", "said"),
    [({}, "cpu", True), ({"only": ["tilewise"]}, "cpu", False), ({"only": ["flex"]}, "cpu", False), ({"skip": ["flex"]}, "cpu", False), ({}, "cuda", False)],
)
def test_flex_is_not_left_out_in_silence(asked: dict[str, list[str]], device: str, said: bool) -> None:
    found = Measured(rows.find("llama"), Settings(True, device), Findings({}), {})
    assert any("--impl flex" in note for note in bench_model.notes(found, **asked)) == said
    assert not any("--impl flex" in note for note in bench_model.notes(replace(found, row=rows.find("host-packed")), **asked))


# -- benchmarks/models.py --------------------------------------------------------------------------------------------


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    module = importlib.import_module("models")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "STORED", tmp_path / "models.json")
    monkeypatch.setattr(module, "REPORT", tmp_path / "models.md")
    monkeypatch.setattr(sys, "argv", ["models.py"])
    yield module
    for name in ("models", "common"):
        sys.modules.pop(name, None)


def findings_of(row: str, times: dict[str, float | str], device: str = "a GPU") -> Findings:
    made = {name: Result(failed=ms) if isinstance(ms, str) else Result([ms], 1.0, ms, 2.0, 0.0, "sdpa") for name, ms in times.items()}
    return Findings({(row, STEP, name): result for name, result in made.items()}, device, "tilewise 1, torch 2")


def test_what_was_not_run_again_stays(models: Any) -> None:
    stored: dict[str, Any] = {}
    models.merge(stored, findings_of("llama", {"sdpa": 80.0, "tilewise": 100.0}), False, "first")
    models.merge(stored, findings_of("llama", {"flex": 96.0}), False, "second")
    models.merge(stored, findings_of("flux", {"native": "died: SIGABRT", "flash": 110.0, "tilewise": 55.0}), False, "second")
    models.merge(stored, findings_of("llama", {"sdpa": 1.0, "tilewise": 2.0}, "a CPU"), True, "second")
    models.merge(stored, findings_of("llama", {"sdpa": 79.0, "tilewise": 50.0}), False, "third")
    models.save(stored)
    assert json.loads(models.STORED.read_text()) == stored and [*stored["a GPU"]["runs"]] == ["second", "third"]
    page = models.REPORT.read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["Llama-like, causal, 16k tokens, training step", "79.0", "", "96.0\\*", "50.0", "1.58"] in lines
    assert ["Flux-like, 1024 px, training step", "died: SIGABRT", "110.0", "", "55.0", "2.00"] in lines
    assert ["llama, training step", "1.0", "2.0", "0.50"] in lines and "## a CPU, tiny" in page
    shown = models.readme(stored)
    assert "110.0 (flash)" in shown and "1.58" in shown and "0.50" not in shown


def test_rows_are_chosen_and_measured(models: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[list[Job]] = []

    def fake(jobs: list[Job], settings: Settings, tell: Any) -> Findings:
        asked.append(jobs)
        assert settings.tiny and settings.rounds == 3 and settings.limit == 9
        return findings_of("llama", {"sdpa": 80.0, "tilewise": 100.0}, "a CPU")

    monkeypatch.setattr(models.processes, "measure", fake)
    line = "models.py --only llama wan --mode step --skip tilewise --device cpu --rounds 3 --limit 9 --save"
    monkeypatch.setattr(sys, "argv", line.split())
    models.main()
    assert asked == [[Job("llama", STEP, ["sdpa"]), Job("wan", STEP, ["native"])]]
    assert "0.80" in capsys.readouterr().out and "0.80" in models.REPORT.read_text()


def test_the_page_has_the_saved_results(models: Any) -> None:
    """Every row of the tables that --readme prints stands in docs/performance.md, but for the words of what died."""
    root = Path(__file__).parent.parent
    page = {cells_of(line) for line in (root / "docs" / "performance.md").read_text().splitlines()}
    printed = [line for line in models.readme(json.loads((root / "benchmarks" / "results" / "models.json").read_text())).splitlines() if line.startswith("| ")]
    assert len(printed) > 30
    assert [line for line in printed if cells_of(line) not in page] == []


def cells_of(line: str) -> tuple[str, ...]:
    return tuple([re.sub("^died: .*", "died", cell.strip()) for cell in line.split("|")])
