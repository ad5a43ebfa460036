"""Flow-matching training of a diffusers model, with the attention mechanism that config.json names.

    python examples/finetune/train.py examples/finetune/config.json

Run it again to go on from its last checkpoint; `--restart` begins anew.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
from denoisers import Denoiser, Latents, denoiser
from pictures import Pictures, pictures, save_row
from run_folder import RunFolder, smoothed
from settings import Settings, read
from torch import Tensor

import tilewise as tw
from tilewise.integrations import configure

EULER_STEPS = 16


class Run(NamedTuple):
    """What a training step needs."""

    settings: Settings
    data: Pictures
    latents: Latents
    learner: Denoiser
    optimizer: torch.optim.Optimizer


def start(settings: Settings) -> Run:
    """A model that has learned nothing yet, and what it will learn from."""
    device, dtype = settings.torch_device, settings.torch_dtype
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    data = pictures(settings.images, settings.image_size)
    latents = Latents(settings.vae, device, dtype)
    torch.manual_seed(settings.seed)  # the weights of a model that starts anew
    learner = denoiser(settings.model, data.labels, settings.prompt_tokens)
    learner.model.to(device).train()
    if dtype != torch.float32:
        learner.model.to(dtype)
    if settings.gradient_checkpointing:
        learner.model.enable_gradient_checkpointing()
    return Run(settings, data, latents, learner, torch.optim.AdamW(learner.model.parameters(), lr=settings.learning_rate, weight_decay=0.0))


def train(settings: Settings, restart: bool = False) -> list[float]:
    """The losses of all steps, those before a checkpoint included."""
    folder = RunFolder(Path(settings.output))
    run = start(settings)
    model, labels = run.learner.model, run.data.labels
    first = 0 if restart else folder.resume(model, run.optimizer)
    folder.say(f"{settings.model} on {settings.torch_device}, {data_name(settings)}, labels {', '.join(labels)}; steps {first} to {settings.steps}")

    with configure(model, {"attention_mechanism": settings.attention_mechanism}):
        began = time.perf_counter()
        for step in range(first, settings.steps):
            if step == first:
                with tw.watch(model) as watched:
                    loss = one_step(run, step)
                folder.say(f"\nattention_mechanism {settings.attention_mechanism!r}, seen in the first step:\n{watched}\n")
            else:
                loss = one_step(run, step)
            folder.losses.append(loss)
            done = step + 1
            if done % settings.log_every == 0 or done == settings.steps:
                each = (time.perf_counter() - began) / (done - first)
                folder.say(
                    f"step {done:5d}/{settings.steps}  loss {smoothed(folder.losses)[-1]:.4f}  {1000 * each:.0f} ms a step, "
                    f"{each * (settings.steps - done):.0f} s to go"
                )
            if done % settings.sample_every == 0 or done == settings.steps:
                save_row(sample(run), labels, folder.path / f"samples-{done:05d}.png")
            if done % settings.checkpoint_every == 0 or done == settings.steps:
                folder.save(model, run.optimizer)
                folder.plot()
    folder.say(f"results are in {folder.path}")
    return folder.losses


def data_name(settings: Settings) -> str:
    return "drawn shapes" if settings.images is None else f"pictures of {settings.images}"


def one_step(run: Run, step: int) -> float:
    """One batch, all of whose randomness comes from (seed, step): a run that is resumed draws what it would have drawn."""
    settings, data, latents, learner, optimizer = run
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    images, labels = data.batch(settings.batch_size, generator)
    clean = latents.of(images.to(settings.torch_device, settings.torch_dtype))
    noise = torch.randn(clean.shape, generator=generator).to(clean)
    t = torch.rand(len(clean), generator=generator).to(clean)
    at = t.view(-1, 1, 1, 1)
    predicted = learner.velocity((1 - at) * clean + at * noise, t, labels)
    loss = (predicted - (noise - clean)).float().square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def sample(run: Run) -> Tensor:
    """From noise to a picture of each label, by Euler steps from t = 1 to 0."""
    settings, data, latents, learner, _ = run
    generator = torch.Generator().manual_seed(settings.seed)
    labels = torch.arange(len(data.labels))
    like, _ = data.batch(1, torch.Generator().manual_seed(0))
    shape = latents.of(like.to(settings.torch_device, settings.torch_dtype)).shape[1:]
    x = torch.randn(len(labels), *shape, generator=generator).to(settings.torch_device, settings.torch_dtype)
    learner.model.eval()
    for k in range(EULER_STEPS):
        t = torch.full((len(labels),), 1 - k / EULER_STEPS, device=x.device, dtype=x.dtype)
        x = x - learner.velocity(x, t, labels) / EULER_STEPS
    learner.model.train()
    return latents.to_images(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Flow-matching training of a diffusers model on tilewise.")
    parser.add_argument("config", type=Path, help="the settings, as JSON")
    parser.add_argument("--restart", action="store_true", help="begin anew, though there is a checkpoint")
    given = parser.parse_args()
    try:
        train(read(given.config), given.restart)
    except tw.TilewiseError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
