"""The command line: what it prints, as text and as JSON, and mistakes, which are told in one line, never in a traceback. Bugs of our own keep theirs."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import __version__
from tilewise.core import folders, store
from tilewise.tools import doctor
from tilewise.tools.doctor import Finding
from tilewise.tools.doctor_report import as_block
from tilewise_cli.entry import CLOSED_PIPE, INTERRUPTED, run
from tilewise_cli.terminal import console

PARTS = {"facts": b"{}", "cubin": b"1234"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(console, "_width", 200)  # made with the width of before
    monkeypatch.chdir(tmp_path)
    folders.private_folder.cache_clear()
    (tmp_path / "data.txt").write_text("x = 1")
    (tmp_path / "syntax.py").write_text("x = 1\ny = = 2\n")
    (tmp_path / "raises.py").write_text("x = 1\nprint(1 / 0)\n")
    (tmp_path / "zeros.py").write_bytes(b"x = 1\n\0\0")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe4\xff'\n")
    (tmp_path / "exits.py").write_text("import sys\n\n\nsys.exit(3)\n")
    (tmp_path / "mask.py").write_text("x = 1\n\n\ndef mask(b, h, q, kv):\n    return q.nowhere\n\n\ndef broken(b, h, q, kv):\n    return [][7]\n")
    (tmp_path / "nozip").write_text("x = 1")
    with zipfile.ZipFile(tmp_path / "torn.zip", "w") as archive:
        archive.writestr("a", b"0123456789")
    (tmp_path / "torn.zip").write_bytes((tmp_path / "torn.zip").read_bytes()[:-5])
    return tmp_path


MISTAKES = {
    "cache export nowhere/kernels.zip": (1, "nowhere/kernels.zip: No such file or directory"),
    "cache export store": (1, "store: Is a directory"),
    "cache import nozip": (1, "nozip is no archive that `tilewise cache export` wrote"),
    "cache import torn.zip": (1, "torn.zip is no archive"),
    "cache import nowhere.zip": (2, "nowhere.zip"),
    "cache import store": (1, "store: Is a directory"),
    "cache frobnicate": (2, "No such command 'frobnicate'"),
    "frobnicate": (2, "No such command 'frobnicate'"),
    "cache info --frobnicate": (2, "--frobnicate"),
    "doctor --foo": (2, "(see tilewise doctor --help)"),
    "cache info --foo": (2, "(see tilewise cache info --help)"),
    "--foo": (2, "(see tilewise --help)"),
    "demo --out data.txt": (1, "data.txt: File exists"),
    "demo --length 3": (2, "--length"),
    "demo --length three": (2, "Invalid value for '--length'"),
    "bench --out data.txt/bars.png --device cpu": (1, "data.txt: File exists"),
    "build data.txt:x": (2, "'data.txt:x': write file.py:name, with an existing Python file"),
    "build [/foo]": (2, "'[/foo]': write file.py:name"),
    "build [/foo]:x": (2, "'[/foo]:x': write file.py:name"),
    "build nowhere.py:x": (2, "'nowhere.py:x': write file.py:name"),
    "build syntax.py:x": (1, "syntax.py, line 2: invalid syntax"),
    "build raises.py:x": (1, "raises.py, line 2: ZeroDivisionError: division by zero"),
    "build zeros.py:x": (1, "zeros.py"),
    "build latin.py:x": (1, "latin.py"),
    "build exits.py:x": (1, "exits.py, line 4: SystemExit: 3"),
    "build mask.py:other": (2, "mask.py has no function 'other'; it has: mask"),
    "build mask.py:x": (2, "mask.py has no function 'x'"),
    "build mask.py:mask --arch cpu": (1, "nowhere"),
    "build mask.py:broken --arch cpu": (1, "mask.py, line 9: IndexError: list index out of range"),
    "build --arch sm90": (1, "got 'sm90'; did you mean 'sm_90'?"),
    "build --arch sm_70": (1, "got 'sm_70'"),
    "build --arch cpu --dtype fp99": (1, "'fp99'"),
    "build --arch cpu --head-dim -3": (2, "--head-dim"),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_told_in_one_line(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.kernel_root()
    code, said = MISTAKES[line]
    assert run(line.split()) == code
    printed = capsys.readouterr().err
    assert said in printed and printed.startswith("tilewise: ") and printed.count("\n") == 1 and printed.endswith("\n")


def test_a_backend_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TILEWISE_BACKEND", "fast")
    assert run(["demo", "--length", "64", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "unknown backend 'fast' (from TILEWISE_BACKEND); allowed are auto, flex" in said


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    shown = capsys.readouterr()
    assert "Usage" in shown.out + shown.err and "Traceback" not in shown.err
    assert run(["--help"]) == 0 and "Usage" in capsys.readouterr().out


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> list[Path]:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "entries", interrupt)
    assert run(["cache", "info"]) == INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_reader_that_is_gone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """tilewise cache info | head -0"""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert run(["cache", "info"]) == CLOSED_PIPE
    assert capsys.readouterr().err == ""


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Path]:
        raise KeyError("a bug")

    monkeypatch.setattr(store, "entries", fail)
    with pytest.raises(KeyError):
        run(["cache", "info"])


def test_info_tells_the_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(store.SIZE_VARIABLE, "77")
    store.write("ab" * 32, PARTS)
    assert run(["cache", "info"]) == 0
    said = capsys.readouterr().out
    assert "1 kernel, 0.0 MiB of at most 77 MiB (TILEWISE_CACHE_MIB)" in said and "at most 1024 C++ libraries" in said


def test_kernels_are_carried_and_nothing_else_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.write("ab" * 32, PARTS)
    assert run(["cache", "export", "kernels.zip"]) == 0
    store.clear()
    assert run(["cache", "import", "kernels.zip"]) == 0 and store.read("ab" * 32) == PARTS
    with zipfile.ZipFile(folder / "hostile.zip", "w") as archive:
        archive.writestr("cd" * 32 + ".kernel", store.pack(PARTS))
        archive.writestr("../../" + "cd" * 29 + ".kernel", store.pack(PARTS))
        archive.writestr("/etc/" + "cd" * 32 + ".kernel", store.pack(PARTS))
        archive.writestr("ef" * 32 + ".kernel", b"rubbish")
        archive.writestr("01" * 32 + ".kernel", store.pack(PARTS), zipfile.ZIP_DEFLATED)
    capsys.readouterr()
    assert run(["cache", "import", "hostile.zip"]) == 1
    assert "1 kernel taken into" in (said := capsys.readouterr().out) and "4 entries refused" in said
    assert sorted(p.stem for p in store.entries()) == ["ab" * 32, "cd" * 32]
    assert {p.name for p in folder.rglob("*.kernel")} == {p.name for p in store.entries()}


# -- without torch ---------------------------------------------------------------------------------------------------

PROBE = """
import json, sys
from tilewise_cli.entry import run
code = run(sys.argv[1:])
print("\\n" + json.dumps([code, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def alone(*arguments: str, **environment: str) -> tuple[int, str, set[str]]:
    """A command in a process of its own: its exit code, what it printed, and the packages it imported."""
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True, timeout=300, env={**os.environ, **environment})
    printed, _, last = done.stdout.rstrip().rpartition("\n")
    code, packages = json.loads(last)
    return code, printed.strip(), set(packages)


@pytest.mark.parametrize("line", ["--version", "--help", "doctor --help", "build --help", "bench --help", "bench model --help", "cache --help", "frobnicate"])
def test_torch_is_not_imported_before_it_is_needed(line: str) -> None:
    """This is what makes them quick."""
    code, printed, packages = alone(*line.split())
    assert code == (2 if line == "frobnicate" else 0) and not packages & {"torch", "tilewise", "numpy", "matplotlib"}
    if line == "--version":
        assert printed == f"tilewise {__version__}"
    elif line != "frobnicate":
        assert "Usage: tilewise" in printed


@pytest.mark.parametrize(
    ("typed", "completed"), [("do", ["doctor"]), ("cache v", ["verify"]), ("doctor --re", ["--report"]), ("build --dtype f", ["fp16", "fp32"])]
)
def test_shells_complete_commands_options_and_values(typed: str, completed: list[str]) -> None:
    words = ["tilewise", *typed.split()]
    asked = {"_TILEWISE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from tilewise_cli.entry import main; main()"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **asked},
        check=False,
    )
    assert done.stdout.split() == completed and "| torch\n" not in done.stderr


# -- JSON ------------------------------------------------------------------------------------------------------------


def printed_json(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    capsys.readouterr()
    assert run([*line.split(), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_reports_are_json_if_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench` and `bench model` are in test_bench.py and test_bench_models.py."""
    assert printed_json("version", capsys)["tilewise"] == __version__
    assert "auto" in printed_json("backends", capsys)
    built = printed_json("build --arch cpu --head-dim 64 --dtype fp32 --forward-only", capsys)
    assert built["wanted"] >= built["compiled"] and built["folder"] == str(folder / "store")
    store.write("ab" * 32, PARTS)
    found = printed_json("cache info", capsys)
    assert found["folder"] == str(folder / "store") and found["kernels"] == len(store.entries()) and found["bytes"] > 0
    assert printed_json("cache verify", capsys) == {"sound": found["kernels"], "damaged": []}
    path = store.path_of("ab" * 32)
    path.write_bytes(b"rubbish")
    assert printed_json("cache verify", capsys, code=1) == {"sound": found["kernels"] - 1, "damaged": [str(path)]}


# -- the doctor ------------------------------------------------------------------------------------------------------


FINDINGS = [Finding("tilewise", "ok", "1.2"), Finding("kernel store", "ok", "/home/alice/.cache/tilewise: 1 kernel")]


def test_the_doctor_tells_what_it_examines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENGINES", doctor.ENGINES[:1])
    told: list[tuple[int, int, str]] = []
    findings = doctor.examine(lambda *step: told.append(step))
    assert [done for done, _, _ in told] == [*range(told[0][1])] and f"examining {doctor.ENGINES[0].name} on cpu" in [name for _, _, name in told]
    assert {"tilewise", "torch", "C++ compiler", "kernel store", "backend"} <= {f.what for f in findings}


def test_the_doctor_prints_a_table_json_or_a_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda tell: FINDINGS)
    assert run(["doctor"]) == 0
    assert "tilewise" in (said := capsys.readouterr().out) and "to do" not in said  # there is nothing to do
    assert printed_json("doctor", capsys)[0] == {"what": "tilewise", "status": "ok", "detail": "1.2", "fix": ""}
    assert run(["doctor", "--report"]) == 0
    assert "```text\nok" in (said := capsys.readouterr().out) and "~/.cache/tilewise: 1 kernel" in said
    monkeypatch.setattr(doctor, "examine", lambda tell: [*FINDINGS, Finding("GPU", "problem", "gone", "look for it")])
    assert run(["doctor"]) == 1 and "look for it" in capsys.readouterr().out
    assert run(["doctor", "--json", "--report"]) == 2 and "choose one of --json and --report" in capsys.readouterr().err


def test_the_report_names_variables_and_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "people" / "bob"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "bob")
    monkeypatch.setenv("TILEWISE_BACKEND", "flex")
    monkeypatch.setenv(store.VARIABLE, "/scratch/bob/kernels")
    monkeypatch.setenv("SECRET", "hunter2")
    where = [str(home / "x"), "/home/alice/y", r"C:\Users\carol\z", "/tmp/tilewise-bob/w", "a bobbin in /opt/bobbin"]
    block = as_block([Finding("paths", "note", ", ".join(where))])
    assert r"~/x, ~/y, ~\z, /tmp/tilewise-<user>/w, a bobbin in /opt/bobbin" in block
    assert "TILEWISE_BACKEND=flex" in block and f"{store.VARIABLE}=/scratch/<user>/kernels" in block and "hunter2" not in block
    assert block.startswith("```text\n") and block.endswith("\n```")


@pytest.mark.parametrize(
    ("damaged", "said"), [(1, "1 kernel, 0.0 MiB of at most 4096, 1 damaged (it will be"), (2, "2 kernels, 0.0 MiB of at most 4096, 2 damaged (they will")]
)
def test_the_doctor_counts(damaged: int, said: str) -> None:
    for n in range(damaged):
        store.write(f"{n:064x}", PARTS)
        store.path_of(f"{n:064x}").write_bytes(b"rubbish")
    (finding,) = doctor._store()
    assert said in finding.detail


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_doctor_advises_triton_to_who_has_a_gpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NO_TRITON", "Triton is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert ("pip install" in doctor._triton().fix) == has_gpu


def test_the_doctor_tells_where_nvrtc_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.cuda import nvrtc

    monkeypatch.setattr(nvrtc, "refusal", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 9))
    monkeypatch.setattr(nvrtc, "found_at", lambda: "/opt/libnvrtc.so.12")
    (found,) = [f for f in doctor._toolchain() if f.what == "NVRTC"]
    assert (found.status, found.detail) == ("ok", "12.9, /opt/libnvrtc.so.12")
    monkeypatch.setattr(nvrtc, "refusal", lambda: nvrtc.MISSING)
    (found,) = [f for f in doctor._toolchain() if f.what == "NVRTC"]
    assert found.status == "note" and "pip install nvidia-cuda-nvrtc" in found.detail


def test_the_doctor_names_a_backend_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = doctor._backend()
    assert finding.status == "ok"
    monkeypatch.setenv("TILEWISE_BACKEND", "fast")
    (finding,) = doctor._backend()
    assert finding.status == "problem" and "'fast'" in finding.detail
