"""Tiny Flux, Z-Image and SDXL with random weights, their text encoders and tokenizers, and eight pictures with captions: python weights.py FOLDER

Run by run.py in SimpleTuner's environment.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel, UNet2DConditionModel
from PIL import Image
from simpletuner.helpers.models.z_image.transformer import ZImageTransformer2DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def main(folder: Path) -> None:
    torch.manual_seed(0)
    pictures(folder / "data")
    flux(folder / "flux")
    z_image(folder / "z_image")
    sdxl(folder / "sdxl")


def save(folder: Path, pipeline: str, **parts: tuple[str, Any]) -> None:
    """A pipeline's folder: every part as (the library it comes from, the part)."""
    for name, (_, part) in parts.items():
        part.save_pretrained(folder / name)
    index = {name: [library, type(part).__name__] for name, (library, part) in parts.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, "_diffusers_version": "0.40.0", **index}))


def vae(latents: int, **more: Any) -> AutoencoderKL:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4, "block_out_channels": (8, 8, 8, 8)}
    return AutoencoderKL(**blocks, layers_per_block=1, latent_channels=latents, norm_num_groups=4, sample_size=128, **more)


def flux_vae() -> AutoencoderKL:
    return vae(16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False)


def flux(folder: Path) -> None:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.02)
    words = t5_tokenizer(folder / "scratch")
    save(
        folder,
        "FluxPipeline",
        scheduler=("diffusers", FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)),
        text_encoder=("transformers", CLIPTextModel(clip_config(layers=2))),
        text_encoder_2=("transformers", t5(len(words))),
        tokenizer=("transformers", clip_tokenizer(folder / "scratch")),
        tokenizer_2=("transformers", words),
        transformer=("diffusers", transformer),
        vae=("diffusers", flux_vae()),
    )


def z_image(folder: Path) -> None:
    """SimpleTuner's own class. Its text is padded, so its attention has masks."""
    words = chat_tokenizer()
    encoder = Qwen3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    transformer = ZImageTransformer2DModel(dim=128, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=[8, 12, 12])
    for parameter in transformer.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
        elif not torch.isfinite(parameter).all():  # some are left as memory had them
            torch.nn.init.zeros_(parameter)
    save(
        folder,
        "ZImagePipeline",
        scheduler=("diffusers", FlowMatchEulerDiscreteScheduler(shift=3.0)),
        text_encoder=("transformers", Qwen3ForCausalLM(encoder)),
        tokenizer=("transformers", words),
        transformer=("diffusers", transformer),
        vae=("diffusers", flux_vae()),
    )


def sdxl(folder: Path) -> None:
    unet = UNet2DConditionModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=32 + 6 * 8,
        transformer_layers_per_block=(1, 1),
        norm_num_groups=8,
    )
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "timestep_spacing": "leading", "steps_offset": 1}
    save(
        folder,
        "StableDiffusionXLPipeline",
        scheduler=("diffusers", EulerDiscreteScheduler(**schedule)),
        text_encoder=("transformers", CLIPTextModel(clip_config(layers=3))),
        text_encoder_2=("transformers", CLIPTextModelWithProjection(clip_config(layers=3))),
        tokenizer=("transformers", clip_tokenizer(folder / "scratch")),
        tokenizer_2=("transformers", clip_tokenizer(folder / "scratch")),
        unet=("diffusers", unet),
        vae=("diffusers", vae(4, scaling_factor=0.13025)),
    )


# -- text ------------------------------------------------------------------------------------------------------------


def clip_tokenizer(scratch: Path) -> CLIPTokenizer:
    """Bytes, and no merges."""
    scratch.mkdir(parents=True, exist_ok=True)
    vocabulary = [*BYTES, *[c + "</w>" for c in BYTES], "<|startoftext|>", "<|endoftext|>"]
    (scratch / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(vocabulary)}))
    (scratch / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(scratch / "vocab.json"), str(scratch / "merges.txt"), model_max_length=77)


def clip_config(layers: int) -> CLIPTextConfig:
    size = 2 * len(BYTES) + 2
    return CLIPTextConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=32,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
    )


def t5_tokenizer(scratch: Path) -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0), *[(c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz0123456789.,-'"]]
    words = Tokenizer(models.Unigram(pieces, unk_id=2))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    (scratch / "t5").mkdir(parents=True, exist_ok=True)
    words.save(str(scratch / "t5" / "tokenizer.json"))
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 0, "model_max_length": 512}
    (scratch / "t5" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5TokenizerFast", **names}))
    return T5TokenizerFast.from_pretrained(scratch / "t5")


def t5(vocabulary: int) -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=vocabulary + 10, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"))


def chat_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    words = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate([*special, *BYTES])}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"], "model_max_length": 512}
    found = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    found.chat_template = "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    return found


# -- data ------------------------------------------------------------------------------------------------------------


def pictures(folder: Path) -> None:
    """Squares on plain grounds. The captions are of different lengths, so that batches are padded."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for n, name in enumerate(["red", "green", "blue", "gray", "pink", "teal", "gold", "plum"]):
        pixels = np.zeros((256, 256, 3), np.uint8)
        pixels[:] = random.integers(0, 255, 3)
        pixels[64:192, 64:192] = random.integers(0, 255, 3)
        Image.fromarray(pixels).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a {name} square" + " on a plain ground" * (n % 3))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
