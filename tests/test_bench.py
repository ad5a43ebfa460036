"""The benchmark a user runs: what it counts, what it prints and draws."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewise.tools import bench
from tilewise_cli.app import app
from tilewise_cli.terminal import console


def test_it_measures_prints_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TURNS", 1)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(console, "_width", 200)  # made with the width of before
    picture = tmp_path / "pictures" / "bars.png"
    line = ["bench", "--length", "64", "--heads", "2", "--head-dim", "8", "--device", "cpu", "--out", str(picture)]
    titles = [work.title for work in bench.works(64, 2, torch.device("cpu"))]
    printed = CliRunner().invoke(app, line).stdout
    assert all(title in printed for title in titles) and f"bars: {picture}" in printed.replace("\n", " ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    assert [*found["flop_per_s"]] == titles and found["heads"] == 2 and found["picture"] == str(picture)
    assert found["flop_per_s"]["full"]["tilewise"]["backward"] > 0 and [*found["flop_per_s"]["full"]] == ["tilewise", "torch SDPA"]


def measured(rates: dict[str, dict[str, bench.Rate]]) -> bench.Measured:
    return bench.Measured("a machine", "float32", 64, 1, 8, rates)


NOTHING = bench.Rate(None, None)


def test_who_ran_nothing_has_no_column() -> None:
    found = measured({"full": {"tilewise": bench.Rate(3.1e9, 2e9), "torch SDPA": bench.Rate(2e9, None), "torch flex": NOTHING}})
    assert found.peers == ["tilewise", "torch SDPA"] and [str(c.header) for c in bench.table(found).columns[1:]] == found.peers


@pytest.mark.parametrize(("rate", "unit"), [(6.1e14, "TFLOP/s"), (1.5e12, "TFLOP/s"), (4.2e11, "GFLOP/s"), (3e6, "MFLOP/s"), (10.0, "MFLOP/s")])
def test_the_unit_fits(rate: float, unit: str) -> None:
    found = measured({"full": {"tilewise": bench.Rate(rate, rate / 2), "torch SDPA": NOTHING, "torch flex": NOTHING}})
    assert found.unit[0] == unit and unit in str(bench.table(found).columns[0].header)


def test_pairs_are_counted() -> None:
    assert bench.allowed_pairs(None, 50, torch.device("cpu")) == 2500
    assert bench.allowed_pairs(lambda b, h, q, kv: q >= kv, 50, torch.device("cpu")) == 50 * 51 // 2


def test_a_peer_that_cannot_leaves_its_cell_empty() -> None:
    assert bench.shown(NOTHING, 1e12) == "-"
    assert bench.shown(bench.Rate(512.4e12, None), 1e12) == "512 / -"
    assert bench.shown(bench.Rate(51.24e9, 5.124e9), 1e9) == "51 / 5.1"


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_device_that_is_not_there_is_said_to_be(command: str) -> None:
    found = CliRunner().invoke(app, [command, "--device", "cuba"])
    assert found.exit_code == 2 and "torch cannot use the device 'cuba' here" in found.output


def test_a_name_that_is_no_pictures_is_refused_before_anything_is_measured() -> None:
    found = CliRunner().invoke(app, ["bench", "--out", "bars.txt"])
    assert found.exit_code == 2 and "no picture" in found.output
