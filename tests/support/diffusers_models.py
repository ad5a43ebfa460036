"""Tiny diffusers models with random weights: how each is made and called. Two samples; where a model takes text lengths, they differ."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.support.compare import normal, seeded

BATCH, TEXT = 2, 9
LENGTHS = torch.tensor([[TEXT], [4]])
TEXT_MASK = torch.arange(TEXT) < LENGTHS  # true: a real token

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Tiny:
    """How to make and to call a model, and what is known of it."""

    name: str
    kind: str
    config: dict[str, Any]
    inputs: Callable[[torch.dtype], Inputs]
    calls_sdpa: bool = False  # in some of its layers at least
    masks: tuple[str, ...] = ("none",)  # those it passes, as watch names them
    unrouted: tuple[str, ...] = ()  # layers that have no softmax attention
    stronger: float = 1.0  # attention's weights are multiplied by this, where it would hardly matter else

    def make(self) -> nn.Module:
        with seeded():
            model = getattr(diffusers, self.kind)(**self.config)
            for name, parameter in model.named_parameters():  # some layers start at 0, behind which nothing can be seen
                if parameter.abs().max() == 0:
                    nn.init.normal_(parameter, std=0.2)
                if "attn" in name:
                    parameter.data *= self.stronger
        return model.float()

    def call(self, model: nn.Module, dtype: torch.dtype) -> Tensor:
        out = model(**self.inputs(dtype), return_dict=False)[0]
        return torch.cat([t.flatten() for t in out]) if isinstance(out, list) else out

    def __str__(self) -> str:
        return self.name


def steps(dtype: torch.dtype, highest: float = 1.0) -> Tensor:
    return torch.tensor([0.3, 0.7], dtype=dtype) * highest


def text(width: int, dtype: torch.dtype) -> Tensor:
    return normal(BATCH, TEXT, width, seed=1, dtype=dtype)


def places(rows: int, axes: int) -> Tensor:
    """Positions of the tokens of an image four wide, as (row, column) in the last two of the axes."""
    ids = torch.zeros(rows, axes)
    ids[:, -2], ids[:, -1] = torch.arange(rows) // 4, torch.arange(rows) % 4
    return ids


def flux(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": normal(BATCH, 16, 4, seed=0, dtype=dtype),
        "encoder_hidden_states": text(32, dtype),
        "timestep": steps(dtype),
        "pooled_projections": normal(BATCH, 8, seed=2, dtype=dtype),
        "img_ids": places(16, 3),
        "txt_ids": places(TEXT, 3),
    }


def flux2(dtype: torch.dtype) -> Inputs:
    given = flux(dtype) | {"img_ids": places(16, 4), "txt_ids": places(TEXT, 4), "guidance": steps(dtype)}
    del given["pooled_projections"]
    return given


def chroma(dtype: torch.dtype) -> Inputs:
    given = flux(dtype) | {"attention_mask": torch.cat([TEXT_MASK, torch.ones(BATCH, 16, dtype=torch.bool)], 1)}
    del given["pooled_projections"]
    return given


def wan(dtype: torch.dtype) -> Inputs:
    return {"hidden_states": normal(BATCH, 4, 2, 8, 8, seed=0, dtype=dtype), "timestep": torch.tensor([300, 700]), "encoder_hidden_states": text(16, dtype)}


def wan_image(dtype: torch.dtype) -> Inputs:
    return wan(dtype) | {"encoder_hidden_states_image": normal(BATCH, 7, 4, seed=3, dtype=dtype)}


def ltx(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": normal(BATCH, 2 * 4 * 4, 4, seed=0, dtype=dtype),
        "encoder_hidden_states": text(16, dtype),
        "timestep": steps(dtype, 1000),
        "encoder_attention_mask": TEXT_MASK.to(dtype),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def qwen(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": normal(BATCH, 16, 16, seed=0, dtype=dtype),
        "encoder_hidden_states": text(16, dtype),
        "timestep": steps(dtype),
        "encoder_hidden_states_mask": TEXT_MASK,
        "img_shapes": [[(1, 4, 4)]] * BATCH,
    }


def hunyuan(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": normal(BATCH, 4, 2, 4, 4, seed=0, dtype=dtype),
        "encoder_hidden_states": text(16, dtype),
        "timestep": steps(dtype, 1000),
        "encoder_attention_mask": TEXT_MASK.to(dtype),
        "pooled_projections": normal(BATCH, 8, seed=2, dtype=dtype),
        "guidance": steps(dtype, 1000),
    }


def z_image(dtype: torch.dtype) -> Inputs:
    return {
        "x": [normal(16, 1, 8, 8, seed=k, dtype=dtype) for k in range(BATCH)],
        "t": steps(dtype),
        "cap_feats": [normal(length, 16, seed=5 + k, dtype=dtype) for k, length in enumerate((40, 5))],
    }


def cosmos3(dtype: torch.dtype) -> Inputs:
    """One packed sequence: six tokens of text, causal, and four of an image, which see all."""
    words, tokens = 6, 4
    at = torch.arange(words, words + tokens)
    return {
        "input_ids": torch.arange(1, 1 + words),
        "text_indexes": torch.arange(words),
        "position_ids": torch.arange(words + tokens).expand(3, -1),
        "und_len": words,
        "sequence_length": words + tokens,
        "vision_tokens": [normal(1, 2, 1, 2, 2, seed=0, dtype=dtype)],
        "vision_token_shapes": [(1, 2, 2)],
        "vision_sequence_indexes": at,
        "vision_mse_loss_indexes": at,
        "vision_timesteps": torch.full((tokens,), 0.5, dtype=dtype),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }


def image_and_text(channels: int, width: int, **more: Callable[[torch.dtype], Any]) -> Callable[[torch.dtype], Inputs]:
    def inputs(dtype: torch.dtype) -> Inputs:
        return {
            "hidden_states": normal(BATCH, channels, 8, 8, seed=0, dtype=dtype),
            "encoder_hidden_states": text(width, dtype),
            "timestep": steps(dtype, 1000),
        } | {name: make(dtype) for name, make in more.items()}

    return inputs


def cogvideo(dtype: torch.dtype) -> Inputs:
    return {"hidden_states": normal(BATCH, 1, 4, 8, 8, seed=0, dtype=dtype), "encoder_hidden_states": text(8, dtype), "timestep": torch.tensor([300, 700])}


def mochi(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": normal(BATCH, 4, 2, 4, 4, seed=0, dtype=dtype),
        "encoder_hidden_states": text(16, dtype),
        "timestep": torch.tensor([300, 700]),
        "encoder_attention_mask": TEXT_MASK,
    }


def unet(dtype: torch.dtype) -> Inputs:
    return {
        "sample": normal(BATCH, 4, 8, 8, seed=0, dtype=dtype),
        "timestep": torch.tensor([300, 700]),
        "encoder_hidden_states": text(16, dtype),
        "encoder_attention_mask": TEXT_MASK.to(dtype),
    }


def sdxl(dtype: torch.dtype) -> Inputs:
    added = {"text_embeds": normal(BATCH, 16, seed=2, dtype=dtype), "time_ids": normal(BATCH, 6, seed=3, dtype=dtype)}
    return unet(dtype) | {"added_cond_kwargs": added}


JOINT = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 16,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}

DISPATCHED = [
    Tiny("flux", "FluxTransformer2DModel", JOINT | {"in_channels": 4, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)}, flux),
    Tiny("flux2", "Flux2Transformer2DModel", JOINT | {"in_channels": 4, "axes_dims_rope": (4, 4, 4, 4)}, flux2),
    Tiny(
        "chroma",
        "ChromaTransformer2DModel",
        JOINT | {"in_channels": 4, "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        chroma,
        masks=("token_padding(2, 1, 25, 25)",),
    ),
    Tiny(
        "wan, text",
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 64,
            "ffn_dim": 32,
            "num_layers": 1,
            "rope_max_seq_len": 32,
        },
        wan,
    ),
    Tiny(
        "wan, image",
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 64,
            "ffn_dim": 32,
            "num_layers": 1,
            "rope_max_seq_len": 32,
            "image_dim": 4,
            "added_kv_proj_dim": 24,
        },
        wan_image,
    ),
    Tiny(
        "ltx-video",
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 1,
            "caption_channels": 16,
        },
        ltx,
        masks=("none", "padding"),
    ),
    Tiny(
        "qwen-image",
        "QwenImageTransformer2DModel",
        {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        qwen,
        masks=("key_padding(2, 1, 1, 25)",),
    ),
    Tiny(
        "hunyuan-video",
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
        },
        hunyuan,
        calls_sdpa=True,
        masks=("padding", "tensor(2, 1, 9, 9)"),
    ),
    Tiny(
        "z-image",
        "ZImageTransformer2DModel",
        {
            "in_channels": 16,
            "dim": 16,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 1,
            "n_kv_heads": 1,
            "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4],
            "axes_lens": [256, 32, 32],
        },
        z_image,
        masks=("none", "padding"),
    ),
    Tiny(
        "cosmos3",
        "Cosmos3OmniTransformer",
        {
            "head_dim": 6,
            "hidden_size": 12,
            "intermediate_size": 24,
            "latent_channel": 2,
            "latent_patch_size": 1,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "patch_latent_dim": 2,
            "rope_axes_dim": [1, 1, 1],
            "vocab_size": 32,
        },
        cosmos3,
        masks=("causal", "none"),
    ),
]

DIRECT = [
    Tiny(
        "sd3",
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 8,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        image_and_text(4, 16, pooled_projections=lambda dtype: normal(BATCH, 8, seed=2, dtype=dtype)),
        True,
    ),
    Tiny(
        "pixart",
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "num_layers": 1,
            "cross_attention_dim": 16,
            "sample_size": 8,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        image_and_text(4, 16, encoder_attention_mask=TEXT_MASK.to, added_cond_kwargs=lambda dtype: {}),
        True,
        ("none", "padding"),
    ),
    Tiny(
        "cogvideox",
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 8,
            "num_layers": 1,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 1,
            "max_text_seq_length": TEXT,
        },
        cogvideo,
        True,
    ),
    Tiny(
        "sana",
        "SanaTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "num_layers": 1,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 8,
            "caption_channels": 8,
            "sample_size": 8,
        },
        image_and_text(4, 8, encoder_attention_mask=TEXT_MASK.to),
        True,
        ("padding",),
        ("transformer_blocks.0.attn1",),
    ),
    Tiny(
        "auraflow",
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
        image_and_text(4, 16),
        True,
        stronger=8.0,
    ),
    Tiny(
        "lumina2",
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (64, 32, 32),
            "cap_feat_dim": 16,
        },
        image_and_text(4, 16, encoder_attention_mask=lambda dtype: TEXT_MASK),
        True,
        ("none", "padding"),
    ),
    Tiny(
        "mochi",
        "MochiTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": TEXT,
        },
        mochi,
        True,
        ("none", "padding"),
    ),
    Tiny("sd unet", "UNet2DConditionModel", UNET | {"attention_head_dim": 2}, unet, True, ("none", "padding")),
    Tiny(
        "sdxl unet",
        "UNet2DConditionModel",
        UNET
        | {
            "attention_head_dim": (1, 2),
            "use_linear_projection": True,
            "transformer_layers_per_block": (1, 2),
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 64,
        },
        sdxl,
        True,
        ("none", "padding"),
    ),
]
