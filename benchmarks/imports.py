"""What `import tilewise` adds to `import torch`: each a fresh process, with its bytecode written before.

Python may collect its garbage at any moment; with all of torch loaded that alone takes longer than our import, and where it falls is
chance. Both figures are given: with the collector as it is, and without it.
"""

import gc
import os
import tempfile
import time
from statistics import median

from common import Watch, arguments, progress, report, table

RUNS = 7


def measure(collect: bool) -> float:
    """Run in a process of its own, into which the benchmark's helpers have brought torch: milliseconds."""
    if not collect:
        gc.disable()
    begin = time.perf_counter()
    import tilewise  # noqa: F401  (this is what is measured)

    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    options = arguments(__doc__)
    watch = Watch(__file__)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as bytecode:
        os.environ.update(PYTHONPYCACHEPREFIX=bytecode)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for collect in (True, False):
            name = "as it is" if collect else "off"
            progress(f"collector {name}")
            found = [watch.measure("measure", collect) for _ in range(RUNS + 1)][1:]  # the first writes the bytecode
            rows.append([name, f"{median(found):.0f}", f"{min(found):.0f}"])
    notes = f"{RUNS} fresh processes each."
    report(__file__, options, "What import tilewise takes", [notes, table(["garbage collector", "median, ms", "least, ms"], rows), watch.note()])


if __name__ == "__main__":
    main()
