"""The documentation site and the package: every public name is documented and typed, and what they promise is what the code says."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints

import pytest
from torch import Tensor

import tilewise
from tilewise.engines import fa2, gluon, triton
from tilewise.engines.gpu import limits

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "api"
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)

# The page that documents each public module.
PAGES = {
    "tilewise": "tilewise",
    "tilewise.masks": "masks",
    "tilewise.scores": "scores",
    "tilewise.nn": "nn",
    "tilewise.flex": "flex",
    "tilewise.functional": "functional",
    "tilewise.integrations": "integrations",
    "tilewise.integrations.diffusers": "integrations",
    "tilewise.integrations.transformers": "integrations",
    "tilewise.integrations.simpletuner": "integrations",
    "tilewise.sparse": "sparse",
    "tilewise.errors": "errors",
}
# Modules whose names are public elsewhere.
PARTS = [
    "tilewise.attention",
    "tilewise.varlen",
    "tilewise.paged",
    "tilewise.paged_cache",
    "tilewise.tools.explain",
    "tilewise.tools.watch",
    "tilewise.tools.build",
    "tilewise.integrations.configuration",
    "tilewise.integrations.routing",
]


def found(path: str) -> Any:
    """The object that a directive names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_is_documented(module: str) -> None:
    public = importlib.import_module(module)
    documented = [path for page in API.glob("*.md") for path in DIRECTIVE.findall(page.read_text())]
    named = {path.rpartition(".")[2]: found(path) for path in documented if path.startswith(module)}
    everything = {id(found(path)) for path in documented}
    for name in public.__all__:
        thing = getattr(public, name)
        if not isinstance(thing, (ModuleType, str)):
            assert name in named or id(thing) in everything, f"{module}.{name} is in no page of docs/api"


@pytest.mark.parametrize("page", sorted(API.glob("*.md")), ids=lambda page: page.stem)
def test_documented_names_exist_once(page: Path) -> None:
    paths = DIRECTIVE.findall(page.read_text())
    assert len(paths) == len(set(paths))
    assert all(found(path) is not None for path in paths)


@pytest.mark.parametrize("module", [*PAGES, *PARTS])
def test_public_modules_say_what_is_public(module: str) -> None:
    public = importlib.import_module(module)
    for name in public.__all__:
        thing = getattr(public, name)
        assert not inspect.isroutine(thing) or inspect.getdoc(thing), f"{module}.{name} has no docstring"


# -- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads came with Python 3.11")
@pytest.mark.parametrize(
    "function", [tilewise.attention, tilewise.varlen_attention, tilewise.paged_attention, tilewise.flex.flex_attention, tilewise.nn.Attention.forward]
)
def test_return_lse_decides_the_type(function: Any) -> None:
    from typing import get_overloads  # type: ignore[attr-defined,unused-ignore]  # Python 3.11 and newer have it

    own = inspect.signature(function).parameters
    returned = {}
    for overload in get_overloads(function):
        parameters = inspect.signature(overload).parameters
        assert set(parameters) == set(own)
        assert all(p.default in (own[name].default, p.empty) for name, p in parameters.items())
        hints = get_type_hints(overload)
        returned[str(hints["return_lse"]), hints.get("return_aux", type(None))] = hints["return"]
    plain = {lse: returns for (lse, aux), returns in returned.items() if aux is type(None)}
    assert plain[str(Literal[False])] is Tensor
    assert plain[str(Literal[True])] == tuple[Tensor, Tensor]
    assert set(get_args(returned[next(key for key in returned if key[0] == str(bool))])) >= {Tensor, tuple[Tensor, Tensor]}


# -- the package -----------------------------------------------------------------------------------------------------


def test_the_changelog_has_this_version() -> None:
    assert re.search(rf"^## \[{re.escape(tilewise.__version__)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_support_table_says_what_the_code_does() -> None:
    table = (ROOT / "docs" / "support.md").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'Python :: (3\.\d+)"', project)
    assert f'requires-python = ">={pythons[0]}"' in project and f"| Python {pythons[0]} to {pythons[-1]} |" in table
    assert f"| torch {re.findall(r'torch>=([0-9.]+)', project)[0]} and newer |" in table
    assert "| Triton {}.{} and newer |".format(*limits.OLDEST_TRITON) in table and "need {}.{} |".format(*gluon.OLDEST_TRITON) in table
    assert triton.OLDEST_GPU == fa2.OLDEST_GPU and "(below sm_{}{})".format(*triton.OLDEST_GPU) in table
    assert f"sm_{gluon.ARCHITECTURE}" in table


def test_every_page_of_results_has_its_place() -> None:
    """mkdocs, which is strict about it, is built after the tests."""
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = sorted((ROOT / "benchmarks" / "results").rglob("*.md"))
    assert [page.name for page in pages if f" {page.relative_to(ROOT)}\n" not in nav] == []
