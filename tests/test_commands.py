"""Mistakes on the command line: one line on stderr and an exit code, never a traceback. Bugs of our own keep theirs."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from tilewise.core import folders, store
from tilewise.tools.cli import CLOSED_PIPE, INTERRUPTED, run

PARTS = {"facts": b"{}", "cubin": b"1234"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
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
    assert "1 kernels, 0.0 MiB of at most 77 MiB (TILEWISE_CACHE_MIB)" in said and "at most 1024 C++ libraries" in said


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
    assert "1 kernels taken into" in (said := capsys.readouterr().out) and "4 entries refused" in said
    assert sorted(p.stem for p in store.entries()) == ["ab" * 32, "cd" * 32]
    assert {p.name for p in folder.rglob("*.kernel")} == {p.name for p in store.entries()}


def test_the_doctor_names_a_backend_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.tools import doctor

    assert doctor._backend().status == "ok"
    monkeypatch.setenv("TILEWISE_BACKEND", "fast")
    assert doctor._backend().status == "problem" and "'fast'" in doctor._backend().detail
