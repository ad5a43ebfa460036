"""What mkdocs.yml cannot say: pages of the site that lie outside docs/, and the links to and from them.

Links are written for readers of the repository. On the site, a link to a page leads to that page, and one to a folder or a source file becomes its text.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def outside_pages() -> list[Path]:
    """Pages that do not lie in docs/; the site has them under the same names."""
    return [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "benchmarks" / "results").rglob("*.md"))]


def on_files(files: Files, config: Any) -> Files:
    for path in outside_pages():
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = Path(page.file.abs_src_path)
    return LINK.sub(lambda link: _on_site(link, source), markdown)


def _on_site(link: re.Match[str], source: Path) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    path = Path(os.path.normpath(source.parent / target))
    inside = ROOT / "docs"
    if not path.exists() or (source.is_relative_to(inside) and path.is_relative_to(inside)):
        return link[0]  # MkDocs checks it
    here, there = _place(source), _place(path)
    return text if there is None or here is None else f"[{text}]({Path(os.path.relpath(there, here.parent)).as_posix()}{anchor})"


def _place(path: Path) -> Path | None:
    """Where the site has a page; None if it has none."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs") if path.suffix == ".md" else None
    return path.relative_to(ROOT) if path in outside_pages() else None
