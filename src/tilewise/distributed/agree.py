"""Agreement: every rank goes on, or every rank raises the same error.

A rank that raised alone would leave the others waiting in the next collective. So before and after every step that may fail, each rank says whether
it failed and what it is about to do (`settle`): one all-reduce of a few numbers. Only if these do not agree, texts are exchanged and all raise.
"""

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import InputError

Groups = Sequence[dist.ProcessGroup]


DETAILS = "details of "  # begins the name of a fact that only says more of another: told where that one is alike


class DisagreementError(InputError):
    """What went wrong on some ranks, or differs between them; every rank of the group raises it with the same text."""


def settle(groups: Groups, facts: Mapping[str, object], error: Exception | None, number: int = 0) -> int:
    """Go on if no rank has an error and all state the same facts; else raise the same error on all of them.

    `groups` together reach every rank: one group, or those of the two dimensions of a mesh. Returns the largest of all `number`s, so that all have one.
    """
    statement = json.dumps({name: str(fact) for name, fact in facts.items()}, sort_keys=True)
    digest = int.from_bytes(hashlib.blake2b(statement.encode(), digest_size=7).digest(), "big")
    status = torch.tensor([int(error is not None), digest, -digest, number], dtype=torch.int64, device=device_of(groups[0]))
    for group in groups:
        dist.all_reduce(status, dist.ReduceOp.MAX, group=group)
    failed, largest, smallest, agreed = status.tolist()
    if failed or largest != -smallest:
        _raise_for_all(groups, statement, error)
    return int(agreed)


def _raise_for_all(groups: Groups, statement: str, error: Exception | None) -> NoReturn:
    own = {"error": None if error is None else f"{type(error).__name__}: {error}", "facts": json.loads(statement)}
    told = [json.loads(text) for text in gather_texts(groups, json.dumps(own))]
    raise DisagreementError(_comparison(told)) from error


def _comparison(told: list[dict[str, object]]) -> str:
    """What all ranks say of what they told each other: the errors, or else the facts that differ."""
    errors = [(rank, str(each["error"])) for rank, each in enumerate(told) if each["error"] is not None]
    if errors:
        fine = [rank for rank, each in enumerate(told) if each["error"] is None]
        texts = [f"{_ranks(ranks)}: {text}" for text, ranks in _alike(errors)]
        return "; ".join([*texts, *([f"{_ranks(fine)}: no error"] if fine else [])])
    facts: list[dict[str, str]] = [each["facts"] for each in told]  # type: ignore[misc]  # as settle wrote them
    differing = [name for name in dict.fromkeys(n for f in facts for n in f) if len({f.get(name) for f in facts}) > 1]
    differing = [name for name in differing if name.removeprefix(DETAILS) == name or name.removeprefix(DETAILS) not in differing]
    parts = []
    for name in differing:
        values = _alike([(rank, str(f.get(name, "missing"))) for rank, f in enumerate(facts)])
        parts.append(f"{name} differs: " + ", ".join([f"{_ranks(ranks)} {value}" for value, ranks in values]))
    return "the ranks do not ask for the same thing. " + "; ".join(parts)


def _alike(said: list[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    """Each text and the ranks that said it, by the first of them."""
    found: dict[str, list[int]] = {}
    for rank, text in said:
        found.setdefault(text, []).append(rank)
    return list(found.items())


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    stretches: list[list[int]] = []
    for rank in ranks:
        if stretches and rank == stretches[-1][1] + 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join([str(a) if a == b else f"{a}-{b}" for a, b in stretches])


def gather_texts(groups: Groups, text: str) -> list[str]:
    """The texts of all ranks, in their order. The first group is the innermost: its ranks are neighbours."""
    texts = [text]
    for group in groups:
        texts = [t for joined in _gather(group, json.dumps(texts)) for t in json.loads(joined)]
    return texts


def _gather(group: dist.ProcessGroup, text: str) -> list[str]:
    device, ranks = device_of(group), dist.get_world_size(group)
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    lengths = [int(s) for s in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[:length].tolist()).decode() for part, length in zip(parts, lengths, strict=True)]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group's small messages lie: on the CPU if it has a backend there, so that nothing waits for a GPU."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else f"cuda:{torch.cuda.current_device()}")


def checksum(tensor: Tensor) -> str:
    """Of a tensor's contents, shape and dtype."""
    data = tensor.detach().to("cpu").resolve_neg().contiguous()
    digest = hashlib.blake2b(ctypes.string_at(data.data_ptr(), data.nbytes), digest_size=8).hexdigest()
    return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)} {digest}"
