"""Diffusion transformers: diffusers' own classes with random weights, at real widths and few layers, or tiny."""

from typing import Any

import torch
from torch import Tensor

from tilewise.tools.bench_models.workload import Scale, Workload


def make(scale: Scale, name: str, **settings: Any) -> Any:
    import diffusers

    with scale.building():
        return getattr(diffusers, name)(**settings).to(scale.dtype)


def runs(scale: Scale, model: Any, **inputs: Any) -> Workload:
    return Workload(model, lambda turn: model(**inputs, return_dict=False)[0])


def heads(scale: Scale, count: int = 24) -> dict[str, Any]:
    return scale.pick({"num_attention_heads": count, "attention_head_dim": 128}, {"num_attention_heads": 4, "attention_head_dim": 64})


def axes(scale: Scale) -> tuple[int, int, int]:
    """How rotary embeddings share out the head dim."""
    return scale.pick((16, 56, 56), (8, 28, 28))


def kept(scale: Scale, lengths: list[int], most: int) -> Tensor:
    """(batch, tokens): 1 where there is text, 0 where it is padded."""
    return (torch.arange(most)[None] < torch.tensor(lengths)[:, None]).to(scale.device)


def flux(scale: Scale) -> Workload:
    side, text, width = scale.pick((64, 512, 4096), (16, 64, 128))
    layers = scale.pick({"num_layers": 2, "num_single_layers": 4}, {"num_layers": 1, "num_single_layers": 2})
    model = make(
        scale, "FluxTransformer2DModel", joint_attention_dim=width, pooled_projection_dim=768, axes_dims_rope=axes(scale), **heads(scale), **layers
    )  # 1024 px are 64 x 64 tokens
    return runs(
        scale,
        model,
        hidden_states=scale.noise(1, side * side, 64),
        encoder_hidden_states=scale.noise(1, text, width),
        pooled_projections=scale.noise(1, 768),
        timestep=torch.ones(1, device=scale.device, dtype=scale.dtype),
        img_ids=torch.zeros(side * side, 3, device=scale.device),
        txt_ids=torch.zeros(text, 3, device=scale.device),
    )


def sd3(scale: Scale) -> Workload:
    """Stable Diffusion 3.5 medium's widths, 1024 px: 4096 tokens and 333 of text, head dim 64."""
    side, text, width, count = scale.pick((128, 333, 4096, 24), (32, 48, 128, 4))
    model = make(
        scale,
        "SD3Transformer2DModel",
        sample_size=side,
        num_layers=scale.pick(6, 2),
        attention_head_dim=64,
        num_attention_heads=count,
        joint_attention_dim=width,
        caption_projection_dim=64 * count,
        pooled_projection_dim=256,
        pos_embed_max_size=scale.pick(384, 32),
        qk_norm="rms_norm",
    )
    return runs(
        scale,
        model,
        hidden_states=scale.noise(2, 16, side, side),
        encoder_hidden_states=scale.noise(2, text, width),
        pooled_projections=scale.noise(2, 256),
        timestep=torch.ones(2, device=scale.device, dtype=scale.dtype),
    )


def qwenimage(scale: Scale) -> Workload:
    """1024 px, two prompts of different lengths."""
    side, width, text, lengths = scale.pick((64, 3584, 512, [512, 130]), (16, 128, 64, [64, 20]))
    model = make(scale, "QwenImageTransformer2DModel", num_layers=scale.pick(4, 2), joint_attention_dim=width, axes_dims_rope=axes(scale), **heads(scale))
    return runs(
        scale,
        model,
        hidden_states=scale.noise(2, side * side, 64),
        encoder_hidden_states=scale.noise(2, text, width),
        encoder_hidden_states_mask=kept(scale, lengths, text),
        timestep=torch.ones(2, device=scale.device, dtype=scale.dtype),
        img_shapes=[[(1, side, side)]] * 2,
    )


def wan(scale: Scale) -> Workload:
    """Wan 1.3B's widths, 480 x 832, 81 frames: 21 x 30 x 52 tokens."""
    video, text, width = scale.pick(((21, 60, 104), 512, 4096), ((3, 16, 16), 32, 128))
    sizes = scale.pick({"num_layers": 4, "ffn_dim": 8960}, {"num_layers": 2, "ffn_dim": 512})
    model = make(scale, "WanTransformer3DModel", text_dim=width, **heads(scale, 12), **sizes)
    return runs(
        scale, model, hidden_states=scale.noise(1, 16, *video), timestep=torch.ones(1, device=scale.device), encoder_hidden_states=scale.noise(1, text, width)
    )


def hunyuanvideo(scale: Scale) -> Workload:
    """Two videos of 9 x 30 x 52 tokens with prompts of different lengths."""
    video, width, text, lengths = scale.pick(((9, 60, 104), 4096, 256, [77, 200]), ((3, 16, 16), 128, 64, [20, 50]))
    layers = scale.pick({"num_layers": 2, "num_single_layers": 2}, {"num_layers": 1, "num_single_layers": 1})
    settings = {"num_refiner_layers": 1, "guidance_embeds": False, "text_embed_dim": width, "pooled_projection_dim": 768, "rope_axes_dim": axes(scale)}
    model = make(scale, "HunyuanVideoTransformer3DModel", **heads(scale), **layers, **settings)
    return runs(
        scale,
        model,
        hidden_states=scale.noise(2, 16, *video),
        timestep=torch.ones(2, device=scale.device),
        encoder_hidden_states=scale.noise(2, text, width),
        encoder_attention_mask=kept(scale, lengths, text).to(scale.dtype),
        pooled_projections=scale.noise(2, 768),
    )
