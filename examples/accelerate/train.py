"""A training script like those of diffusers, for `accelerate launch`: a tiny Flux transformer or UNet, random weights, native attention or tilewise.

    accelerate launch examples/accelerate/train.py --model flux --attention tilewise

Two lines are tilewise's: register(), and set_attention_backend(). A UNet calls torch's SDPA itself, so it is routed instead.
The last line it prints is JSON: the loss of every step, and how many attention calls each engine served.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tilewise

SIDE, TEXT = 16, 24  # latents of SIDE x SIDE, captions of TEXT tokens


class Pictures(Dataset[dict[str, Tensor]]):
    """Latents, captions and noise, the same at every run."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        shapes = {"latents": (4, SIDE, SIDE), "noise": (4, SIDE, SIDE), "text": (TEXT, 32), "pooled": (8,)}
        return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()} | {"time": torch.rand((), generator=random)}


def make_model(name: str) -> Any:
    if name == "flux":
        return FluxTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=8,
            axes_dims_rope=(4, 4, 8),
        )
    return UNet2DConditionModel(
        sample_size=SIDE,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    )


def velocity(model: nn.Module, is_flux: bool, noisy: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """What the model says of noisy latents, in the latents' shape."""
    if not is_flux:
        return torch.as_tensor(model(noisy, batch["time"] * 1000, batch["text"]).sample)
    rows, columns = (t.flatten() for t in torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij"))
    places = torch.stack([torch.zeros_like(rows), rows, columns], -1).to(noisy)
    out = model(
        hidden_states=noisy.flatten(2).transpose(1, 2),
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
        timestep=batch["time"],
        img_ids=places,
        txt_ids=torch.zeros(TEXT, 3).to(noisy),
    ).sample
    return torch.as_tensor(out).transpose(1, 2).reshape(noisy.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=["flux", "unet"], default="flux")
    parser.add_argument("--attention", choices=["native", "tilewise"], default="tilewise")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save", type=Path, help="Folder for the state after the last step.")
    parser.add_argument("--resume", type=Path, help="Folder of a state to begin with.")
    given = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = make_model(given.model)
    model.enable_gradient_checkpointing()
    if given.attention == "tilewise" and given.model == "flux":
        tilewise.integrations.diffusers.register()
        model.set_attention_backend("tilewise")
    elif given.attention == "tilewise":
        tilewise.integrations.route(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: DataLoader[dict[str, Tensor]] = DataLoader(Pictures(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if given.resume is not None:
        accelerator.load_state(str(given.resume))

    losses = []
    with tilewise.watch(model) as watched:
        for _, batch in zip(range(given.steps), loader, strict=False):
            with accelerator.accumulate(model):
                time = batch["time"].view(-1, 1, 1, 1)
                noisy = (1 - time) * batch["latents"] + time * batch["noise"]
                found = velocity(model, given.model == "flux", noisy, batch)
                loss = nn.functional.mse_loss(found, batch["noise"] - batch["latents"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
    if given.save is not None:
        accelerator.save_state(str(given.save))
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "served": watched.engines, "processes": accelerator.num_processes}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
