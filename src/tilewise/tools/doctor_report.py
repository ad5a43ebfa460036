"""The doctor's findings as one block to paste into an issue, without user names and home folders."""

import getpass
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tilewise.tools.doctor import Finding

PREFIX = "TILEWISE_"
HOMES = re.compile(r"(?:/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\\s'\",;:]+")


def as_block(findings: Sequence[Finding]) -> str:
    """Markdown: a fenced block of one line for each finding, and one for each environment variable of tilewise that is set."""
    width = max(len(f.what) for f in findings)
    lines = [f"{f.status:<7}  {f.what:<{width}}  {f.detail}" for f in findings]
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)]
    return "\n".join(["```text", *[anonymous(line) for line in [*lines, "", *(variables or [f"no {PREFIX} variable is set"])]], "```"])


def anonymous(text: str) -> str:
    """The text with home folders written as ~, and the user's name, where it is part of a path, as <user>."""
    home, user = _home(), _user()
    for folder in sorted({home, os.path.realpath(home)} if home else (), key=len, reverse=True):
        text = re.sub(rf"{re.escape(folder)}(?![\w.-])", "~", text)
    text = HOMES.sub("~", text)
    return re.sub(rf"(?<=[/\\]){re.escape(user)}(?![\w.])|(?<=[-_.]){re.escape(user)}(?=[/\\])", "<user>", text) if user else text


def _home() -> str:
    """Empty if there is none, or if it is the root folder, which says nothing of anybody."""
    with suppress(RuntimeError):
        found = str(Path.home())
        return "" if found == os.path.sep else found
    return ""


def _user() -> str:
    with suppress(OSError, KeyError):  # a container's user may have no name
        return getpass.getuser()
    return ""
