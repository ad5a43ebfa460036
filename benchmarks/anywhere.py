"""tilewise without a GPU: the memory of a long sequence, and times beside torch's SDPA and flex_attention.

Memory is the peak of a process of its own above what it had when the inputs were ready. Times are medians once warm, so
tile maps and masks are built; a dense mask or bias that SDPA needs is made beforehand and not counted.
"""

import gc
import os
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
from common import MIB, Watch, arguments, in_subprocess, machine, memory_text, milliseconds, peak_growth, progress, report, table, time_text
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from tilewise import masks, scores

LONG = 32_768
LONG_LIMIT = 256 * MIB
HEADS, HEAD_DIM = 8, 64
LENGTHS = (1024, 4096)
LIMITED = "This machine announces AMX but traps on it (torch's bf16 products crash), so all ran with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16."
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# -- a long sequence -------------------------------------------------------------------------------------------------


def long_sequence(threads: int) -> dict[str, float]:
    """Run in a process of its own: one head of a causal sequence, forward and backward."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn((1, 1, LONG, HEAD_DIM), generator=generator) for _ in range(4))
    inputs = [t.requires_grad_() for t in (query, key, value)]

    def both() -> None:
        out = tw.attention(*inputs, mask=masks.causal, backend="blocked")
        torch.autograd.grad(out, inputs, grad)

    short = [torch.randn((1, 1, 256, HEAD_DIM), requires_grad=True) for _ in range(3)]
    tw.attention(*short, mask=masks.causal, backend="blocked").sum().backward()  # what is loaded once is not the call's
    gc.collect()
    memory = peak_growth(both)
    return {"memory": memory, "ms": milliseconds(both, seconds=0, least=3)}


def bf16_product() -> float:
    return float((torch.ones((64, 64), dtype=torch.bfloat16) @ torch.ones((64, 64), dtype=torch.bfloat16)).sum())


def bf16_works(watch: Watch) -> bool:
    """Whether torch can multiply bf16 here. If not, oneDNN is kept from AMX, which some virtual machines announce and trap."""
    try:
        in_subprocess(watch.script, "bf16_product")
    except RuntimeError:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        return False
    return True


# -- side by side ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    mask: Any = None  # of a length
    score: Any = None


def documents(length: int) -> Any:
    return masks.causal & masks.document(lengths=[length // 8] * 8)


CASES = (
    Case("full"),
    Case("causal", lambda n: masks.causal),
    Case("causal, window 256", lambda n: masks.causal & masks.sliding_window(256)),
    Case("causal, 8 documents", documents),
    Case("causal, ALiBi", lambda n: masks.causal, scores.alibi(HEADS)),
    Case("causal, softcap 20", lambda n: masks.causal, scores.softcap(20.0)),
)
ENGINES = ("blocked", "auto", "sdpa", "flex", "compiled")
NAMES = {"blocked": "tilewise blocked", "auto": "tilewise auto", "sdpa": "torch SDPA", "flex": "torch flex, eager", "compiled": "torch flex, compiled"}


def forward_of(engine: str, case: Case, length: int, dtype: torch.dtype) -> partial[Tensor] | None:
    """f(query, key, value) of this engine; None where it cannot express the case."""
    mask = None if case.mask is None else case.mask(length)
    if engine in ("blocked", "auto"):
        return partial(tw.attention, mask=mask, score=case.score, backend=engine)
    if engine == "sdpa":
        if case.name in ("full", "causal"):
            return partial(scaled_dot_product_attention, is_causal=case.name == "causal")
        dense = dense_bias(case, mask, length, dtype)
        return None if dense is None else partial(scaled_dot_product_attention, attn_mask=dense)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = torch.compile(flex_attention) if engine == "compiled" else flex_attention
    block_mask = None if mask is None else create_block_mask(mask, None, None, length, length, device="cpu")
    return partial(attend, score_mod=case.score, block_mask=block_mask)


def dense_bias(case: Case, mask: Any, length: int, dtype: torch.dtype) -> Tensor | None:
    """The mask as SDPA takes it: boolean, or the bias with -inf where masked; None where scores are not merely added to."""
    at = torch.arange(length)
    allowed = mask(None, None, at[:, None], at)
    if case.score is None:
        return allowed[None, None]
    if "ALiBi" not in case.name:
        return None
    bias = case.score(torch.zeros(()), None, torch.arange(HEADS)[:, None, None], at[:, None], at)
    return bias.masked_fill(~allowed, -torch.inf).to(dtype)[None]


def measure(engine: str, length: int, dtype: str, threads: int) -> list[dict[str, Any]]:
    """Run in a process of its own: for every case, forward and backward milliseconds, or why there are none."""
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
    return [measure_case(engine, case, length, DTYPES[dtype]) for case in CASES]


def measure_case(engine: str, case: Case, length: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn((1, HEADS, length, HEAD_DIM), generator=generator).to(dtype) for _ in range(4))
    found: dict[str, Any] = {}
    try:
        forward = forward_of(engine, case, length, dtype)
        if forward is None:
            return {"refused": "it has no argument for it"}
        with torch.no_grad():
            found["forward"] = milliseconds(lambda: forward(query, key, value), seconds=0.5, least=3)
        if engine == "auto":
            found["engine"] = tw.explain(query, key, value, mask=forward.keywords["mask"], score=case.score).engine
        if engine != "compiled":
            leaves = [t.requires_grad_() for t in (query, key, value)]
            out = forward(*leaves)
            found["backward"] = milliseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), seconds=0.5, least=3)
    except Exception as error:  # whatever a peer cannot do is reported, not hidden
        found["refused"] = str(error).splitlines()[0]
    return found


def cell(result: dict[str, Any]) -> str:
    """forward / backward in milliseconds."""
    if "forward" not in result:
        return "cannot"
    backward = f"{result['backward']:.1f}" if "backward" in result else "-"
    return f"{result['forward']:.1f} / {backward}"


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """How many times as long the other takes, forward / backward."""
    found = [f"{theirs[way] / ours[way]:.2f}" if way in theirs and way in ours else "-" for way in ("forward", "backward")]
    return "" if found == ["-", "-"] else " / ".join(found)


def side_by_side(watch: Watch, options: Any) -> list[str]:
    engines = [e for e in ENGINES if e != "compiled" or options.compiled]
    sections, chosen, refused = [], Lists(), Lists()
    for dtype in DTYPES:
        for length in LENGTHS:
            results = {}
            for engine in engines:
                progress(f"{dtype}, {length} tokens: {NAMES[engine]}")
                results[engine] = watch.measure("measure", engine, length, dtype, options.threads)
            rows = []
            for which, case in enumerate(CASES):
                found = {engine: results[engine][which] for engine in engines}
                rows.append([case.name, *[cell(found[e]) for e in engines], ratios(found["auto"], found["sdpa"]), ratios(found["auto"], found["flex"])])
                chosen.add(found["auto"].get("engine"), f"{case.name} {dtype}")
                for engine in engines:
                    way = "backward" if "forward" in found[engine] else case.name
                    refused.add(found[engine].get("refused"), f"{NAMES[engine]}, {way}")
            sections.append(table([f"{dtype}, {length} tokens", *[NAMES[e] for e in engines], "SDPA : auto", "flex : auto"], rows))
    return [*sections, "Engines that `auto` chose:\n\n" + str(chosen), "What has no number:\n\n" + str(refused)]


class Lists(dict[str, dict[str, None]]):
    """What belongs to each key, in the order in which it came."""

    def add(self, key: str | None, value: str) -> None:
        if key is not None:
            self.setdefault(key, {})[value] = None

    def __str__(self) -> str:
        return "\n".join(f"- {key}: {'; '.join(values)}" for key, values in self.items())


def main() -> None:
    options = arguments(__doc__, ("--compiled", "also measure torch.compile(flex_attention), forward only; compiling takes minutes"))
    print(machine(options.threads))
    watch = Watch(__file__)
    notes = [] if bf16_works(watch) else [LIMITED]
    progress(f"{LONG} tokens, forward and backward")
    found = watch.measure("long_sequence", options.threads)
    met = "met" if found["memory"] < LONG_LIMIT else "missed"
    matrix = LONG**2 * 4
    long = (
        f"One head of {LONG:,} tokens, head dim {HEAD_DIM}, fp32, causal, forward and backward with backend='blocked': {time_text(found['ms'])}, "
        f"peak memory above the inputs {memory_text(found['memory'])} (target under {memory_text(LONG_LIMIT)}: {met}). "
        f"One matrix of scores would take {memory_text(matrix)}."
    )
    how = (
        f"Batch 1, {HEADS} heads, head dim {HEAD_DIM}. Milliseconds, forward / backward. The last columns say how many times as long the peer takes "
        "as tilewise auto: above 1, tilewise is faster. SDPA is given dense masks and biases where it has no flag for the case."
    )
    report(__file__, options, "tilewise on a CPU", ["## A long sequence", long, "## Side by side", how, *side_by_side(watch, options), *notes, watch.note()])


if __name__ == "__main__":
    main()
