"""What the emulated Hopper GPU notices: the CUDA forward with one thing done wrong does not pass."""

from typing import Any, NamedTuple

import pytest
import torch

import tilewise as tw
from tests.support.hopper.emulator import MISSING, EmulationError, Emulator
from tilewise import masks

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

EARLY, REUSED, STOPPED, FLIGHT = "may not have arrived yet", "may not have read yet|is reading", "no thread can go on", "in flight"
WRONG = "the result is wrong"


class Mistake(NamedTuple):
    said: str  # what comes of it: an expression for the emulator's words, or WRONG
    right: str  # in the kernel's text
    wrong: str


def exchanged(said: str, first: str, second: str) -> Mistake:
    """Two statements in the other order."""
    return Mistake(said, f"{first}\n        {second}", f"{second}\n        {first}")


SCORES_DONE, ALL_DONE = "mma_wait<1>();\n        pin(s);", "mma_wait<0>();\n        pin(o);\n        pin(s);"
RELEASE_K, RELEASE_V = "release(base + Shared::k_empty + 8 * ks);", "release(base + Shared::v_empty + 8 * vs);"
RELEASE_Q = "if (is_last) release_q();"

MISTAKES = {
    # what has not arrived
    "first keys not awaited": Mistake(EARLY, "wait_k(it);", ""),
    "next keys not awaited": Mistake(EARLY, "if (!is_last) wait_k(it + 1);\n        mma_wait", "mma_wait"),
    "values not awaited": Mistake(EARLY, "wait_v(it - 1);", ""),
    "last values not awaited": Mistake(EARLY, "wait_v(it);", ""),
    "keys awaited in another phase": Mistake(f"{EARLY}|{STOPPED}", "it / K_STAGES & 1); }", "it / K_STAGES & 1 ^ 1); }"),
    "fewer bytes expected than come": Mistake(f"{EARLY}|{STOPPED}", "bar_expect(bar, CHUNKS * BN * 128)", "bar_expect(bar, CHUNKS * BN * 64)"),
    "more bytes expected than come": Mistake(STOPPED, "bar_expect(bar, CHUNKS * BN * 128)", "bar_expect(bar, CHUNKS * BN * 128 + 16)"),
    "message finished after it is sent": Mistake(EARLY, "bar_expect(bar, Shared::tile_q);", "bar_expect(bar, Shared::tile_q), put_shared(to + 8, x.steps);"),
    "scores used before they are awaited": Mistake(f"{FLIGHT}|{REUSED}", SCORES_DONE, "pin(s);"),
    "one product too many left": Mistake(FLIGHT, "mma_wait<1>();", "mma_wait<2>();"),
    "products not committed": Mistake(f"{FLIGHT}|{REUSED}", "mma_commit();", ""),
    "barriers used before they are made": Mistake("not be there yet|there is no mbarrier", "__syncthreads();", ""),
    # what somebody still needs
    "keys given back early": exchanged(REUSED, SCORES_DONE, RELEASE_K),
    "values given back early": exchanged(REUSED, ALL_DONE, RELEASE_V),
    "queries given back early": Mistake(
        REUSED, f"{SCORES_DONE}\n        {RELEASE_K}\n        {RELEASE_Q}", f"{RELEASE_Q}\n        {SCORES_DONE}\n        {RELEASE_K}"
    ),
    "key's place read after it is given back": Mistake(
        REUSED, f"int key = first_key(it);\n        {SCORES_DONE}\n        {RELEASE_K}", f"{SCORES_DONE}\n        {RELEASE_K}\n        int key = first_key(it);"
    ),
    "one warp gives back for four": Mistake(
        REUSED, "if (threadIdx.x % 32 == 0) bar_arrive(bar);", "for (int i = 0; i < 4 && threadIdx.x % 128 == 0; i++) bar_arrive(bar);"
    ),
    "keys loaded over others": Mistake("more than the 1 arrivals", "bar_wait(base + Shared::k_empty + 8 * s, (i / K_STAGES & 1) ^ 1);", ""),
    "values loaded over others": Mistake(REUSED, "bar_wait(base + Shared::v_empty + 8 * s, (i / V_STAGES & 1) ^ 1);", ""),
    "fewer arrivals than warps": Mistake(
        f"{EARLY}|{REUSED}|{STOPPED}|more than", "bar_init(base + Shared::q_empty, 4 * WGS)", "bar_init(base + Shared::q_empty, 4)"
    ),
    "weights packed before the products that read them": Mistake(FLIGHT, ALL_DONE, f"pack_p();\n        {ALL_DONE}"),
    "outputs scaled while products add to them": Mistake(
        FLIGHT, f"if (!is_last) wait_k(it + 1);\n        {ALL_DONE}", f"if (!is_last) wait_k(it + 1);\n        o[0] *= decay[0];\n        {ALL_DONE}"
    ),
    "registers changed without a fence": Mistake("without a fence", "mma_fence();", ""),
    # taking turns
    "a turn not awaited": Mistake("arrives again", "turn_wait(1 + wg);", ""),
    "a turn not given": Mistake(STOPPED, "turn_give(wg == WGS - 1 ? 1 : 2 + wg);", ""),
    "nobody begins": Mistake(STOPPED, "if (wg == WGS - 1) end_turn();", ""),
    "the last turn left": Mistake("ends with 128 arrivals", "if (wg == 0) begin_turn();", ""),
    "more registers than there are": Mistake(STOPPED, "WGS == 2 ? 240 : 160", "WGS == 2 ? 248 : 168"),
    # what is computed
    "band's upper edge": Mistake(WRONG, "8 * j + i % 2 <= most[i / 2]", "8 * j + i % 2 < most[i / 2]"),
    "band's lower edge": Mistake(WRONG, "8 * j + i % 2 >= least[i / 2]", "8 * j + i % 2 > least[i / 2]"),
    "tiles of the upper end": Mistake(
        WRONG, "upper = min(max(max(to + 1, 0) / BN, first), last + 1);", "upper = min(max(max(to, 0) / BN + 1, first), last + 1);"
    ),
    "tiles of the lower end": Mistake(WRONG, "lower = min(max((from + BN - 1) / BN, first), upper);", "lower = min(max(from / BN, first), upper);"),
    "a product's operand": Mistake(WRONG, "operand_at(b, i * 2048)", "operand_at(b, i * 1024)"),
    "an operand's chunks": Mistake(WRONG, "operand(v, BN * 128)", "operand(v, BN * 64)"),
    "halves of a pair": Mistake(WRONG, "pack(s[2 * i], s[2 * i + 1])", "pack(s[2 * i + 1], s[2 * i])"),
    "sums not brought along": Mistake(WRONG, "sum[0] * decay[0] + total[0]", "sum[0] + total[0]"),
    "rows behind the last": Mistake("touches byte", "if (at < a.n_q && column", "if (column"),
}
IN_PAIRS = {
    "a program ends before the other": Mistake("after that has ended", "__syncwarp();\n        cluster_sync();", ""),
    "a program begins before the other": Mistake("not be there yet|there is no mbarrier", "if (CLUSTER > 1) cluster_sync();", ""),
    "given back to one's own producer alone": Mistake(f"{REUSED}|beside another|{STOPPED}", "bar_arrive_at(bar, threadIdx.x % 32)", "bar_arrive(bar)"),
    "both load the same": Mistake("beside another", "u32 mine = c + cluster_rank();", "u32 mine = c;"),
}


def attended(dim: int, heads: int, mask: Any) -> bool:
    """Whether the result is right."""
    generator = torch.Generator().manual_seed(dim)
    tensors = [torch.randn(1, heads, 400, dim, generator=generator).bfloat16() for _ in range(3)]
    found, wanted = (tw.attention(*given, mask=mask, backend=engine) for given, engine in ((tensors, "cuda"), ([t.double() for t in tensors], "reference")))
    return bool((found - wanted).abs().max() < 0.03)  # four roundings


@pytest.mark.parametrize("name", ["nothing", *MISTAKES])
def test_mistakes(emulator: Emulator, name: str) -> None:
    assert_noticed(emulator, MISTAKES.get(name), 256, 2, masks.causal & masks.sliding_window(130))


@pytest.mark.parametrize("name", ["nothing", *IN_PAIRS])
def test_mistakes_of_programs_in_pairs(emulator: Emulator, name: str) -> None:
    assert_noticed(emulator, IN_PAIRS.get(name), 128, 4, None)


def assert_noticed(emulator: Emulator, mistake: Mistake | None, dim: int, heads: int, mask: Any) -> None:
    __tracebackhide__ = True
    if mistake is None:
        assert attended(dim, heads, mask) and emulator.marked == 0
        return
    said, right, wrong = mistake

    def change(text: str) -> str:
        assert right in text, f"the kernel has no {right!r}"
        return text.replace(right, wrong)

    emulator.change = change
    if said == WRONG:
        assert not (attended(dim, heads, mask) and emulator.marked == 0)
    else:
        with pytest.raises(EmulationError, match=said):
            attended(dim, heads, mask)
