"""What is learned from: a folder of pictures, or shapes drawn on the spot. Every step draws its batch from (seed, step) alone."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
SHAPES = ("disc", "square", "stripes")
CAPTION = 20  # pixels for the labels below sample pictures


class Pictures:
    """Pictures in [-1, 1], (3, size, size), with a label each."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(count, 3, size, size) pictures and the numbers of their labels."""
        raise NotImplementedError


class Drawn(Pictures):
    """A bright shape somewhere on a dark ground, in a colour that belongs to the shape."""

    def __init__(self, size: int) -> None:
        super().__init__(list(SHAPES))
        self.size = size
        self.rows, self.columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, len(SHAPES), (count,), generator=generator)
        centres = torch.randint(self.size // 3, self.size - self.size // 3, (count, 2), generator=generator)
        return torch.stack([self._draw(int(label), centre) for label, centre in zip(labels, centres, strict=True)]), labels

    def _draw(self, label: int, centre: Tensor) -> Tensor:
        down, right = (self.rows - centre[0]).abs(), (self.columns - centre[1]).abs()
        reach = self.size // 4
        inside = [down**2 + right**2 <= reach**2, torch.maximum(down, right) <= reach, (self.rows + int(centre[0])) % 4 < 2][label]
        colour = torch.tensor([[1.0, 0.2, -0.6], [-0.6, 1.0, 0.2], [0.2, -0.6, 1.0]])[label].view(3, 1, 1)
        return torch.where(inside, colour, -0.9)


class Folder(Pictures):
    """Every picture below a folder; its label is the name of the folder it lies in."""

    def __init__(self, folder: Path, size: int) -> None:
        self.files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
        if not self.files:
            raise SystemExit(f"{folder} holds no pictures ({', '.join(sorted(ENDINGS))})")
        super().__init__(sorted({path.parent.name for path in self.files}))
        self.size = size

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = [self.files[k] for k in torch.randint(0, len(self.files), (count,), generator=generator).tolist()]
        return torch.stack([self._open(path) for path in chosen]), torch.tensor([self.labels.index(path.parent.name) for path in chosen])

    def _open(self, path: Path) -> Tensor:
        """The middle square of the picture, at the size that is trained."""
        picture = Image.open(path).convert("RGB")
        edge = min(picture.size)
        left, top = (picture.width - edge) // 2, (picture.height - edge) // 2
        square = picture.crop((left, top, left + edge, top + edge)).resize((self.size, self.size), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1).float() / 127.5 - 1


def pictures(folder: str | None, size: int) -> Pictures:
    return Drawn(size) if folder is None else Folder(Path(folder), size)


def save_row(images: Tensor, labels: list[str], path: Path, zoom: int = 4) -> None:
    """(n, 3, size, size) in [-1, 1], side by side, each with its label below, as a PNG."""
    row = torch.cat(list(images.clamp(-1, 1).float().cpu()), dim=-1)
    pixels = ((row + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    drawn = Image.fromarray(pixels)
    drawn = drawn.resize((drawn.width * zoom, drawn.height * zoom), Image.Resampling.NEAREST)
    sheet = Image.new("RGB", (drawn.width, drawn.height + CAPTION), "white")
    sheet.paste(drawn)
    pen = ImageDraw.Draw(sheet)
    for k, label in enumerate(labels):
        pen.text(((k + 0.5) * drawn.width / len(labels), drawn.height + CAPTION // 2), label, fill="black", anchor="mm")
    sheet.save(path)
