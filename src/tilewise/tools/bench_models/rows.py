"""The rows: which models there are, what is done with them, and with which attention."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.errors import InputError, meant
from tilewise.tools.bench_models import diffusion, language
from tilewise.tools.bench_models.workload import Scale, Workload

STEP, INFERENCE = "step", "inference"  # a training step, without the optimizer: forward and backward; inference: the forward alone, or generating

# Our name of an implementation -> its client's. What is compiled longest comes last, and is the last to be waited for.
TRANSFORMERS = {"eager": "eager", "sdpa": "sdpa", "tilewise": "tilewise", "fa3": "flash_attention_3", "flex": "flex_attention"}
DIFFUSERS = {"native": "native", "cudnn": "_native_cudnn", "flash": "_native_flash", "tilewise": "tilewise", "fa3": "_flash_3", "flex": "flex"}
IMPLEMENTATIONS = {
    "eager": "plain matrices of scores, where SDPA cannot express the model",
    "sdpa": "torch's SDPA, as transformers calls it",
    "native": "torch's SDPA, as diffusers calls it",
    "cudnn": "torch's SDPA, its cuDNN kernel",
    "flash": "torch's SDPA, its FlashAttention 2 kernel",
    "tilewise": "this library",
    "fa3": "FlashAttention 3, if flash_attn_interface can be imported",
    "flex": "torch's FlexAttention, as the client calls it: transformers compiles it, diffusers does not",
}
GPU_ONLY = {"cudnn", "flash", "fa3"}
SDPA_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Row:
    """One model and its inputs."""

    name: str
    about: str
    client: str
    implementations: tuple[str, ...]
    modes: tuple[str, ...]
    build: Callable[[Scale], Workload]
    needs_gpu: bool = False
    compiles: bool = False  # the model itself, by torch.compile: on a CPU that takes longer than all the other rows, so only when named
    calls_sdpa: bool = False  # by itself, past its client's choice of attention
    host_layers: int = 0  # more than 0 if what counts is the host's time: of how many layers


class Job(NamedTuple):
    """What one process measures in turns: one row in one mode."""

    row: str
    mode: str
    implementations: list[str]


def _language(name: str, about: str, build: Callable[[Scale], Workload], first: str = "sdpa", modes: tuple[str, ...] = (STEP, INFERENCE), **more: Any) -> Row:
    others = ("tilewise", "fa3", "flex") if first == "sdpa" else ("tilewise", "flex")
    return Row(name, about, "transformers", (first, *others), modes, build, **more)


def _diffusion(name: str, about: str, build: Callable[[Scale], Workload], masked: bool = False, calls_sdpa: bool = False) -> Row:
    """Neither flash nor fa3 takes a mask. A model that calls SDPA by itself reaches neither fa3 nor flex."""
    others = ("cudnn", "tilewise", "flex") if masked else ("cudnn", "flash", "tilewise", *(() if calls_sdpa else ("fa3", "flex")))
    return Row(name, about, "diffusers", ("native", *others), (STEP, INFERENCE), build, calls_sdpa=calls_sdpa)


def _generating(name: str, about: str, build: Callable[[Scale], Workload], first: str = "sdpa", **more: Any) -> Row:
    return _language(name, about, build, first, modes=(INFERENCE,), **more)


def _host(name: str, about: str, build: Callable[[Scale], Workload]) -> Row:
    return Row(name, about, "transformers", ("sdpa", "tilewise"), (STEP, INFERENCE), build, host_layers=language.HOST_LAYERS)


ROWS = {
    row.name: row
    for row in (
        _language("llama", "Llama-like, causal, 16k tokens", language.llama),
        _language("llama-packed", "Llama-like, 8 packed documents, 16k tokens, a new layout every step", language.llama_packed),
        _language("llama-padded", "Llama-like, 4 x 4096 tokens, right-padded", language.llama_padded),
        _language("llama-compiled", "Llama-like, causal, 16k tokens, torch.compile", language.llama_compiled, compiles=True),
        _language("mistral", "Mistral-like, window 4096, 32k tokens", language.mistral),
        _language("gemma2", "Gemma2-like, softcap, head dim 256, 8k tokens", language.gemma2, first="eager"),
        _language("gpt-oss", "gpt-oss-like, window 128 and full by turns, sinks, head dim 64, 8k tokens", language.gpt_oss, first="eager"),
        _generating("generate", "Llama-like, 8 x 2048 tokens of prompt, 32 new ones each", language.generate),
        _generating("generate-padded", "the same, prompts left-padded", language.generate_padded),
        _generating("generate-static", "the same, left-padded, static cache, not compiled", language.generate_static),
        _generating("generate-compiled", "the same, left-padded, static cache, compiled", language.generate_compiled, needs_gpu=True, compiles=True),
        _generating("generate-window", "Mistral-like, window 1024, 8 x 2048 tokens of prompt, 32 new ones each", language.generate_window),
        _generating("generate-softcap", "Gemma2-like, softcap, window 1024 in half of the layers, D256, the same", language.generate_softcap, first="eager"),
        _generating("generate-sinks", "gpt-oss-like, window 128 in half of the layers, sinks, the same", language.generate_sinks, first="eager"),
        _diffusion("flux", "Flux-like, 1024 px", diffusion.flux),
        _diffusion("sd3", "SD3-like, 2 x 1024 px", diffusion.sd3, calls_sdpa=True),
        _diffusion("qwenimage", "QwenImage-like, 2 x 1024 px, padded text", diffusion.qwenimage, masked=True),
        _diffusion("wan", "Wan 1.3B-like, 32,760 tokens", diffusion.wan),
        _diffusion("hunyuanvideo", "HunyuanVideo-like, 2 x 14,040 tokens, padded text", diffusion.hunyuanvideo, masked=True),
        _host("host-causal", "16 small layers, causal: the host's time", language.host),
        _host("host-packed", "16 small layers, 2 packed documents: the host's time", language.host_packed),
        _host("host-padded", "16 small layers, left-padded: the host's time", language.host_padded),
    )
}


def find(name: str) -> Row:
    if name not in ROWS:
        raise InputError(f"there is no model {name!r}; there are {', '.join(ROWS)}{meant(name, ROWS)}")
    return ROWS[name]


def check(implementations: Sequence[str]) -> None:
    for name in implementations:
        if name not in IMPLEMENTATIONS:
            raise InputError(f"there is no implementation {name!r}; there are {', '.join(IMPLEMENTATIONS)}{meant(name, IMPLEMENTATIONS)}")


def check_modes(row: Row, modes: Sequence[str]) -> None:
    for mode in modes:
        if mode not in row.modes:
            raise InputError(f"{row.name} has no mode {mode!r}; it has {' and '.join(row.modes)}")


def missing(row: Row) -> str | None:
    """Why a row cannot run for want of a package."""
    if importlib.util.find_spec(row.client) is None:
        return f"{row.name} needs {row.client}, which is not installed: pip install 'tilewise[{row.client}]'"
    return None


def has_fa3() -> bool:
    return importlib.util.find_spec("flash_attn_interface") is not None


def why_not(implementation: str, scale: Scale) -> str | None:
    """Why this machine cannot run an implementation."""
    reasons = ["a GPU"] if implementation in GPU_ONLY and scale.device.type != "cuda" else []
    reasons += ["flash_attn_interface, which is not installed"] if implementation == "fa3" and not has_fa3() else []
    return f"{implementation} needs {' and '.join(reasons)}" if reasons else None


def jobs_of(row: Row, scale: Scale, modes: Sequence[str] = (), only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Job]:
    """What to measure of a row; nothing given means all that this machine can do. On a CPU, flex is left out unless it is named: compiling takes minutes."""
    cuda = scale.device.type == "cuda"
    if row.needs_gpu and not cuda:
        return []
    left_out = {*skip, *(() if cuda or "flex" in only else ("flex",))}
    chosen = [n for n in row.implementations if n not in left_out and (not only or n in only) and why_not(n, scale) is None]
    return [Job(row.name, mode, chosen) for mode in row.modes if chosen and (not modes or mode in modes)]


def register(client: str) -> None:
    """Makes tilewise known to the client."""
    if client == "transformers":
        from tilewise.integrations import transformers

        transformers.register()
    else:
        from tilewise.integrations import diffusers

        diffusers.register()


@contextmanager
def attending(row: Row, model: Any, implementation: str) -> Iterator[None]:
    """The model's attention is the given one."""
    if row.client == "transformers":
        model.set_attn_implementation(TRANSFORMERS[implementation])
        yield
    else:
        from diffusers import attention_backend

        with attention_backend(DIFFUSERS[implementation]), _sdpa_served(model, implementation) if row.calls_sdpa else nullcontext():
            yield


def _sdpa_served(model: Any, implementation: str) -> AbstractContextManager[Any]:
    """The same where the model calls SDPA by itself. What a kernel cannot take is left to the others."""
    if implementation == "tilewise":
        from tilewise.integrations import route

        return route(model)
    if implementation not in SDPA_KERNELS:
        return nullcontext()
    return sdpa_kernel([SDPA_KERNELS[implementation], SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)
