"""The benchmark a user runs: what it counts, what it prints and draws."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewise.tools import bench
from tilewise.tools.commands import app


def test_it_measures_prints_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "TURNS", 1)
    picture = tmp_path / "pictures" / "bars.png"
    assert bench.run(picture, 64, 2, 8, torch.device("cpu")) == 0
    printed = capsys.readouterr().out
    for work in bench.works(64, 2, torch.device("cpu")):
        assert work.title in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_pairs_are_counted() -> None:
    assert bench.allowed_pairs(None, 50, torch.device("cpu")) == 2500
    assert bench.allowed_pairs(lambda b, h, q, kv: q >= kv, 50, torch.device("cpu")) == 50 * 51 // 2


def test_a_peer_that_cannot_leaves_its_cell_empty() -> None:
    assert bench.shown(bench.Rate(None, None)) == "-"
    assert bench.shown(bench.Rate(512.4, None)) == "512 / -"


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_device_that_is_not_there_is_said_to_be(command: str) -> None:
    found = CliRunner().invoke(app, [command, "--device", "cuba"])
    assert found.exit_code == 2 and "torch cannot use the device 'cuba' here" in found.output


def test_a_name_that_is_no_pictures_is_refused_before_anything_is_measured() -> None:
    found = CliRunner().invoke(app, ["bench", "--out", "bars.txt"])
    assert found.exit_code == 2 and "no picture" in found.output
