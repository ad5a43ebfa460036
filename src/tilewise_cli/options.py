"""Options that several commands have, and what makes their values usable."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

PICTURES = (".png", ".pdf", ".svg", ".jpg")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Device = Annotated[str, typer.Option(help="Device to run on; the GPU if there is one, unless given.", autocompletion=lambda: ["cpu", "cuda"])]
Picture = Annotated[Path, typer.Option(help="Where to draw the bars.")]


def usable(device: str) -> "torch.device":
    """The device of an option; the GPU if there is one, unless given."""
    import torch

    if not device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError for "not compiled with CUDA"
        raise typer.BadParameter(f"torch cannot use the device {device!r} here: {str(error).splitlines()[0][:120]}", param_hint="--device") from None
    return torch.device(device)


def picture(out: Path) -> Path:
    """A file to draw into, in a folder that exists: an error now, not after minutes of measuring."""
    if out.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"{out} is no picture; its name must end in one of {', '.join(PICTURES)}", param_hint="--out")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out
