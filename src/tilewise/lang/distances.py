"""Scores that follow the distance between key and query: ALiBi, tables of distances.

From the diagonal on they fall as a rule, so that a kernel that begins there has seen a row's largest scores in its first key tile.
"""

from tilewise.lang.program import Program

# Operations after which neighbours differ little if their operands do. A `where` may jump.
SMOOTH = ("score", "index", "cast", "add", "sub", "mul", "div", "neg", "abs", "minimum", "maximum", "clamp_min", "clamp_max")
PLACES = frozenset(("q", "kv"))


def follows_distance(program: Program) -> bool:
    """Whether q.k is combined, by smooth operations, with nothing but numbers, what depends on the query, smooth functions of the key's place, and of its
    distance, and tables of distances."""
    distances = _distances(program)
    smooth: list[bool] = []
    for k, (op, args, _, _) in enumerate(program.instructions):
        is_of_row = not program.dependencies[k] & {"kv", "score"}
        is_smooth = op in SMOOTH and all([smooth[a] for a in args])
        smooth.append(is_of_row or is_smooth or (op == "load" and distances[k]))
    return smooth[program.results[0]]


def _distances(program: Program) -> list[bool]:
    """Which values depend on query and key, and do so through their distance alone: it is that, plus what depends on neither, or made of such values."""
    counts: list[tuple[int, int] | None] = []  # how often query and key are in a sum; None of what is no sum of integers
    found: list[bool] = []
    for k, (op, args, attr, type) in enumerate(program.instructions):
        given, places = [counts[a] for a in args], program.dependencies[k] & (PLACES | {"score"})
        if not places:
            counts.append((0, 0))
        elif op == "index":
            counts.append((int(attr == "q"), int(attr == "kv")))
        elif op in ("add", "sub", "neg") and not type.is_float and None not in given:
            signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[op]
            counts.append(tuple([sum([sign * own[n] for sign, own in zip(signs, given, strict=True) if own is not None]) for n in range(2)]))  # type: ignore[arg-type]  # two
        else:
            counts.append(None)
        is_made_of = len(args) > 0 and all([found[a] or not program.dependencies[a] & (PLACES | {"score"}) for a in args])
        found.append(places == PLACES and (counts[k] in ((1, -1), (-1, 1)) or is_made_of))
    return found
