"""The guides, tried to the letter: their Python runs as it stands, and prints what they say."""

import contextlib
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.compare import engine_of
from tilewise.integrations import diffusers, transformers

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = [
    *[path for folder in ("clients", "guides", "recipes") for path in sorted((DOCS / folder).glob("*.md"))],
    DOCS / "sparse.md",
    DOCS / "serving.md",
    DOCS / "troubleshooting.md",
    DOCS / "index.md",
    DOCS / "masks.md",
    DOCS / "scores.md",
    DOCS / "choosing.md",
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def words(text: str) -> list[str]:
    """Which engine `flex` means depends on the machine; the guides show the one of most."""
    return re.findall(r"\w+|[^\w\s]", re.sub(r"\b(cpp|blocked)\b", engine_of("flex"), text))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_guide(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write a picture
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # it would stay
    names: dict[str, Any] = {}
    blocks = BLOCK.findall(path.read_text())
    for k, (language, code) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{path.name}, block {k}", "exec"), names)
        if k + 1 < len(blocks) and blocks[k + 1][0] == "text":
            assert words(printed.getvalue()) == words(blocks[k + 1][1])
    diffusers.unregister()
    transformers.unregister()
