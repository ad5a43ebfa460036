"""The training example: it learns, resumes, and gives the same curve whatever computes its attention."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from tests.support.compare import engine_of

FOLDER = Path(__file__).parents[2] / "examples" / "finetune"
MECHANISMS = ("flex", "native", "math")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """examples/finetune/train.py, imported as it is when run: with its own folder on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("train", "compare", "settings", "pictures", "denoisers", "run_folder"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import train

    return train


def run(example: Any, output: Path, **given: Any) -> list[float]:
    config = json.loads((FOLDER / "config.json").read_text()) | {"output": str(output), "threads": None} | given
    path = output.with_suffix(".json")
    path.write_text(json.dumps(config))
    return example.train(example.read(path))


def test_one_curve_for_every_mechanism(example: Any, tmp_path: Path) -> None:
    """After some steps roundings have been multiplied by training itself; the first steps are near to the last digit."""
    curves = {name: run(example, tmp_path / name, attention_mechanism=name, steps=25, batch_size=8) for name in MECHANISMS}
    for name, curve in curves.items():
        torch.testing.assert_close(curve[:3], curves["native"][:3], rtol=1e-6, atol=0)
        torch.testing.assert_close(curve, curves["native"], rtol=1e-3, atol=0)
        assert sum(curve[-5:]) < 0.6 * sum(curve[:5])
        log = (tmp_path / name / "log.txt").read_text()
        assert f"3 of 3 attention layers reached tilewise (calls: {engine_of(name)} 3)" in log and "step    25/25" in log
        with Image.open(tmp_path / name / "samples-00025.png") as samples:
            assert samples.size == (3 * 16 * 4, 16 * 4 + 20)
            captions = np.asarray(samples)[16 * 4 :].min(-1) < 128
            assert captions.any() and all(part.any() for part in np.split(captions, 3, axis=1))  # a label below each picture
        assert (tmp_path / name / "loss.png").stat().st_size > 0
    other = run(example, tmp_path / "other", attention_mechanism="native", steps=3, batch_size=8, seed=1)
    assert abs(other[0] / curves["native"][0] - 1) > 1e-3  # the tolerance tells runs apart


def test_padded_prompts_are_skipped_and_change_nothing(example: Any, tmp_path: Path) -> None:
    """More padding is no other prompt, and costs no tiles; without the mask it would be seen."""
    given = {"model": "tiny-qwen-image", "image_size": 16, "steps": 3, "batch_size": 2}
    curves = {
        (name, tokens): run(example, tmp_path / f"{name}{tokens}", attention_mechanism=name, prompt_tokens=tokens, **given)
        for name, tokens in (("flex", 320), ("native", 320), ("native", 64))
    }
    torch.testing.assert_close(curves["flex", 320], curves["native", 320], rtol=1e-5, atol=0)
    torch.testing.assert_close(curves["native", 64], curves["native", 320], rtol=1e-5, atol=0)
    log = (tmp_path / "flex320" / "log.txt").read_text()
    assert "key_padding" in log and "33.3%" in log  # the second of three tiles of keys is padding throughout


def test_the_comparison_with_native(example: Any, tmp_path: Path) -> None:
    config = json.loads((FOLDER / "padded_prompts.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"image_size": 16, "batch_size": 1, "prompt_tokens": 320}))
    import compare

    header, native, flex = compare.compare(example.read(path), path, turns=1)
    assert header == ["attention", "tiles skipped", "a training step", "memory of a step"]
    assert native[:2] == ["native", "0%"] and flex[:2] == ["flex", "33%"]
    for row in (native, flex):
        assert float(row[2].removesuffix(" ms")) > 0 and float(row[3].removesuffix(" MiB")) > 0


def test_a_run_that_is_resumed_is_the_same_run(example: Any, tmp_path: Path) -> None:
    whole = run(example, tmp_path / "whole", steps=6, batch_size=4)
    run(example, tmp_path / "parts", steps=3, batch_size=4)
    assert run(example, tmp_path / "parts", steps=6, batch_size=4) == whole


def test_an_sdxl_unet_a_vae_a_folder_of_pictures_and_checkpointed_activations(example: Any, tmp_path: Path) -> None:
    for label, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        Image.new("RGB", (40, 30), colour).save(tmp_path / "pictures" / label / "one.png")
    torch.manual_seed(0)
    AutoencoderKL(block_out_channels=(8,), latent_channels=3, norm_num_groups=4, sample_size=16).save_pretrained(tmp_path / "vae")
    losses = run(
        example,
        tmp_path / "run",
        model="tiny-sdxl-unet",
        vae=str(tmp_path / "vae"),
        images=str(tmp_path / "pictures"),
        steps=3,
        batch_size=2,
        gradient_checkpointing=True,
    )
    log = (tmp_path / "run" / "log.txt").read_text()
    assert len(losses) == 3 and "labels blue, red" in log and "bypass" not in log
    again = run(example, tmp_path / "second", model=str(tmp_path / "run" / "checkpoint"), vae=str(tmp_path / "vae"), steps=1, batch_size=2)
    assert len(again) == 1  # a folder that diffusers saved is a model to start from


def test_from_the_command_line(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"steps": 2, "batch_size": 2, "output": str(tmp_path / "run")}))
    ran = subprocess.run([sys.executable, str(FOLDER / "train.py"), str(path)], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0 and "results are in" in ran.stdout, ran.stderr


def test_mistakes_are_told(example: Any, tmp_path: Path) -> None:
    import tilewise as tw

    with pytest.raises(tw.BackendError, match="unknown attention_mechanism 'flx'"):
        run(example, tmp_path / "a", attention_mechanism="flx")
    with pytest.raises(SystemExit, match="unknown settings stepps"):
        run(example, tmp_path / "b", stepps=3)
    with pytest.raises(SystemExit, match="steps must be a whole number"):
        run(example, tmp_path / "c", steps=0)
    with pytest.raises(SystemExit, match="neither tiny-flux, tiny-qwen-image, tiny-sdxl-unet nor a folder"):
        run(example, tmp_path / "d", model="nowhere")
    with pytest.raises(SystemExit, match="holds no pictures"):
        run(example, tmp_path / "e", images=str(tmp_path))
