"""The README: its code runs, its links lead somewhere, in a package too, its charts are those of the results."""

import re
from pathlib import Path

import pytest
import torch

import hatch_build
from docs import charts

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "backend 'auto'" in said and "neighborhood" in said


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT))))
def test_links_lead_somewhere(target: str) -> None:
    assert target.startswith("https://") or (ROOT / target).exists()


@pytest.mark.parametrize("name", charts.charts())
def test_charts_are_those_of_the_results(name: str) -> None:
    assert (charts.PICTURES / name).read_text() == charts.charts()[name], "run python docs/charts.py"


def test_a_chart_has_a_bar_for_everything_that_ran() -> None:
    groups = {group.title: [bar.name for bar in group.bars] for group in (*charts.models(), *charts.kernels())}
    assert groups["causal"] == ["tilewise", "torch FlexAttention", "FA3", "FA4"]
    assert all(names[0] == "tilewise" for names in groups.values())


# -- in a package ----------------------------------------------------------------------------------------------------

ADDRESS = "https://example.org/owner/tilewise"
TARGET = re.compile(r"\]\(([^)]*)\)")


def test_a_published_readme_leads_into_the_repository() -> None:
    published = hatch_build.readme(TEXT, ADDRESS, "1.2.3")
    assert hatch_build.readme(published, None, "") == published, "nothing relative is left"
    for target, absolute in zip(TARGET.findall(TEXT), TARGET.findall(published), strict=True):
        kind = "raw" if target.endswith(".svg") else "blob"
        assert absolute == (target if target.startswith(("https://", "#")) else f"{ADDRESS}/{kind}/v1.2.3/{target}")
    assert TARGET.sub("", published) == TARGET.sub("", TEXT), "only targets change"


def test_a_readme_without_an_address_has_no_relative_link() -> None:
    published = hatch_build.readme(TEXT, None, "1.2.3")
    assert not [target for target in TARGET.findall(published) if not target.startswith(("https://", "#"))]
    assert "![" not in published and "[diffusers](docs" in TEXT and "| diffusers |" in published
    headings = re.compile("^#.*$", re.MULTILINE)
    assert headings.findall(published) == headings.findall(TEXT)


def test_addresses_of_a_package() -> None:
    assert hatch_build.urls(None, "1.2.3") == {}
    urls = hatch_build.urls(ADDRESS, "1.2.3")
    assert list(urls) == ["Homepage", "Documentation", "Source", "Changelog", "Issues"]
    for url in urls.values():
        assert url.startswith(ADDRESS)
        assert "/blob/" not in url or (ROOT / url.removeprefix(f"{ADDRESS}/blob/v1.2.3/")).is_file()


def test_the_address_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWISE_URL", raising=False)
    assert hatch_build.address_given() is None
    for given, address in (
        ("", None),
        (ADDRESS, ADDRESS),
        (ADDRESS + "/", ADDRESS),
        ("https://localhost:8443/~me/tilewise", "https://localhost:8443/~me/tilewise"),
    ):
        monkeypatch.setenv("TILEWISE_URL", given)
        assert hatch_build.address_given() == address


@pytest.mark.parametrize(
    "given",
    [
        "tilewise",
        "example.org/owner/tilewise",
        "http://example.org/tilewise",
        "git@example.org:owner/tilewise",
        "https://example.org",
        "https://user:secret@example.org/tilewise",
        *(ADDRESS + end for end in (".git", "?tab=readme", "#start", " (mirror)", "\\1")),
    ],
)
def test_an_address_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_URL", given)
    with pytest.raises(ValueError, match=r"TILEWISE_URL is the repository's address, such as https://.*; got "):
        hatch_build.address_given()


def test_what_a_build_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    hook = hatch_build.get_metadata_hook()(str(ROOT), {})
    monkeypatch.setenv("TILEWISE_URL", ADDRESS)
    built: dict[str, object] = {"version": "1.2.3"}
    hook.update(built)
    assert built["urls"] == hatch_build.urls(ADDRESS, "1.2.3")
    assert built["readme"] == {"content-type": "text/markdown", "text": hatch_build.readme(TEXT, ADDRESS, "1.2.3")}
    from_sdist = {"version": "1.2.3", "readme": "what the sdist says"}
    hook.update(from_sdist)
    assert from_sdist == {"version": "1.2.3", "readme": "what the sdist says", "urls": {}}
