"""tilewise beside its peers on one GPU, in one run: dense and causal, the same in single precision, grouped heads, programmed masks and
scores, tiles chosen from data, decoding, keys and values in pages, memory, cold starts; its tile maps.

    python benchmarks/gpu.py [dense] [single] [grouped] [masks] [sparse] [decode] [paged] [splits] [host] [maps] [memory] [cold]
                             [--quick] [--save] [--engines gluon triton] [--no-flex] [--fa3 FOLDER] [--fa4 FOLDER]

TFLOP/s count the unmasked work only; a backward counts 2.5 times its forward. Peers take turns within a row, each time in another
order, and every figure is the median of several turns, because a card at its power limit moves by a few percent with what ran before.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
from gpu_rows.attention import dense, grouped, programmed, single
from gpu_rows.decoding import decode, paged, splits
from gpu_rows.host import cold, host, memory
from gpu_rows.maps import maps
from gpu_rows.peers import markdown
from gpu_rows.sparse import sparse

import tilewise

RESULTS = Path(__file__).parent / "results" / "gpu"  # one file for each part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["dense", "single", "grouped", "masks", "sparse", "decode", "paged", "splits", "host", "maps", "memory", "cold"]
    parser.add_argument("parts", nargs="*", choices=[*names, []], help="what to measure; everything unless given")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    own = ["gluon", "triton"] if hopper else ["triton"]
    parser.add_argument("--engines", nargs="+", default=own, help="the tilewise engines to measure; the first where one will do")
    parser.add_argument("--no-flex", action="store_true", help="leave out torch flex, which compiles for ten seconds a row")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", help="2048 8192 16384 unless given; 8192 if quick")
    parser.add_argument("--quick", action="store_true", help="one length, shorter measurements")
    parser.add_argument("--fa3", help="folder with FlashAttention-3's library, to measure it too")
    parser.add_argument("--fa4", help="folder with FlashAttention-4's wheels, unpacked, to measure it too")
    parser.add_argument("--save", action="store_true", help="write each part to benchmarks/results/gpu")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here, or a torch without CUDA; benchmarks/cpu.py and benchmarks/anywhere.py need none")
    args.rep = 40 if args.quick else 100
    args.lengths = args.lengths or ([8192] if args.quick else [2048, 8192, 16384])
    parts = {
        "dense": dense,
        "single": single,
        "grouped": grouped,
        "masks": programmed,
        "sparse": sparse,
        "decode": decode,
        "paged": paged,
        "splits": splits,
        "host": host,
        "maps": maps,
        "memory": memory,
        "cold": cold,
    }
    versions = f"torch {torch.__version__}, Triton {__import__('triton').__version__}, tilewise {tilewise.__version__}"
    header = f"{torch.cuda.get_device_name()}, {versions}, bf16 unless said otherwise"
    print(header)
    command = "python " + " ".join("FOLDER" if word in (args.fa3, args.fa4) else word for word in sys.argv)
    for name in args.parts or parts:
        table = markdown(parts[name](args))
        if args.save:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.md").write_text(f"# tilewise and its peers on a GPU: {name}\n\n{header}\n\n`{command}`\n\n{table}\n")


if __name__ == "__main__":
    main()
