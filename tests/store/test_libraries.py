"""Compiled C++ libraries: damaged ones are built again, few stay loaded, and neither a missing temporary folder nor a fork is in the way."""

import errno
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core import locks, store
from tilewise.engines.cpp import compiler, libraries, missing, pairs
from tilewise.engines.cpp.compiler import FOR_PROGRAMS, CompilerError
from tilewise.engines.cpp.libraries import Counts, Unit, key_of, library_of

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

EXPORTED = 'extern "C" __attribute__((visibility("default")))'


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    yield
    for unit in [u for u in libraries._libraries if EXPORTED in u.source]:
        del libraries._libraries[unit]


def unit(number: int) -> Unit:
    return Unit(f"{EXPORTED} int number() {{ return {number}; }}", FOR_PROGRAMS)


def number_of(which: Unit) -> Any:
    return library_of(which, "a test").function("number")()


@pytest.mark.parametrize("parts", [{"library": b"rubbish"}, {"library": b""}, {"other": b"1"}, {"library": b"\x7fELF" + bytes(60)}])
def test_a_stored_library_that_does_not_load_is_built_again(parts: dict[str, bytes]) -> None:
    store.write(key_of(unit(7)), parts)
    built = Counts.built
    assert number_of(unit(7)) == 7 and Counts.built == built + 1
    del libraries._libraries[unit(7)]
    assert number_of(unit(7)) == 7 and Counts.built == built + 1  # from the store, where the good one is now


def loaded() -> int:
    """Libraries of this process that came from a temporary file."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return len({line.split()[4] for line in file if "/tilewise-" in line})


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's /proc")
def test_few_libraries_stay_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    number_of(unit(0))
    programs = len([u for u in libraries._libraries if u.extra == FOR_PROGRAMS])
    monkeypatch.setattr(libraries, "MAX_LOADED", programs)
    held, before = library_of(unit(0), "a test"), loaded()
    for k in range(1, 4):
        assert number_of(unit(k)) == k
    assert unit(3) in libraries._libraries and len([u for u in libraries._libraries if u.extra == FOR_PROGRAMS]) == programs
    assert loaded() <= before + 1  # the one that is held, besides as many as may be
    assert held.function("number")() == 0 and number_of(unit(1)) == 1


def test_evicted_masks_are_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "MAX_LOADED", 1)
    x = torch.randn(1, 1, 40, 8)

    def masked(n: int) -> Callable[..., Any]:
        return lambda b, h, q, kv: (q - kv) % n < n // 2 if n % 2 else (q + kv) % n < n // 2

    wanted = {n: tw.attention(x, x, x, mask=masked(n), backend="reference") for n in (4, 5)}
    for _ in range(3):
        for n, expected in wanted.items():
            torch.testing.assert_close(tw.attention(x, x, x, mask=masked(n), backend="cpp"), expected)


def test_without_a_temporary_folder_the_store_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert number_of(unit(11)) == 11
    assert not [p for p in store.kernel_root().iterdir() if p.name.startswith("tilewise-")]


def test_without_any_folder_the_call_is_still_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store").write_text("not a folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    x = torch.randn(1, 1, 40, 8)
    with pytest.raises(CompilerError, match="could not be run"):
        library_of(unit(13), "a test")

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q * 5 + kv * 3) % 11 < 6

    torch.testing.assert_close(tw.attention(x, x, x, mask=mask, backend="cpp"), tw.attention(x, x, x, mask=mask, backend="reference"))
    assert caplog.text.count("calls with this program are served by") == 1


def test_a_unit_that_could_not_be_tried_is_not_remembered_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs.compiler, "processor", lambda: "amx_bf16")
    monkeypatch.setattr(pairs.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(pairs, "_granted", lambda: True)
    unit = pairs.unit.__wrapped__
    for answer, known in ((None, None), (True, pairs.UNITS[0]), (False, pairs.UNITS[0])):  # the last is not asked any more
        monkeypatch.setattr(pairs, "_try", lambda u, answer=answer: answer)
        assert unit() == known


def test_the_fastest_unit_that_works_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(pairs, "_granted", lambda: False)
    monkeypatch.setattr(pairs, "_try", lambda u: True)
    for features, feature in (("avx512_bf16 amx_bf16", "avx512_bf16"), ("avx512_bf16", "avx512_bf16"), ("avx512f", None)):  # AMX is there, but not granted
        monkeypatch.setattr(pairs.compiler, "processor", lambda features=features: features)
        found = pairs.unit.__wrapped__()
        assert (None if found is None else found.feature) == feature


@pytest.mark.skipif(missing() is not None or platform.machine() != "x86_64", reason=str(missing() or "needs an x86-64 processor"))
@pytest.mark.parametrize("name", ["probe", "forward", "backward"])
@pytest.mark.parametrize("unit", pairs.UNITS, ids=lambda u: u.feature)
def test_what_runs_on_a_unit_compiles(unit: pairs.Unit, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the probe did not, the unit would not be used, and nobody would be told."""
    monkeypatch.setenv(compiler.TARGET, "sapphirerapids")
    source = pairs.SOURCE if name == "probe" else f'#include "{name}.cpp"\n'
    assert compiler.compiled(source, (*compiler.FOR_KERNELS, *unit.flags, *(() if name == "probe" else ("-DELEMENT=bfloat",))))


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("unit", pairs.UNITS, ids=lambda u: u.feature)
def test_a_target_without_such_instructions_says_no(unit: pairs.Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.TARGET, "haswell" if platform.machine() == "x86_64" else "armv8-a")
    assert pairs._try(unit) is False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_locks_are_held_leaves_them_free_in_the_child() -> None:
    """A thread that compiles, say: it is not in the child to release what it holds."""
    held, done = threading.Event(), threading.Event()
    every = list(locks._made)
    assert libraries._lock in every

    def hold() -> None:
        for lock in every:
            lock.acquire()
        held.set()
        done.wait()
        for lock in every:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        free = all([not lock.locked() for lock in every])
        os._exit(0 if free and number_of(unit(17)) == 17 else 1)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert status == 0


def test_a_full_disk_is_told_as_the_compilers_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiler.subprocess, "run", full)
    with pytest.raises(CompilerError, match=r"No space left on device.*compiling 'a test'"):
        library_of(unit(19), "a test")
