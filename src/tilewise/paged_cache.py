"""PagedCache: keys and values of many growing sequences in pages, for paged_attention."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from tilewise.core.problem import DTYPES, FLOAT8
from tilewise.errors import InputError, MisuseError
from tilewise.frontend.kv_scales import checked_scale
from tilewise.paged import paged_attention
from tilewise.scores import ScoreFunction

__all__ = ["PagedCache", "Step"]


class Step(NamedTuple):
    """New tokens of some sequences, packed in the order in which append() was given these. To be used until the next append(), or until one of its sequences
    is freed: later, write() and attention() refuse it.

    Attributes:
        slots: Of each sequence, in order. Masks and scores see a sequence's place in here as b.
        page_table: (sequences, most pages), int32, for paged_attention, as are the next two. With one new token each, as wide as the cache's; else as needed.
        kv_lengths: (sequences,), int32, the new tokens included.
        cu_seqlens_q: (sequences + 1,), int32: where each sequence's new tokens begin.
        positions: (tokens,), int64: of each new token in its sequence.
        rows: (tokens,), int64: where each new token's key and value are written: page * page size + row.
        one_each: Every sequence has one new token: a step of decoding.
        number: By which the cache knows its latest step.
    """

    slots: tuple[int, ...]
    page_table: Tensor
    kv_lengths: Tensor
    cu_seqlens_q: Tensor
    positions: Tensor
    rows: Tensor
    one_each: bool
    number: int


TENSORS = ("page_table", "kv_lengths", "cu_seqlens_q", "positions", "rows")  # of a Step
_numbers = itertools.count(1)  # of the steps of all caches


class PagedCache:
    """Pages of keys and values for all layers of a model, and which sequence has which of them.

    A sequence has a slot: a row of the table and a length, shared by all layers. Pages are handed out as sequences grow, and go back when they are freed. Table
    and lengths are changed in place. Steps of one new token for each of n sequences use the same tensors every time, so that their calls of paged_attention are
    the same call, and can be captured in a CUDA graph. Which pages are free is known on the host: nothing waits for a GPU.

        slot = cache.allocate()
        step = cache.append({slot: 5})  # room for five tokens
        for layer in ...:
            cache.write(layer, step, key, value)
            out = cache.attention(layer, step, query, mask=masks.causal)
        cache.free(slot)

    Args:
        layers: Layers of the model.
        pages: Pages of each layer, which all sequences share.
        page_size: Tokens that a page holds.
        kv_heads: Heads of keys and values.
        head_dim: Of keys, and of values unless `v_head_dim` is given.
        slots: Most sequences at one time.
        max_tokens: The longest that a sequence can be.
        v_head_dim: Head dim of values.
        dtype: What pages hold: the query's dtype, float8_e4m3fn or float8_e5m2.
        device: Where pages, table and lengths are.
        k_scale: What keys are divided by before they are stored: one number, or a tensor that broadcasts to (layers, kv heads). For float8, whose numbers end
            at 448 (e4m3) and 57344 (e5m2); larger ones are stored as these.
        v_scale: The same for values.

    Attributes:
        k_pages: Of each layer, (pages, page size, kv heads, head dim).
        v_pages: The same of values.
        page_table: (slots, most pages), int32.
        lengths: (slots,), int32; 0 for slots that are not in use.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        max_tokens: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> None:
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim, "slots": slots, "max_tokens": max_tokens}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {size!r}")
        if dtype not in (*DTYPES, *FLOAT8):
            raise InputError(f"pages are float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2, got {dtype}")
        self.page_size = page_size
        with torch.inference_mode(False):  # tensors made in inference mode have no version, by which steps are told apart
            shape = (pages, page_size, kv_heads)
            self.k_pages = [torch.zeros((*shape, head_dim), dtype=dtype, device=device) for _ in range(layers)]
            self.v_pages = [torch.zeros((*shape, head_dim if v_head_dim is None else v_head_dim), dtype=dtype, device=device) for _ in range(layers)]
            self.page_table = torch.zeros((slots, -(-max_tokens // page_size)), dtype=torch.int32, device=device)
            self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self._k_scales, self._v_scales = (self._for_layers(scale, name) for scale, name in ((k_scale, "k_scale"), (v_scale, "v_scale")))
        self._max_tokens = max_tokens
        self._free_pages = list(range(pages))[::-1]
        self._free_slots = list(range(slots))[::-1]
        self._pages: dict[int, list[int]] = {}  # of slots in use
        self._lengths: dict[int, int] = {}
        self._decoding: dict[int, Step] = {}  # by the number of sequences
        self._latest = 0  # the number of the step that can be written
        self._latest_slots: tuple[int, ...] = ()

    def __repr__(self) -> str:
        total, slots = self.k_pages[0].shape[0], self.lengths.shape[0]
        pages = f"{self.pages_in_use} of {total} pages of {self.page_size} tokens in use"
        return f"PagedCache({len(self.k_pages)} layers, {pages}, {len(self._lengths)} of {slots} slots)"

    # -- sequences -----------------------------------------------------------------------------------------------------

    @property
    def pages_in_use(self) -> int:
        return self.k_pages[0].shape[0] - len(self._free_pages)

    @property
    def pages_free(self) -> int:
        return len(self._free_pages)

    @property
    def slots_free(self) -> int:
        return len(self._free_slots)

    def length(self, slot: int) -> int:
        """Tokens of a slot's sequence, as the host knows them."""
        self._check_used(slot)
        return self._lengths[slot]

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens of one sequence take."""
        return -(-tokens // self.page_size)

    def allocate(self) -> int:
        """A slot for a new sequence, which has no tokens and no pages yet."""
        if not self._free_slots:
            raise MisuseError(f"all {self.lengths.shape[0]} slots are in use: free() a finished sequence first, or make the cache with more slots")
        slot = self._free_slots.pop()
        self._pages[slot], self._lengths[slot] = [], 0
        return slot

    def has_room(self, counts: Mapping[int, int]) -> bool:
        """Whether append(counts) would find enough free pages, and no sequence would be longer than max_tokens."""
        self._check_counts(counts)
        fits = all([self._lengths[slot] + count <= self._max_tokens for slot, count in counts.items()])
        return fits and sum(self._needed(counts)) <= self.pages_free

    def append(self, counts: Mapping[int, int]) -> Step:
        """Makes room for so many more tokens in each of these slots, in this order. Where pages do not suffice, it raises and changes nothing."""
        needed = self._needed(counts)
        if sum(needed) > self.pages_free:
            raise MisuseError(
                f"{sum(needed)} more pages of {self.page_size} tokens are needed, {self.pages_free} of {self.k_pages[0].shape[0]} are free: free() finished "
                "sequences, append fewer tokens (has_room() tells), or make the cache with more pages"
            )
        slots, most = list(counts), self.page_table.shape[1]
        places, pages = [], []
        for slot, count in zip(slots, needed, strict=True):
            own = self._pages[slot]
            for _ in range(count):
                places.append(slot * most + len(own))
                own.append(self._free_pages.pop())
                pages.append(own[-1])
        starts = [self._lengths[slot] for slot in slots]
        self._lengths.update({slot: start + counts[slot] for slot, start in zip(slots, starts, strict=True)})
        with torch.inference_mode(False), torch.no_grad():
            if pages:
                self.page_table.view(-1).index_copy_(0, self._tensor(places), self._tensor(pages).int())
            return self._step(slots, starts, [counts[slot] for slot in slots])

    def free(self, slot: int) -> None:
        """Gives a finished sequence's pages and its slot back."""
        self._check_used(slot)
        if slot in self._latest_slots:
            self._latest, self._latest_slots = 0, ()
        self._free_pages += self._pages.pop(slot)[::-1]
        self._free_slots.append(slot)
        del self._lengths[slot]
        with torch.inference_mode(False):
            self.lengths[slot].zero_()

    def _needed(self, counts: Mapping[int, int]) -> list[int]:
        """New pages for each slot."""
        self._check_counts(counts)
        needed = []
        for slot, count in counts.items():
            tokens = self._lengths[slot] + count
            if tokens > self._max_tokens:
                raise InputError(f"slot {slot} has {self._lengths[slot]} tokens of at most max_tokens={self._max_tokens}, and cannot take {count} more")
            needed.append(self.pages_for(tokens) - len(self._pages[slot]))
        return needed

    def _check_counts(self, counts: Mapping[int, int]) -> None:
        if not isinstance(counts, Mapping):
            raise InputError(f"new tokens are given by slot, as {{slot: 5}}, got {type(counts).__name__}")
        for slot, count in counts.items():
            self._check_used(slot)
            if not isinstance(count, int) or count < 0:
                raise InputError(f"slot {slot} takes a whole number of new tokens, 0 or more, got {count!r}")

    def _check_used(self, slot: int) -> None:
        if not isinstance(slot, int):
            raise InputError(f"a slot is the int that allocate() gives, got {type(slot).__name__}")
        if slot not in self._lengths:
            raise InputError(f"slot {slot} is not in use: allocate() gives one; in use are {sorted(self._lengths)}")

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self, slots: list[int], starts: list[int], counts: list[int]) -> Step:
        at, start, count = self._tensor(slots), self._tensor(starts), self._tensor(counts)
        lengths = (start + count).int()
        self.lengths.index_copy_(0, at, lengths)
        tokens, device = sum(counts), at.device
        offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
        number = torch.repeat_interleave(torch.arange(len(slots), device=device), count, output_size=tokens)
        positions = torch.arange(tokens, device=device) + (start - offsets[:-1])[number]
        one_each = all(n == 1 for n in counts)
        most = None if one_each else self.pages_for(max(map(sum, zip(starts, counts, strict=True)), default=0))  # tile maps need not cover what nobody has
        table = self.page_table[:, :most].index_select(0, at)
        rows = table[number, positions // self.page_size].long() * self.page_size + positions % self.page_size
        made = Step(tuple(slots), table, lengths, offsets.int(), positions, rows, one_each, next(_numbers))
        self._latest, self._latest_slots = made.number, made.slots
        if not one_each:
            return made
        kept = self._decoding.setdefault(len(slots), made)
        if kept is not made:
            for name in TENSORS:
                getattr(kept, name).copy_(getattr(made, name))
        return kept._replace(slots=made.slots, number=made.number)

    def _check(self, layer: int, step: Step) -> None:
        if not isinstance(layer, int) or not 0 <= layer < len(self.k_pages):
            raise InputError(f"layers are numbered 0 to {len(self.k_pages) - 1}, got {layer!r}")
        if step.number != self._latest:
            raise MisuseError(
                "this step is not the latest of this cache: a step ends with the next append(), or when one of its sequences is freed. "
                "Sequences that are computed together are appended together: append({first: 1, second: 1})"
            )

    def _tensor(self, numbers: list[int]) -> Tensor:
        """From pinned memory, so that the host need not wait for the work before."""
        on_gpu = self.lengths.is_cuda
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=on_gpu).to(self.lengths.device, non_blocking=on_gpu)

    # -- keys and values -----------------------------------------------------------------------------------------------

    def write(self, layer: int, step: Step, key: Tensor, value: Tensor) -> None:
        """Stores the keys and values of a step's tokens, (tokens, kv heads, head dim), in the dtype of the pages; for float8 pages in the query's."""
        self._check(layer, step)
        for stored, new, scale, name in ((self.k_pages, key, self._k_scales, "key"), (self.v_pages, value, self._v_scales, "value")):
            wanted = (step.rows.shape[0], *stored[layer].shape[2:])
            if new.shape != wanted:
                raise InputError(f"{name} must be {wanted} (tokens, kv heads, head dim), got {tuple(new.shape)}")
            pages = stored[layer].dtype
            if new.dtype != pages and (pages not in FLOAT8 or new.dtype not in DTYPES):
                held = f"the query's dtype (float16, bfloat16, float32 or float64), as the pages are {pages}" if pages in FLOAT8 else f"{pages}, as the pages"
                raise InputError(f"{name} must be {held}, got {new.dtype}: make the cache with dtype=, or convert with .to()")
            rows = stored[layer].flatten(0, 1)
            new = _stored(new.detach(), scale[layer], rows.dtype)
            if rows.dtype in FLOAT8:  # torch copies no float8 by index
                rows, new = rows.view(torch.uint8), new.view(torch.uint8)
            rows.index_copy_(0, step.rows, new)

    @overload
    def attention(
        self,
        layer: int,
        step: Step,
        query: Tensor,
        *,
        mask: Any = None,
        score: ScoreFunction | Sequence[ScoreFunction] | None = None,
        scale: float | None = None,
        backend: str | None = None,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def attention(
        self,
        layer: int,
        step: Step,
        query: Tensor,
        *,
        mask: Any = None,
        score: ScoreFunction | Sequence[ScoreFunction] | None = None,
        scale: float | None = None,
        backend: str | None = None,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def attention(
        self,
        layer: int,
        step: Step,
        query: Tensor,
        *,
        mask: Any = None,
        score: ScoreFunction | Sequence[ScoreFunction] | None = None,
        scale: float | None = None,
        backend: str | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tilewise.paged_attention of a step's queries, (tokens, heads, head dim), over a layer's pages. Write the step's keys first."""
        self._check(layer, step)
        if query.dim() != 3 or query.shape[0] != step.rows.shape[0]:
            raise InputError(f"query must be ({step.rows.shape[0]}, heads, head dim), one for each new token of the step, got {tuple(query.shape)}")
        pages = (self.k_pages[layer], self.v_pages[layer], step.page_table, step.kv_lengths)
        k_scale, v_scale = self._k_scales[layer], self._v_scales[layer]
        call = partial(paged_attention, mask=mask, score=score, scale=scale, k_scale=k_scale, v_scale=v_scale, backend=backend, return_lse=return_lse)
        if not step.one_each:
            return call(query, *pages, step.cu_seqlens_q)
        found: Any = call(query.unsqueeze(2), *pages)  # a batch of single queries: the form in which the next step is the same call
        return (found[0].squeeze(2), found[1].squeeze(2).transpose(0, 1)) if return_lse else found.squeeze(2)

    def _for_layers(self, scale: float | Tensor | None, name: str) -> list[Any]:
        """A layer's scale is one object, by which its calls are known."""
        layers, kv_heads = len(self.k_pages), self.k_pages[0].shape[2]
        if not isinstance(scale, Tensor):
            return [checked_scale(scale, kv_heads, name, self.lengths.device)] * layers
        try:
            return list(scale.detach().to(self.lengths.device, torch.float32).expand(layers, kv_heads).clone().unbind())
        except RuntimeError as error:
            raise InputError(f"{name} must be a number or broadcast to ({layers}, {kv_heads}), layers and kv heads, got {tuple(scale.shape)}") from error


def _stored(new: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """In the dtype of pages; beyond float8's range torch would give NaN."""
    if scale is not None:
        new = new / (scale if not isinstance(scale, Tensor) else scale[:, None])
    if dtype in FLOAT8:
        most = torch.finfo(dtype).max
        new = new.clamp(-most, most)
    return new.to(dtype)
