"""What the gallery shows: every mask and score of the library, as a line of Python for sequences of n tokens.

docs/gallery.py makes the page and the pictures of it, docs/gallery_notebook.py the notebook.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MaskEntry:
    name: str
    call: str  # the mask
    definition: str
    use: str  # when
    formula: str = ""  # of b, h, q and kv: true where the mask allows
    given: str = ""  # lines that make what the call and the formula need
    batch: int = 1
    queries: str = "n"
    keys: str = "n"

    @property
    def text(self) -> str:
        return self.definition + (f" Allowed where `{self.formula}`." if self.formula else "")

    @property
    def code(self) -> str:
        return f"{self.given}\nmask = {self.call}".lstrip("\n")


@dataclass(frozen=True)
class ScoreEntry:
    name: str
    call: str  # the score
    definition: str
    use: str
    formula: str = ""  # of score, b, h, q and kv: the new score
    given: str = ""
    mask: str = "masks.full"  # that it is used with
    drawn: str = "score(torch.zeros(n, n), b, h, q, kv)"  # what the element view shows, of a head
    caption: str = "added to the score"

    @property
    def text(self) -> str:
        return self.definition + (f" The new score is `{self.formula}`." if self.formula else "")

    @property
    def code(self) -> str:
        return f"{self.given}\nscore = {self.call}".lstrip("\n")


GRID = "height, width = (8, 16) if n == 128 else (32, 64)"
PLUS = """


def plus(b, h, q, kv):
    return ((q // width == kv // width) & ((q - kv).abs() <= 3)) | ((q % width == kv % width) & ((q - kv).abs() <= 3 * width))

"""

MASKS = (
    MaskEntry(
        "full",
        "masks.full",
        "Every query attends to every key.",
        "Encoders and diffusion models. It is what no mask at all means, and the neutral element of `&`.",
        "True",
    ),
    MaskEntry(
        "causal",
        "masks.causal",
        "A query attends to itself and to the keys before it; query 0 is aligned with key 0, as in torch's SDPA.",
        "Training and prefill of decoders, where there are as many queries as keys.",
        "q >= kv",
    ),
    MaskEntry(
        "causal_lower_right",
        "masks.causal_lower_right(n // 2, n)",
        "Causal, with the last query aligned with the last key.",
        "New tokens that continue a KV cache: chunked prefill, and decoding of several tokens.",
        "kv <= q + n // 2",
        queries="n // 2",
    ),
    MaskEntry(
        "sliding_window",
        "masks.sliding_window(n // 8)",
        "Keys up to `left` before and `right` after the query; `right` is `left` unless given.",
        "Long sequences whose tokens need only their surroundings. `sliding_window(w)` is a window of 2 w + 1 keys.",
        "(q - kv).abs() <= n // 8",
    ),
    MaskEntry(
        "causal and sliding_window",
        "masks.causal & masks.sliding_window(n // 8)",
        "The query and the `left` keys before it.",
        "Decoders with local attention (Mistral, Gemma). A window of w keys elsewhere is often `sliding_window(w - 1)` here: the query's own key counts.",
        "(q >= kv) & (q - kv <= n // 8)",
    ),
    MaskEntry(
        "dilated_window",
        "masks.dilated_window(n // 4, 4)",
        "Every `dilation`-th key within `reach` on either side.",
        "A wide view for few keys. Tiles inside the window are all partial: the time saved comes from the reach, not from the dilation.",
        "((q - kv).abs() <= n // 4) & ((q - kv) % 4 == 0)",
    ),
    MaskEntry(
        "prefix_lm",
        "masks.prefix_lm(n // 4)",
        "All queries attend to the first `prefix` keys; the rest is causal.",
        "Prompts read in both directions: prefix language models, images before text. A tensor gives each batch element its own prefix.",
        "(kv < n // 4) | (q >= kv)",
    ),
    MaskEntry(
        "document",
        "masks.document(ids)",
        "Tokens attend within their own document.",
        "Packed sequences, packed images, several samples in a row without padding between them.",
        "ids[q] == ids[kv]",
        "ids = torch.arange(n) * 5 // n  # five documents",
    ),
    MaskEntry(
        "document and causal",
        "masks.document(lengths=[n // 2, n // 8, n // 4, n // 8]) & masks.causal",
        "Causal within each document.",
        "Packing for the training of language models.",
        "(ids[q] == ids[kv]) & (q >= kv)",
        "ids = torch.repeat_interleave(torch.arange(4), torch.tensor([n // 2, n // 8, n // 4, n // 8]))",
    ),
    MaskEntry(
        "padding",
        "masks.padding(lengths)",
        "Key `kv` of batch element `b` counts only if it is before `lengths[b]`.",
        "Batches of texts padded on the right.",
        "kv < lengths[b]",
        "lengths = torch.tensor([3 * n // 8, n])  # of two batch elements",
        batch=2,
    ),
    MaskEntry(
        "global_tokens",
        "masks.global_tokens(n // 16)",
        "Marked tokens attend to all and are attended by all: the first so many, or those of a boolean tensor.",
        "Registers and class tokens, together with a window: `masks.sliding_window(w) | masks.global_tokens(4)` (Longformer, BigBird).",
        "(q < n // 16) | (kv < n // 16)",
    ),
    MaskEntry(
        "shared_prefix",
        "masks.shared_prefix([n // 4, n // 8, n // 8, n // 4, n // 8, n // 8], prefix_of=[0, 0, 0, 3, 3, 3])",
        "Packed documents, each causal, of which some also see the whole of the prompt that they continue.",
        "Several answers to one prompt without repeating it: preference training, sampling, reranking.",
    ),
    MaskEntry(
        "block_diffusion",
        "masks.block_diffusion(n // 2, block=n // 16)",
        "Noised blocks attend to themselves and to the clean blocks before them; clean blocks attend to clean blocks up to their own.",
        "Training of block diffusion language models on a noised and a clean copy at once.",
    ),
    MaskEntry(
        "tree",
        "masks.tree(parents, prefix=3 * n // 4)",
        "A node attends to a common prefix, to its ancestors and to itself.",
        "Speculative decoding of a tree of candidates in one call.",
        given="parents = [(k - 1) // 2 if k else -1 for k in range(n // 4)]  # a binary tree",
        queries="n // 4",
    ),
    MaskEntry(
        "neighborhood",
        "masks.neighborhood((height, width), 5)",
        "The nearest tokens along every axis of a 1-D, 2-D or 3-D grid; at borders the window moves inwards.",
        "Images and video, as in NATTEN. Tokens are computed in patches where that leaves fewer tiles than the row-by-row order counted here.",
        "((kv // width - (q // width).clamp(2, height - 3)).abs() <= 2) & ((kv % width - (q % width).clamp(2, width - 3)).abs() <= 2)",
        GRID,
    ),
    MaskEntry(
        "on_grid",
        "masks.on_grid(plus, (height, width), 7)",
        "What the given mask allows; says that its tokens are the points of a grid.",
        "Masks of your own for images and video: tokens may then be computed in patches.",
        "((q // width == kv // width) & ((q - kv).abs() <= 3)) | ((q % width == kv % width) & ((q - kv).abs() <= 3 * width))",
        GRID + PLUS,
    ),
    MaskEntry(
        "sliding_tile",
        "masks.sliding_tile((height, width), window=(height // 2, width // 2), tile=(4, 4))",
        "The neighborhood of whole tiles, on tokens that are stored tile after tile; then text tokens, which see all and are seen by all.",
        "Video diffusion with tokens stored in tiles: hardly a tile is partial.",
        given=GRID,
    ),
    MaskEntry(
        "radial",
        "masks.radial(8, n // 8, decay=0.25, least=n // 64)",
        "A token of a video sees its own frame, the first frame, and the places around its own in the others: half as many for every doubling of the distance.",
        "Video diffusion, trained or fine-tuned with it (Radial Attention).",
    ),
    MaskEntry(
        "spatial_temporal",
        "masks.spatial_temporal(8, n // 8, temporal, token_reach=n // 64)",
        "Some heads see their own frame and its neighbours, others the places around their own in all frames. The first head, drawn here, looks through time.",
        "Video diffusion in which each head is found to be of one of the two kinds (Sparse VideoGen).",
        "((q % (n // 8) - kv % (n // 8)).abs() <= n // 64) & temporal[h] | (q // (n // 8) == kv // (n // 8)) & ~temporal[h]",
        "temporal = torch.arange(heads) % 2 == 0  # by head",
    ),
    MaskEntry(
        "cross",
        "masks.cross(seen, tokens_per_image=n // 4)",
        "Image `i` is attended by queries from `seen[i, 0]` up to before `seen[i, 1]`.",
        "Texts with images between their words, in models with cross-attention.",
        "(q >= seen[kv // (n // 4), 0]) & (q < seen[kv // (n // 4), 1])",
        "seen = torch.tensor([[0, n // 2], [n // 4, n // 2], [n // 2, n], [3 * n // 4, n]])  # by which queries",
    ),
    MaskEntry(
        "per_batch",
        "masks.per_batch([masks.causal, masks.full], which)",
        "Batch element `b` uses mask `which[b]`.",
        "Batches of several tasks: causal text beside bidirectional images.",
        "(q >= kv) | (which[b] == 1)",
        "which = torch.tensor([0, 1])",
        batch=2,
    ),
)

SCORES = (
    ScoreEntry(
        "alibi",
        "scores.alibi(heads)",
        "A penalty that grows with the distance, with a slope for each head.",
        "Decoders without position embeddings (BLOOM, MPT).",
        "score - scores.alibi_slopes(heads)[h] * (q - kv)",
        mask="masks.causal",
    ),
    ScoreEntry(
        "softcap",
        "scores.softcap(30.0)",
        "Scores are bent smoothly into the range from `-cap` to `cap`.",
        "Gemma 2 and others that keep logits from growing.",
        "30.0 * torch.tanh(score / 30.0)",
        drawn="score(90.0 * (q - kv) / n, b, h, q, kv)",
        caption="softcap of scores from -90 to 90",
    ),
    ScoreEntry(
        "relative_bias",
        "scores.relative_bias(table)",
        "A learned bias for each head and relative position; beyond the reach, that of the edge.",
        "Learned relative positions (Swin, Music Transformer and others). `tilewise.nn.RelativeBias` is the module.",
        "score + table[h, (q - kv).clamp(-reach, reach) + reach]",
        """reach = n // 4
table = torch.linspace(-1, 1, 2 * reach + 1).repeat(heads, 1)""",
    ),
    ScoreEntry(
        "relative_bias with T5 buckets",
        'scores.relative_bias(table, buckets="t5")',
        "T5's bias: relative positions share buckets, the larger the farther away.",
        "T5 and its relatives. `tilewise.nn.T5Bias` is the module.",
        "score + table[scores.t5_buckets(32, 128, True)[(kv - q).clamp(-128, 128) + 128], h]",
        "table = torch.linspace(-1, 1, 32)[:, None].repeat(1, heads)",
    ),
    ScoreEntry(
        "bias",
        "scores.bias(tensor)",
        "A tensor, broadcast over batch elements, heads, queries and keys, is added.",
        "Any bias that you have as a tensor, learned or not: here one value per head and key.",
        "score + tensor[h, 0, kv]",
        "tensor = torch.linspace(-1, 1, n).repeat(heads, 1, 1)",
    ),
    ScoreEntry(
        "distance_decay",
        "scores.distance_decay(8 / n)",
        "A penalty proportional to the distance in either direction; the rate may be one per head, and learned.",
        "Bidirectional models that should look near rather than far.",
        "score - 8 / n * (q - kv).abs()",
    ),
    ScoreEntry(
        "sinks",
        "scores.sinks(logits)",
        "One logit per head joins the softmax's denominator, so that a row's weights may sum to less than 1.",
        "Models trained with attention sinks (gpt-oss).",
        given="logits = torch.full((heads,), 2.0)",
        mask="masks.causal",
        drawn="(q + 1) / (q + 1 + torch.exp(logits[h])) + 0 * kv",
        caption="sum of the row's weights, where all scores are 0",
    ),
)
