"""The layers of the package and who imports whom, read from the sources. Run it to draw docs/architecture.md's picture anew.

python docs/package_map.py           # rewrites the picture
python docs/package_map.py --check   # fails if it is out of date
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "tilewise"
PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- packages: drawn by docs/package_map.py -->", "<!-- end of packages -->"

# From the bottom up: a layer imports only what stands before it, lazy imports included. The longest name that fits says which layer a module is in.
LAYERS = {
    "errors": "what is raised",
    "_version": "the version",
    "memory": "what a tensor's memory holds",
    "sizes": "questions about sizes, where torch.export may not know",
    "lang": "programs: tracing, types, intervals, derivatives; one entry per operation",
    "named": "what masks and scores share: sizes they are made for, copies, pickles",
    "masks": "the masks users combine",
    "scores": "the scores users give",
    "tiles": "tile maps: which tiles are empty, partial or full",
    "core": "problem, plan, map cache, kernel store",
    "engines.base": "what an engine is",
    "engines.dropout": "the dropout all engines agree on",
    "engines.facts": "what is known of a program's values, of which generated text is made",
    "engines.codegen": "what all code generators share",
    "engines.cxx": "programs as C++, for CPU and GPU",
    "engines.masked_matmul": "products that ignore masked NaNs",
    "engines.reference": "dense: the definition of right",
    "engines.blocked": "tiles of plain torch operations",
    "engines.native": "torch's SDPA",
    "engines.cpp": "generated C++",
    "engines.gpu": "what the GPU engines share: code generation, compiler, launches, tuning, tile schedules, device functions",
    "engines.fa2": "torch's FlashAttention-2 kernel",
    "engines.triton": "portable fused kernels",
    "engines.gluon": "Hopper kernels: TMA, wgmma, warp specialisation",
    "engines.cuda": "Hopper's forward in CUDA C++, compiled by NVRTC",
    "engines": "the ordered list of engines; eager autograd and the torch operator around them",
    "frontend": "dispatch, call cache, token order, packing, mask tensors, block masks, interception",
    "attention": "attention(): the path of a call",
    "nn": "attention and learned scores as modules",
    "flex": "torch FlexAttention's interface",
    "varlen": "packed sequences",
    "paged": "keys and values in pages",
    "paged_cache": "pages, table and lengths of growing sequences",
    "functional": "torch SDPA's interface",
    "tools.words": "numbers and nouns in messages",
    "tools.html": "tables for notebooks",
    "tools.explain": "explain() and backends()",
    "tools.watch": "watch()",
    "tools.build": "building ahead",
    "__init__": "what `import tilewise` gives",
    "cubes": "tokens of a grid cube after cube",
    "sparse": "tiles chosen from the data: pooled scores, top k, MoBA, VSA",
    "distributed": "context parallelism: sequences that several ranks share",
    "integrations": "diffusers, transformers, SimpleTuner",
    "tools": "what the command line runs: demonstration, doctor, benchmarks",
    "__main__": "python -m tilewise",
}


def modules() -> dict[str, Path]:
    """Every module below `tilewise` by its dotted name; a package is named like its folder, tilewise itself "__init__"."""
    found: dict[str, Path] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [*path.relative_to(ROOT).with_suffix("").parts]
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found[".".join(parts)] = path
    return found


def layer_of(module: str) -> str:
    fitting = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    if not fitting:
        raise LookupError(f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}")
    return max(fitting, key=len)


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """(line, module below tilewise) of every import in a file, those inside functions included; what only type checkers read is left out."""
    for node in _walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tilewise":
                    yield node.lineno, alias.name.partition(".")[2] or "__init__"
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise SyntaxError(f"{path}:{node.lineno}: relative imports hide the order")
            package, _, module = (node.module or "").partition(".")
            if package == "tilewise":
                for alias in node.names:
                    inner = f"{module}.{alias.name}" if module else alias.name
                    yield node.lineno, inner if inner in known else module or "__init__"


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from _walk(node)


def graph() -> dict[str, set[str]]:
    """Which modules every module imports."""
    known = modules()
    return {name: {target for _, target in imports_of(path, known)} - {name} for name, path in known.items()}


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    done: set[str] = set()
    way: list[str] = []

    def visit(name: str) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        way.append(name)
        for target in sorted(edges[name]):
            found = visit(target)
            if found:
                return found
        way.pop()
        done.add(name)
        return []

    for name in sorted(edges):
        found = visit(name)
        if found:
            return found
    return []


def picture() -> str:
    """A table of the layers from the top down: how many modules each has, what it is, and which layers it imports."""
    between: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    count = dict.fromkeys(LAYERS, 0)
    for module, targets in graph().items():
        layer = layer_of(module)
        count[layer] += 1
        between[layer] |= {layer_of(t) for t in targets} - {layer}
    order = list(LAYERS)
    lines = ["| layer | modules | what it is | imports |", "|---|---|---|---|"]
    for layer in reversed(order):
        used = ", ".join(f"`{name}`" for name in sorted(between[layer], key=order.index))
        lines.append(f"| `{layer}` | {count[layer]} | {LAYERS[layer]} | {used} |")
    return "\n".join(lines)


def page_with_picture(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{picture()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    page = PAGE.read_text()
    if "--check" in sys.argv:
        sys.exit(page_with_picture(page) != page and f"{PAGE} is out of date: run python {sys.argv[0]}")
    PAGE.write_text(page_with_picture(page))
