"""What `import tilewise` brings along, and which module may import which."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs import package_map

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
    foreign = {name.split(".")[0] for name in brought} - {"tilewise", "tilewise_cli"} - set(sys.stdlib_module_names)
    assert foreign <= {"torch"}, f"import tilewise also imports {sorted(foreign - {'torch'})}"
    heavy = [name for name in brought if name.startswith(("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension"))]
    assert not heavy, f"import tilewise also imports {heavy}"
    own = [name for name in brought if name.startswith(("tilewise.", "tilewise_cli"))]
    later = ("tilewise.tools.bench", "tilewise_cli", "tilewise.tools.demo", "tilewise.tools.doctor", "tilewise.integrations", "tilewise.sparse")
    assert not [name for name in own if name.startswith(later)], "commands, integrations and sparse methods are loaded when they are used"


# -- the import order ------------------------------------------------------------------------------------------------

MODULES = package_map.modules()
ORDER = list(package_map.LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_the_layers(module: str) -> None:
    own = package_map.layer_of(module)
    for line, target in package_map.imports_of(MODULES[module], MODULES):
        layer = package_map.layer_of(target)
        assert ORDER.index(layer) <= ORDER.index(own), f"{MODULES[module]}:{line} imports {target} of the layer {layer!r}, which is above {own!r}"


def test_no_module_imports_itself_through_others() -> None:
    """Lazy imports count: what is imported inside a function is a way back up all the same."""
    assert package_map.cycle(package_map.graph()) == []


def test_every_layer_has_a_module() -> None:
    assert {package_map.layer_of(module) for module in MODULES} == set(ORDER)


def test_the_picture_in_the_docs_is_up_to_date() -> None:
    page = package_map.PAGE.read_text()
    assert package_map.page_with_picture(page) == page, "run python docs/package_map.py"


def test_imports_are_read_from_functions_too(tmp_path: Path) -> None:
    source = tmp_path / "example.py"
    source.write_text(
        "import tilewise\nfrom tilewise import masks, TileMap\ndef f():\n    from tilewise.engines.blocked import TileLoop\n    import tilewise.lang.ops\n"
    )
    assert {target for _, target in package_map.imports_of(source, MODULES)} == {"__init__", "masks", "engines.blocked", "lang.ops"}


def test_a_cycle_is_found() -> None:
    assert package_map.cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert package_map.cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
