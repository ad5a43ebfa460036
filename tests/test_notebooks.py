"""What notebooks show of explain() and watch(), and that no name gets into HTML as it is."""

from typing import Any

import torch
from torch import nn

import tilewise as tw
from tilewise import masks, scores
from tilewise.tools.html import Html, bar, table

HOSTILE = "<img src=x onerror=alert(1)>"


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(1, 2, 300, 16) for _ in range(3))  # type: ignore[return-value]  # three, as the range says


def test_explain_names_the_scores() -> None:
    def steeper(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * 2

    found = tw.explain(*tensors(), mask=masks.causal, score=[scores.alibi(2), steeper, scores.sinks(torch.zeros(2))])
    assert found.score == "alibi(2), steeper, sinks"
    assert "mask causal, score alibi(2), steeper, sinks" in str(found).split("\n")[0]
    assert tw.explain(*tensors(), score=scores.softcap(30.0)).score == "softcap(30.0)"
    assert "score" not in str(tw.explain(*tensors(), mask=masks.causal)).split("\n")[0]


def test_explain_in_a_notebook() -> None:
    found = tw.explain(*tensors(), mask=masks.causal & masks.sliding_window(64), score=scores.softcap(30.0))
    html = found._repr_html_()
    assert found.tile_map is not None and found.tile_map._repr_html_() in html
    for text in ("softcap(30.0)", "causal &amp; sliding_window(64)", "tiles of 128 x 128", *[v.engine for v in found.verdicts]):
        assert text in html
    assert "<svg" not in tw.explain(*tensors())._repr_html_()


def test_explain_escapes_names() -> None:
    mask = masks.Mask(lambda b, h, q, kv: q >= kv, HOSTILE)
    score = scores.Score(lambda score, b, h, q, kv: score, HOSTILE)
    html = tw.explain(*tensors(), mask=mask, score=score)._repr_html_()
    assert "<img" not in html and html.count("&lt;img src=x") >= 3


class Attention(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, k, v, mask=self.mask, backend="blocked")


class Bypassing(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.attention = Attention(mask)
        self.other = TorchAttention()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q, k, v) + self.other(q, k, v)


class TorchAttention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_watch_in_a_notebook() -> None:
    model = Bypassing(masks.Mask(lambda b, h, q, kv: q - kv >= 128, HOSTILE))
    with tw.watch(model) as w:
        model(*tensors())
    html = w._repr_html_()
    assert "<img" not in html and "&lt;img src=x" in html
    assert bar(1 - 3 / 9) in html and "33.3%" not in html  # 3 of 9 tiles are computed
    assert "BYPASS: torch SDPA" in html and "tilewise.integrations.route(model)" in html


def test_cells_are_text_unless_they_say_otherwise() -> None:
    assert table(["<b>"], [["a & b", Html("<i>x</i>")]]).count("<b>") == 0
    assert "a &amp; b" in table([], [["a & b"]]) and "<i>x</i>" in table([], [[Html("<i>x</i>")]])
