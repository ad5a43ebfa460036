"""Results as people read them."""

from collections.abc import Mapping
from statistics import median

from tilewise.tools.bench_models.processes import Result
from tilewise.tools.bench_models.rows import Row

NO_FA3 = "FlashAttention 3 is not among them: flash_attn_interface cannot be imported."
NO_FLEX = "FlexAttention is not among them: on a CPU it may take minutes. --impl flex measures it; --impl may be repeated, to have others beside it."
COLUMNS = ("implementation", "ms", "speedup", "peak GiB", "first call, s", "difference")
NOTHING = "-"  # a cell without a number


def cells(name: str, results: Mapping[str, Result]) -> list[str]:
    """A line of COLUMNS: the speedup over the first implementation that ran, and the difference from the one that it was compared with."""
    result = results[name]
    if result.ms is None:
        return [name, time_of(result), "", "", "" if result.first_s is None else f"{result.first_s:.1f}", ""]
    first = next(found.ms for found in results.values() if found.ms is not None)
    gib = NOTHING if result.gib is None else f"{result.gib:.2f}"
    return [name, time_of(result), f"{first / result.ms:.2f}", gib, f"{result.first_s or 0:.1f}", NOTHING if result.beside == name else f"{result.off:.0e}"]


def time_of(result: Result) -> str:
    """Milliseconds, with ~ if they are a single call's; or why there are none."""
    if result.ms is None:
        return result.failed or NOTHING
    return ("" if result.times else "~") + milliseconds(result.ms)


def milliseconds(ms: float) -> str:
    return f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def microseconds_a_layer(row: Row, results: Mapping[str, Result]) -> float | None:
    """Of a row of host time: how many microseconds a layer takes more than with SDPA. The median of turns, each beside SDPA's of the same round: a host that
    others use, too, changes its speed by half within seconds, and slows both."""
    if any(name not in results or not results[name].times or results[name].failed for name in ("sdpa", "tilewise")):
        return None
    rounds = zip(results["tilewise"].times, results["sdpa"].times, strict=False)
    return 1e3 * median([ours - theirs for ours, theirs in rounds]) / row.host_layers
