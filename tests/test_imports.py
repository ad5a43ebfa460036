"""What `import tilewise` brings along, and which module may import which."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(tilewise.__file__).parent

# Each may import those before it, and itself. Inside a package imports are free.
ORDER = [
    "errors", "_version", "tf32", "lang", "masks", "scores", "tiles", "problem", "weak_entries", "plan", "store", "engines", "dispatch", "order", "calls",
    "packing", "attention", "explanation", "building", "block_mask", "flex", "tensor_masks", "functional", "ragged", "interception", "watching",
    "__init__", "integrations", "demo", "bench", "doctor", "commands", "cli", "__main__",
]  # fmt: skip

# -- a fresh process -------------------------------------------------------------------------------------------------

PROBE = """
import json, sys
import torch
before = set(sys.modules)
import tilewise
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_brings_nothing_else() -> None:
    """How long it takes is benchmarks/imports.py's to say: what would make it slow is what it brings along."""
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=300)
    brought = json.loads(ran.stdout.splitlines()[-1])
    foreign = {name.split(".")[0] for name in brought} - {"tilewise"} - set(sys.stdlib_module_names)
    assert foreign <= {"torch"}, f"import tilewise also imports {sorted(foreign - {'torch'})}"
    heavy = [name for name in brought if name.startswith(("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension"))]
    assert not heavy, f"import tilewise also imports {heavy}"
    own = [name for name in brought if name.startswith("tilewise.")]
    later = ("tilewise.bench", "tilewise.cli", "tilewise.commands", "tilewise.demo", "tilewise.doctor", "tilewise.integrations")
    assert not [name for name in own if name.startswith(later)], "commands and integrations are loaded when they are used"


# -- the import order ------------------------------------------------------------------------------------------------


def imports_of(path: Path) -> set[str]:
    """The names below `tilewise` a file imports, anywhere in it; "__init__" is the package itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in (alias.name.split(".") for alias in node.names):
                if name[0] == "tilewise":
                    found.add(name[1] if len(name) > 1 else "__init__")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the order"
            module = (node.module or "").split(".")
            if module[0] == "tilewise":
                found |= {module[1]} if len(module) > 1 else {n for alias in node.names if (n := module_or_package(alias.name))}
    return found


def module_or_package(name: str) -> str:
    """`from tilewise import x`: x itself if it is a module, else the package that holds it."""
    return name if (ROOT / f"{name}.py").exists() or (ROOT / name).is_dir() else "__init__"


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


SOURCES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_import_order(path: Path) -> None:
    place = place_of(path)
    assert place in ORDER, f"{place} has no place in the import order: add it to ORDER in {Path(__file__).name}"
    for name in imports_of(path) - {place}:
        assert name in ORDER, f"{path.name} imports {name}, which has no place in the import order"
        assert ORDER.index(name) < ORDER.index(place), f"{path.relative_to(ROOT)} imports {name}, which comes after {place} in the import order"


def test_the_order_is_read_from_functions_too(tmp_path: Path) -> None:
    source = tmp_path / "example.py"
    source.write_text("import tilewise\nfrom tilewise import masks, attention, TileMap\ndef f():\n    from tilewise.engines.blocked import Walk\n")
    assert imports_of(source) == {"__init__", "masks", "attention", "engines"}
