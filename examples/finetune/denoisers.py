"""The models that can be trained, each behind one call: what velocity does it predict for a noisy picture at time t?"""

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn

SHORTEST_PROMPT, LONGEST_PROMPT = 8, 60  # real tokens; what a model is given is padded to `prompt_tokens`

TINY_FLUX = {
    "in_channels": 12,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
TINY_QWEN_IMAGE = {
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 3,
    "num_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "axes_dims_rope": (8, 12, 12),
}
TINY_UNET = {
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}


class Prompts(NamedTuple):
    """What a text encoder makes of a batch of prompts."""

    tokens: Tensor  # (batch, prompt_tokens, width); 0 where padded
    keep: Tensor  # (batch, prompt_tokens), true where there is a word
    pooled: Tensor  # (batch, pooled width)


class Text:
    """Stands in for a text encoder: every label has a prompt of its own length, with fixed random embeddings, the same in every run."""

    def __init__(self, labels: list[str], prompt_tokens: int, width: int, pooled: int) -> None:
        seeds = [zlib.crc32(label.encode()) for label in labels]
        drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
        lengths = torch.tensor([SHORTEST_PROMPT + seed % (LONGEST_PROMPT - SHORTEST_PROMPT) for seed in seeds])
        self.keep = torch.arange(prompt_tokens) < lengths[:, None]
        self.tokens = torch.stack([torch.randn(prompt_tokens, width, generator=g) for g in drawn]) * self.keep[..., None]
        self.pooled = torch.stack([torch.randn(pooled, generator=g) for g in drawn])

    def of(self, labels: Tensor, like: Tensor) -> Prompts:
        at = labels.cpu()
        return Prompts(self.tokens[at].to(like), self.keep[at].to(like.device), self.pooled[at].to(like))


class Denoiser:
    """A model and the shape of what it is given."""

    def __init__(self, model: nn.Module, labels: list[str], prompt_tokens: int, width: int, pooled: int) -> None:
        self.model, self.text = model, Text(labels, prompt_tokens, width, pooled)

    def velocity(self, noisy: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """noisy = (1 - t) * picture + t * noise, (batch, channels, height, width); gives noise - picture."""
        raise NotImplementedError


def to_patches(noisy: Tensor, channels: int) -> Tensor:
    """(batch, channels, height, width) -> (batch, patches of 2 x 2, 4 * channels)."""
    if noisy.shape[1] != channels or noisy.shape[2] % 2 or noisy.shape[3] % 2:
        raise SystemExit(f"this model takes {channels} channels and an even size, got {tuple(noisy.shape)}: give a vae, or another image_size")
    return nn.functional.pixel_unshuffle(noisy, 2).flatten(2).transpose(1, 2)


def from_patches(patches: Tensor, height: int, width: int) -> Tensor:
    return nn.functional.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (height // 2, width // 2)), 2)


class Flux(Denoiser):
    """Patches of 2 x 2 are the tokens, as in Flux itself, which does not mask padded prompts."""

    def __init__(self, model: Any, labels: list[str], prompt_tokens: int) -> None:
        super().__init__(model, labels, prompt_tokens, model.config.joint_attention_dim, model.config.pooled_projection_dim)

    def velocity(self, noisy: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        batch, _, height, width = noisy.shape
        places = torch.zeros(height // 2, width // 2, 3, device=noisy.device)
        places[..., 1] = torch.arange(height // 2, device=noisy.device)[:, None]
        places[..., 2] = torch.arange(width // 2, device=noisy.device)
        text = self.text.of(labels, noisy)
        guidance = torch.ones(batch, device=noisy.device, dtype=noisy.dtype) if self.model.config.guidance_embeds else None
        out = self.model(
            hidden_states=to_patches(noisy, self.model.config.in_channels // 4),
            encoder_hidden_states=text.tokens,
            pooled_projections=text.pooled,
            timestep=t.to(noisy.dtype),
            guidance=guidance,
            img_ids=places.view(-1, 3),
            txt_ids=torch.zeros(text.tokens.shape[1], 3, device=noisy.device),
            return_dict=False,
        )[0]
        return from_patches(out, height, width)


class QwenImage(Denoiser):
    """Prompts are padded and masked: attention has no use for the padding, and tilewise leaves its tiles out."""

    def __init__(self, model: Any, labels: list[str], prompt_tokens: int) -> None:
        super().__init__(model, labels, prompt_tokens, model.config.joint_attention_dim, 1)

    def velocity(self, noisy: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        batch, _, height, width = noisy.shape
        text = self.text.of(labels, noisy)
        out = self.model(
            hidden_states=to_patches(noisy, self.model.config.in_channels // 4),
            encoder_hidden_states=text.tokens,
            encoder_hidden_states_mask=text.keep,
            timestep=t.to(noisy.dtype),
            img_shapes=[[(1, height // 2, width // 2)]] * batch,
            return_dict=False,
        )[0]
        return from_patches(out, height, width)


class UNet(Denoiser):
    """The UNets of Stable Diffusion and SDXL."""

    def __init__(self, model: Any, labels: list[str], prompt_tokens: int) -> None:
        width = model.config.cross_attention_dim
        self.is_sdxl = model.config.addition_embed_type == "text_time"
        pooled = model.config.projection_class_embeddings_input_dim - 6 * model.config.addition_time_embed_dim if self.is_sdxl else 1
        super().__init__(model, labels, prompt_tokens, width if isinstance(width, int) else width[0], pooled)

    def velocity(self, noisy: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        text = self.text.of(labels, noisy)
        size = torch.tensor([*noisy.shape[2:], 0, 0, *noisy.shape[2:]], device=noisy.device, dtype=noisy.dtype).expand(len(noisy), 6)
        added = {"text_embeds": text.pooled, "time_ids": size} if self.is_sdxl else None
        return self.model(noisy, t * 1000, text.tokens, added_cond_kwargs=added, return_dict=False)[0]


KINDS = {"FluxTransformer2DModel": Flux, "QwenImageTransformer2DModel": QwenImage, "UNet2DConditionModel": UNet}
TINY = {
    "tiny-flux": ("FluxTransformer2DModel", TINY_FLUX),
    "tiny-qwen-image": ("QwenImageTransformer2DModel", TINY_QWEN_IMAGE),
    "tiny-sdxl-unet": ("UNet2DConditionModel", TINY_UNET),
}


def denoiser(name: str, labels: list[str], prompt_tokens: int) -> Denoiser:
    """One of the tiny models, with random weights, or the model saved in a folder."""
    if name in TINY:
        kind, config = TINY[name]
        model = getattr(diffusers, kind)(**config)
    else:
        if not (Path(name) / "config.json").is_file():
            raise SystemExit(f"model: {name!r} is neither {', '.join(TINY)} nor a folder that diffusers saved")
        model = diffusers.AutoModel.from_pretrained(name)
    found = KINDS.get(type(model).__name__)
    if found is None:
        raise SystemExit(f"model: {type(model).__name__} cannot be trained here; allowed are {', '.join(KINDS)}")
    return found(model, labels, prompt_tokens)


class Latents:
    """Pictures as the model sees them: pixels, or what a VAE makes of them."""

    def __init__(self, folder: str | None, device: torch.device, dtype: torch.dtype) -> None:
        self.vae: Any = None if folder is None else diffusers.AutoencoderKL.from_pretrained(folder).to(device, dtype).eval().requires_grad_(False)
        config = None if self.vae is None else self.vae.config
        self.shift = 0.0 if config is None or config.shift_factor is None else config.shift_factor
        self.scale = 1.0 if config is None else config.scaling_factor

    def of(self, images: Tensor) -> Tensor:
        return images if self.vae is None else (self.vae.encode(images).latent_dist.mode() - self.shift) * self.scale

    def to_images(self, latents: Tensor) -> Tensor:
        return latents if self.vae is None else self.vae.decode(latents / self.scale + self.shift, return_dict=False)[0]
