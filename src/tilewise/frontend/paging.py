"""Keys and values in pages: what a call asks for, as a problem whose mask and score see logical positions.

Query i of sequence n stands at position lengths[n] - (the sequence's queries) + i, and keys 0 .. lengths[n] - 1 can be attended. Engines know pages by an
address (core/pages.py); all else is in the mask, so that nothing but a kernel ever looks at lengths, and a step's new lengths are no new call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.pages import Pages
from tilewise.core.recording import unrecorded
from tilewise.core.weak_cache import WeakCache
from tilewise.errors import InputError
from tilewise.frontend.packing import check_contents, check_offsets, contents_on_stream, sequence_and_position
from tilewise.masks import Mask
from tilewise.memory import can_be_looked_at, check_dense
from tilewise.named import Named
from tilewise.scores import Score, ScoreFunction, Sinks, as_scores

TOKENS_APART = 4  # per sequence, on average: up to so many queries are decoded one by one, each over the keys of its sequence

# From b, h, q and kv of the problem to the sequence's number, the query's and the key's position in it, and whether the key is one of that sequence's.
Logical = Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, Any]]


class PagedQueries(NamedTuple):
    """Queries as (batch, heads, queries, head dim), and the pages of each batch element."""

    query: Tensor
    pages: Pages
    logical: Logical
    tokens_apart: bool = False  # the batch elements are single tokens of a packed batch


def check_pages(k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor) -> None:
    """Raises unless tensors can be pages, a table and lengths. On a CPU what these hold is checked too; on a GPU that would wait for all work before."""
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise InputError(f"{name} must be a tensor (pages, page size, kv heads, head dim), got {_shape(tensor)}")
        if tensor.shape[1] == 0:
            raise InputError(f"pages must have at least one row, got {name} {tuple(tensor.shape)}: (pages, page size, kv heads, head dim)")
    for name, tensor, dims, meaning in (("page_table", table, 2, "(batch, most pages)"), ("kv_lengths", lengths, 1, "(batch,)")):
        if not isinstance(tensor, Tensor) or tensor.dim() != dims or tensor.dtype not in (torch.int32, torch.int64):
            kind = f"{tensor.dtype}, " if isinstance(tensor, Tensor) else ""
            raise InputError(f"{name} must be an int32 tensor {meaning} (int64 is converted in every call), got {kind}{_shape(tensor)}")
        check_dense(tensor, name)
        if tensor.device != k_pages.device:
            raise InputError(f"{name} is on {tensor.device}, the pages are on {k_pages.device}: they must be on one device")
    if table.shape[0] != lengths.shape[0]:
        raise InputError(f"page_table has {table.shape[0]} sequences, kv_lengths {lengths.shape[0]}")
    if can_be_looked_at(table) and can_be_looked_at(lengths) and k_pages.device.type == "cpu":
        _check_page_numbers(k_pages, table, lengths)


def _check_page_numbers(k_pages: Tensor, table: Tensor, lengths: Tensor) -> None:
    count, size = k_pages.shape[:2]
    most = table.shape[1] * size
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > most):
        held = f"which {table.shape[1]} pages of {size} rows hold (k_pages is (pages, page size, kv heads, head dim), here {tuple(k_pages.shape)})"
        raise InputError(f"kv_lengths must be from 0 to {most}, {held}, got {lengths.tolist()[:8]}")
    used = torch.arange(table.shape[1]) * size < lengths.unsqueeze(1)
    wrong = used & ((table < 0) | (table >= count))
    if bool(wrong.any()):
        n, at = wrong.nonzero()[0].tolist()
        raise InputError(f"page_table[{n}, {at}] is {int(table[n, at])}, but there are {count} pages; sequence {n} has {int(lengths[n])} keys")


def _check_queries(lengths: Tensor, counts: Tensor | int) -> None:
    """Raises where a sequence has more queries than keys, unless it has none, as a place in a batch that is not in use; where that can be known at once."""
    if lengths.device.type != "cpu" or not can_be_looked_at(lengths) or (isinstance(counts, Tensor) and not can_be_looked_at(counts)):
        return
    wrong = (lengths < counts) & (lengths > 0)
    if bool(wrong.any()):
        n = int(wrong.nonzero()[0])
        queries = int(counts[n]) if isinstance(counts, Tensor) else counts
        raise InputError(f"sequence {n} has {queries} queries but kv_lengths[{n}] is {int(lengths[n])}: it counts the keys of the queries, too")


def _shape(tensor: Any) -> str:
    return f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__


# -- three forms ----------------------------------------------------------------------------------------------------------


def batched(query: Tensor, size: int, table: Tensor, lengths: Tensor, all_attended: bool, v_scale: float) -> PagedQueries:
    """As many queries of every sequence, (batch, heads, queries, head dim)."""
    if query.shape[0] != table.shape[0]:
        raise InputError(f"query has batch size {query.shape[0]}, page_table {table.shape[0]} sequences")
    n_q = query.shape[2]
    _check_queries(lengths, n_q)

    def logical(b: Any, h: Any, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
        length = lengths[b]
        return b, q + (length - n_q), kv, kv < length

    return PagedQueries(query, Pages(table, size, lengths, all_attended, v_scale), logical)


def packed(query: Tensor, size: int, table: Tensor, lengths: Tensor, offsets: Tensor, all_attended: bool, v_scale: float) -> PagedQueries:
    """Queries of different sequences end to end, (tokens, heads, head dim): as a batch of single queries where sequences have few, so that each reads its own
    keys and nothing else; else as one sequence over the keys of all, of which tile maps leave out what is another sequence's."""
    check_offsets(offsets, "cu_seqlens_q")
    if offsets.shape[0] != table.shape[0] + 1:
        raise InputError(f"cu_seqlens_q describes {offsets.shape[0] - 1} sequences, page_table {table.shape[0]}")
    tokens, sequences = query.shape[0], table.shape[0]
    known = _tokens_of(query, table, lengths, offsets)
    number, position, own_lengths = known.number, known.position, known.lengths
    if tokens <= TOKENS_APART * sequences:

        def of_token(b: Any, h: Any, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
            return number[b], position[b], kv, kv < own_lengths[b]

        return PagedQueries(query.unsqueeze(2), Pages(known.table, size, own_lengths, all_attended, v_scale), of_token, tokens_apart=True)
    capacity = table.shape[1] * size

    def of_all(b: Any, h: Any, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
        n = number[q]
        j = kv - n * capacity
        return n, position[q], j, (j >= 0) & (j < own_lengths[q])

    every = Pages(table.reshape(1, -1), size, lengths, False, v_scale)  # tokens past the last sequence see nothing, so the mask has to be asked
    return PagedQueries(query.transpose(0, 1).unsqueeze(0), every, of_all)


class _Tokens(NamedTuple):
    """Of packed queries: each token's sequence and position, and the table and lengths of a batch of single tokens. Tokens past the last sequence have no
    keys."""

    number: Tensor  # [tokens] int32
    position: Tensor  # [tokens] int32
    lengths: Tensor  # [tokens] int32
    table: Tensor  # [tokens, most] int32


MAX_BATCHES = 64
_known: WeakCache[_Tokens] = WeakCache(MAX_BATCHES)


def _tokens_of(query: Tensor, table: Tensor, lengths: Tensor, offsets: Tensor) -> _Tokens:
    """Made once for the contents of table, lengths and offsets: all layers of a step share it, and with it their calls' keys.

    The key is what the contents are known by, the number of tokens, and the stream on which the tensors were made: another might read them too soon. Tensors
    without such a key, and those in a CUDA graph, which must make these itself, are looked at in every call.
    """
    sources = (table, lengths, offsets)
    contents = contents_on_stream(sources, query.device)
    key = None if contents is None else (contents, query.shape[0])
    found = None if key is None else _known.find(key, sources)
    if found is not None:
        return found
    with unrecorded(), torch.inference_mode(False):
        check_contents(offsets, query.shape[0], "cu_seqlens_q")
        _check_queries(lengths, (offsets[1:] - offsets[:-1]).to(lengths.device))
        number, place = sequence_and_position(offsets.to(query.device), query.shape[0])
        n = number.clamp(min=0)
        of_sequence = lengths[n].to(torch.int32)
        count = (offsets[1:] - offsets[:-1]).to(query.device)[n]
        own = torch.where(number >= 0, of_sequence, 0)
        made = _Tokens(n.to(torch.int32), (of_sequence - count + place).to(torch.int32), own, table[n])
    if key is not None:
        _known.keep(key, sources, made)
    return made


# -- masks and scores ---------------------------------------------------------------------------------------------------


def in_pages(paged: PagedQueries, mask: Any, score: ScoreFunction | Sequence[ScoreFunction] | None, sequences: int) -> tuple[Mask, list[Any]]:
    """The user's mask and scores, which see logical positions."""
    if mask is not None and not callable(mask):
        raise InputError(f"keys in pages take a mask function or a mask of tilewise.masks, which see positions in each sequence; got {type(mask).__name__}")
    scores = as_scores(score)
    for function in (mask, *scores):
        if isinstance(function, Named):
            function.check_sizes({"b": sequences, "h": paged.query.shape[1]})
    return _placed(paged.logical, mask), [s if isinstance(s, Sinks) else _placed_score(paged.logical, s) for s in scores]


def _placed(logical: Logical, mask: Any) -> Mask:
    def in_sequence(b: Any, h: Any, q: Any, kv: Any) -> Any:
        n, i, j, inside = logical(b, h, q, kv)
        return inside if mask is None else inside & mask(n, h, i, j)

    label = "paged" if mask is None else f"paged {getattr(mask, 'name', 'mask')}"
    return Mask(in_sequence, label, fixed=mask is None)


def _placed_score(logical: Logical, function: ScoreFunction) -> Score:
    def placed(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        n, i, j, _ = logical(b, h, q, kv)
        return function(s, n, h, i, j)

    return Score(placed, getattr(function, "name", "score"))
