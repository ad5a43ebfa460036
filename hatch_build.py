"""The README and the addresses that a package carries. Hatchling runs this in every build (`[tool.hatch.metadata.hooks.custom]`).

A package index cannot follow links into the repository. Where the repository is published is said when a package is built, by `make package URL=https://...`
or TILEWISE_URL: links and pictures then lead to the version's tag. Without it the package has no addresses, pictures are left out, and links become their text.
"""

import os
import re
from pathlib import Path
from typing import Any

PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?://)([^)]*)\)(\n*)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#)([^)]*)\)")
ADDRESS = re.compile(r"https://[\w.-]+(:\d+)?(/[\w.~-]+)+(?<!\.git)")


def address_given() -> str | None:
    """Where the repository is published, without a slash at the end; None if nobody said."""
    given = os.environ.get("TILEWISE_URL", "").rstrip("/")
    if given and not ADDRESS.fullmatch(given):
        raise ValueError(f"TILEWISE_URL is the repository's address, such as https://example.org/owner/tilewise, without .git, ? and #; got {given!r}")
    return given or None


def urls(address: str | None, version: str) -> dict[str, str]:
    """What an index shows beside the package."""
    if address is None:
        return {}
    tag = f"{address}/blob/v{version}"
    return {"Homepage": address, "Documentation": f"{tag}/docs/index.md", "Source": address, "Changelog": f"{tag}/CHANGELOG.md", "Issues": f"{address}/issues"}


def readme(text: str, address: str | None, version: str) -> str:
    """The README without a relative link."""
    if address is None:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    text = PICTURE.sub(rf"![\1]({address}/raw/v{version}/\2)\3", text)
    return LINK.sub(rf"[\1]({address}/blob/v{version}/\2)", text)


def get_metadata_hook() -> type[Any]:
    """Hatchling asks for the hook by this name."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface

    class PublishedText(MetadataHookInterface):
        def update(self, metadata: dict[str, Any]) -> None:
            if "readme" in metadata:  # built from an sdist, which was made with an address or without: it stays that way
                metadata.setdefault("urls", {})
                return
            address, version = address_given(), metadata["version"]
            text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
            metadata["urls"] = urls(address, version)
            metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, address, version)}

    return PublishedText
