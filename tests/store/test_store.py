"""The kernel store under faults: rows 21 to 25 of the list of faults a cache must survive, with real processes and files."""

import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewise.core import folders, store

KEY = "ab" * 32
PARTS = {"facts": b"{}", "cubin": bytes(range(256)) * 40}

# Builds the same entry, slowly, and says whether it had to.
BUILDER = """
import sys, time
from tilewise.core import folders, store
key, parts = sys.argv[1], {"facts": b"{}", "cubin": bytes(range(256)) * 40}
with store.building(key):
    if store.read(key) is None:
        print("building", flush=True)
        time.sleep(float(sys.argv[2]))
        store.write(key, parts)
assert store.read(key) == parts
print("read", flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "store"
    monkeypatch.setenv(store.VARIABLE, str(root))
    folders.private_folder.cache_clear()
    folders._warned.clear()
    return root


def builder(seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, KEY, str(seconds)], stdout=subprocess.PIPE, text=True)


def test_what_is_written_is_read(folder: Path) -> None:
    assert store.read(KEY) is None
    store.write(KEY, PARTS)
    assert store.read(KEY) == PARTS
    assert store.kernel_root() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.name for p in store.entries()] == [KEY + store.ENDING]


def test_eight_cold_processes_build_once() -> None:
    """Row 22."""
    processes = [builder(0.5) for _ in range(8)]
    outputs = [p.communicate(timeout=60)[0] for p in processes]
    assert all(p.returncode == 0 for p in processes)
    assert sum("building" in o for o in outputs) == 1


def test_a_killed_builder_does_not_block_the_others() -> None:
    """Row 23: the lock dies with its holder."""
    first = builder(60)
    assert first.stdout is not None and first.stdout.readline() == "building\n"
    second = builder(0)
    time.sleep(0.3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert "read" in second.communicate(timeout=30)[0]


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
    ],
    ids=["empty", "half", "one byte short", "one bit", "longer", "foreign", "odd header", "no header"],
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
