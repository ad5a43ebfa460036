"""What every emitter knows of a problem besides the program itself."""

from typing import NamedTuple

INT32 = 2**31 - 1  # integers up to here, either way, are emitted with 32 bits


class Layout(NamedTuple):
    """What of a capture's place in memory is part of the code."""

    contiguous: bool  # the last dimension's stride is 1
    wide: bool  # offsets need 64 bits


class Extents(NamedTuple):
    """Upper limits of b, h, q and kv."""

    b: int
    h: int
    q: int
    kv: int
