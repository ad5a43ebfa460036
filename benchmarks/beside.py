"""Two or more checkouts of tilewise beside each other on one GPU: what a change to a kernel gives, told apart from what the card does.

    git worktree add ../before HEAD~1
    python benchmarks/beside.py ../before . --rows "causal D128" window --save change
    python benchmarks/beside.py . ../trial@KEYS=128 ../trial@KEYS=160 --rows "full D128"     # one checkout, with an environment variable of its own

Each checkout runs in a process of its own, and the processes take turns at every row, each time in another order. Every figure is the median of the turns;
beside it stands how many times as fast it is as the first checkout's. TFLOP/s count as in gpu.py.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "gpu"
LENGTHS = (2048, 8192, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="TREE[@NAME=VALUE]", help="checkouts of tilewise, and what is set in their environment")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="PATTERN", help="only rows in whose name one of these regular expressions is found")
    parser.add_argument("--engine", default="cuda", help="the engine to measure (default: %(default)s)")
    parser.add_argument("--fa3", help="folder with FlashAttention-3's library, to measure it too")
    parser.add_argument("--turns", type=int, default=5, help="of every checkout (default: %(default)s)")
    parser.add_argument("--rep", type=int, default=60, help="milliseconds that a figure of a turn takes (default: %(default)s)")
    parser.add_argument("--save", metavar="NAME", help="also write the table to benchmarks/results/gpu/NAME.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args)
        return
    workers = [Worker([*sys.argv[1:], "--worker"], tree) for tree in args.trees]
    if args.fa3:
        workers.append(Worker([*sys.argv[1:], "--worker"], args.trees[0], peer="FA3"))
    about, names = workers[0].ask("about")
    lines = [["forward / backward TFLOP/s", *[worker.name for worker in workers]], ["---"] * (len(workers) + 1)]
    for name in names:
        if any(re.search(pattern, name) for pattern in args.rows):
            lines.append([name, *compared(name, workers, args.turns)])
            print("  ".join(lines[-1]), flush=True)
            if args.save:
                table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
                text = f"# Checkouts beside each other: {args.save}\n\n{about}\n\n`python {' '.join(sys.argv)}`\n\n{table}\n"
                (RESULTS / f"{args.save}.md").write_text(text)
    for worker in workers:
        worker.process.kill()


def compared(name: str, workers: "list[Worker]", turns: int) -> list[str]:
    """A cell for every worker; "-" where it does not run the row."""
    passes = [worker.ask("prepare", name) for worker in workers]
    times: list[list[list[float]]] = [[[] for _ in found] for found in passes]
    order = [who for who, found in enumerate(passes) if found]
    if not order:
        return ["-"] * len(workers)
    for turn in range(turns):
        for who in [*order[turn % len(order) :], *order[: turn % len(order)]]:
            for k in range(len(passes[who])):
                times[who][k].append(workers[who].ask("time", k))
    rates = {who: [flops / statistics.median(times[who][k]) / 1e9 for k, flops in enumerate(passes[who])] for who in order}
    base = rates[order[0]]
    cells = [[f"{rate:.0f} ({rate / other:.3f})" for rate, other in zip(rates.get(who, []), base, strict=False)] for who in range(len(workers))]
    return [" / ".join(cell) or "-" for cell in cells]


class Worker:
    """A process that measures one checkout, on demand."""

    def __init__(self, arguments: list[str], tree: str, peer: str = "") -> None:
        self.name = peer or tree
        folder, _, setting = tree.rpartition("@") if "=" in tree.rpartition("@")[2] else (tree, "", "")
        own = dict([setting.split("=", 1)]) if setting else {}
        env = os.environ | own | {"PYTHONPATH": str(Path(folder).resolve() / "src"), "BESIDE_PEER": peer}
        command = [sys.executable, __file__, *arguments]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *question: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.process.args} ended")
        return json.loads(answer)


# -- in a worker -----------------------------------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> None:
    """Answers what it is asked on its standard input: about, prepare a row (FLOPs of each pass), time a pass (ms)."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch
    import triton

    import tilewise  # the checkout's own, before anything else finds another

    if not Path(tilewise.__file__).is_relative_to(os.environ["PYTHONPATH"]):
        raise SystemExit(f"{tilewise.__file__} is not of the checkout in {os.environ['PYTHONPATH']}")
    from gpu_rows.attention import PROGRAMMED, WINDOWS, allowed_pairs, programs
    from gpu_rows.peers import Peer, flash_peers, measure, ours, tensors
    from triton.testing import do_bench

    from tilewise import masks

    width, tokens, length = 2048, 16384, 16384
    is_flash = os.environ["BESIDE_PEER"] == "FA3"
    args.fa4, args.engines = None, [args.engine]
    dense = {
        f"{'causal' if causal else 'full'} D{dim} S{n}": (dim, n, masks.causal if causal else None)
        for dim in (64, 128, 256)
        for n in LENGTHS
        for causal in (False, True)
    }
    others = programs(length)
    del others["causal"]
    jobs: list[Any] = []

    def prepare(name: str) -> list[float]:
        score: Any = None
        if name in dense:
            dim, n, mask = dense[name]
            batch, heads = max(1, tokens // n), width // dim
            pairs = batch * n * n * (0.5 if mask is not None else 1.0)
        else:
            (heads, dim), n, batch = PROGRAMMED, length, 1
            mask, score = others[name]
            pairs = allowed_pairs(mask, n)
        torch.manual_seed(0)
        inputs, flops = tensors(batch, heads, n, dim), 4 * heads * dim * pairs
        if is_flash and name not in dense and name not in WINDOWS:
            return []
        peers: list[Peer] = flash_peers(args, mask is not None, WINDOWS.get(name, -1)) if is_flash else ours(args, mask, score)
        try:
            jobs[:] = measure(peers[0], inputs, backward=True)
            for job in jobs:
                job()
        except tilewise.BackendError as error:  # this engine does not serve it
            print(f"{name}: {error}", file=sys.stderr)
            return []
        return [flops, 2.5 * flops]

    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "about":
            about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, bf16, {tokens} tokens, heads x head dim = {width}"
            answer: Any = [about, [*dense, *others]]
        elif what == "prepare":
            answer = prepare(rest[0])
        else:
            answer = do_bench(jobs[rest[0]], warmup=20, rep=args.rep, return_mode="median")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
