"""The kernel store under faults: rows 21 to 25 of the list of faults a cache must survive, with real processes and files."""

import logging
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tilewise.core import folders, store

KEY = "ab" * 32
PARTS = {"facts": b"{}", "cubin": bytes(range(256)) * 40}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "store"
    monkeypatch.setenv(store.VARIABLE, str(root))
    folders.private_folder.cache_clear()
    folders._warned.clear()
    return root


def build(seconds: float, told: Connection) -> None:
    """Builds the same entry, slowly, and says whether it had to."""
    with store.building(KEY):
        if store.read(KEY) is None:
            told.send("building")
            time.sleep(seconds)
            store.write(KEY, PARTS)
    told.send("read" if store.read(KEY) == PARTS else "not read")


class Builder:
    """A process that builds. It is a fork, so that it does not import torch first, and all of them begin at the same time."""

    def __init__(self, seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        self.told, told = context.Pipe(duplex=False)
        self.process = context.Process(target=build, args=(seconds, told), daemon=True)
        self.process.start()
        told.close()  # the child's alone

    def said(self) -> list[str]:
        """All that it says, until it ends."""
        lines: list[str] = []
        try:
            while self.told.poll(60):
                lines.append(self.told.recv())
        except EOFError:
            self.process.join()
        return lines


def test_what_is_written_is_read(folder: Path) -> None:
    assert store.read(KEY) is None
    store.write(KEY, PARTS)
    assert store.read(KEY) == PARTS
    assert store.kernel_root() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.name for p in store.entries()] == [KEY + store.ENDING]


def test_eight_cold_processes_build_once() -> None:
    """Row 22."""
    builders = [Builder(0.5) for _ in range(8)]
    assert sorted(b.said() for b in builders) == [["building", "read"], *[["read"]] * 7]
    assert all(b.process.exitcode == 0 for b in builders)


def test_a_killed_builder_does_not_block_the_others() -> None:
    """Row 23: the lock dies with its holder."""
    first = Builder(60)
    assert first.told.recv() == "building"
    second = Builder(0)
    assert not second.told.poll(0.3)
    first.process.kill()
    first.process.join()
    assert second.said() == ["building", "read"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-1],
        lambda raw: raw[:200] + bytes([raw[200] ^ 1]) + raw[201:],
        lambda raw: raw + b"more",
        lambda raw: b"something else entirely",
        lambda raw: store.MAGIC + b"[1, 2]\n",
        lambda raw: store.MAGIC + b"not json\n",
        lambda raw: store.MAGIC + b"{}\n",
        lambda raw: store.MAGIC + b"[" * 100_000 + b"\n",
        lambda raw: store.MAGIC + b'{"library": [-5, ""]}\n',
        lambda raw: store.MAGIC + b'{"library": [1e400, ""]}\n' + raw,
    ],
    ids=["empty", "half", "one byte short", "one bit", "longer", "foreign", "odd header", "no header", "no parts", "deep", "negative size", "infinite size"],
)
def test_a_damaged_entry_counts_as_missing_and_is_replaced(damage) -> None:
    """Row 24."""
    store.write(KEY, PARTS)
    path = store.path_of(KEY)
    path.write_bytes(damage(path.read_bytes()))
    assert store.read(KEY) is None
    assert store.damaged() == [path]
    store.write(KEY, PARTS)
    assert store.read(KEY) == PARTS and store.damaged() == []


def test_a_full_disk_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Row 24: a limit on the size of files stands in for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with caplog.at_level(logging.WARNING, "tilewise"):
            store.write(KEY, PARTS)
            store.write("cd" * 32, PARTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.read(KEY) is None
    assert len(caplog.records) == 1 and "stay in memory" in caplog.text
    assert not list(store.kernel_root().glob("*.tmp"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_a_read_only_folder_costs_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.kernel_root()
    folder.chmod(0o500)
    with caplog.at_level(logging.WARNING, "tilewise"):
        store.write(KEY, PARTS)
    folder.chmod(0o700)
    assert store.read(KEY) is None and len(caplog.records) == 1


def _world_writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _symlink(folder: Path) -> None:
    other = folder.with_name("other")
    other.mkdir(mode=0o700)
    folder.symlink_to(other)


def _file(folder: Path) -> None:
    folder.write_text("not a folder")


def _foreign(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("spoil", [_world_writable, _symlink, _file, _foreign])
def test_a_folder_that_is_not_ours_alone_is_refused(spoil, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Row 25."""
    spoil(folder)
    with caplog.at_level(logging.WARNING, "tilewise"):
        used = store.kernel_root()
        store.write(KEY, PARTS)
        assert store.read(KEY) == PARTS
    assert used != folder and stat.S_IMODE(used.stat().st_mode) == 0o700
    assert str(folder) in caplog.text and store.VARIABLE in caplog.text


def test_clearing_leaves_nothing() -> None:
    store.write(KEY, PARTS)
    with store.building(KEY):
        pass
    assert store.clear() == 1 and not list(store.kernel_root().iterdir())


# -- what is kept, and what goes ---------------------------------------------------------------------------------------


def keys(count: int) -> list[str]:
    return [f"{k:02x}" * 32 for k in range(count)]


def test_an_entry_that_cannot_be_used_is_built_again() -> None:
    """Its checksums are right; it is not what it should be."""
    store.write(KEY, {"other": b"1"})
    assert store.find(KEY, lambda parts: parts["library"]) is None
    assert store.find_or_build(KEY, lambda: {"library": b"2"}, lambda parts: parts["library"]) == (b"2", True)
    assert store.find_or_build(KEY, lambda: {"library": b"3"}, lambda parts: parts["library"]) == (b"2", False)


def test_what_is_built_and_cannot_be_used_is_not_kept() -> None:
    with pytest.raises(KeyError):
        store.find_or_build(KEY, lambda: {"other": b"1"}, lambda parts: parts["library"])
    assert store.read(KEY) is None


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    one = len(store.pack(PARTS))
    monkeypatch.setattr(store, "most_bytes", lambda: 4 * one)
    a, b, c, d, e = keys(5)
    for k, key in enumerate((a, b, c, d)):
        store.write(key, PARTS)
        os.utime(store.path_of(key), (k, k))  # long ago, one after the other
    assert store.read(a) == PARTS  # used now
    store.write(e, PARTS)
    assert {p.stem for p in store.entries()} == {a, c, d, e} and store.size() == 4 * one


def test_what_a_killed_process_left_goes_too() -> None:
    old, new = store.kernel_root() / "old.tmp", store.kernel_root() / "new.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.write(KEY, PARTS)
    assert new.exists() and not old.exists()


def test_processes_evict_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3 * len(store.pack(PARTS))
    monkeypatch.setattr(store, "most_bytes", lambda: most)

    def build_and_evict(first: int) -> bool:
        wanted = [f"{(7 * first + k) % 20:02x}" * 32 for k in range(60)]
        return all([store.find_or_build(key, lambda: PARTS, dict)[0] == PARTS for key in wanted])

    children = []
    for first in range(4):
        child = os.fork()
        if child == 0:
            os._exit(0 if build_and_evict(first) else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert 0 < store.size() <= 2 * most  # some may have been written after the last look
    assert store.damaged() == []


@pytest.mark.parametrize(("given", "mib"), [("", 4096), ("7", 7), ("0", 0), ("7G", 4096), ("-1", 4096)])
def test_the_size_is_the_variables(given: str, mib: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(store.SIZE_VARIABLE, given)
    assert store.most_bytes() == mib * 2**20 and store.most_bytes() == mib * 2**20
    assert len(caplog.records) == (given in ("7G", "-1"))


# -- folders -----------------------------------------------------------------------------------------------------------


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_gets_a_temporary_store(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for variable in (store.VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    store.write(KEY, PARTS)
    assert store.read(KEY) == PARTS
    assert len(caplog.records) == 1 and "no home directory" in caplog.text and store.VARIABLE in caplog.text


def test_without_any_folder_kernels_stay_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("not a folder")
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "nowhere"))
    assert store.find_or_build(KEY, lambda: PARTS, dict) == (PARTS, True)
    assert store.find_or_build(KEY, lambda: PARTS, dict) == (PARTS, True)
    assert store.entries() == [] and store.clear() == 0 and store.damaged() == []
    assert "nor a temporary folder" in caplog.text and len(caplog.records) == 1


FALLS_BACK = """
import os, sys
from tilewise.core import store
root = store.kernel_root()
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(root, root.is_dir())
"""


def test_a_temporary_store_goes_with_its_process_not_with_a_fork_of_it(folder: Path) -> None:
    folder.write_text("not a folder")
    done = subprocess.run([sys.executable, "-c", FALLS_BACK], capture_output=True, text=True, timeout=60, check=True)
    root, was_there = done.stdout.split()
    assert was_there == "True" and not Path(root).exists()
