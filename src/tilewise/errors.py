"""Every error tilewise raises on purpose.

Each also derives from what torch raises in its situation, so that `except` clauses written for torch keep working. For the same arguments,
flex_attention raises ValueError and scaled_dot_product_attention RuntimeError: an InputError is both.
"""

from collections.abc import Iterable

__all__ = ["BackendError", "IncompleteError", "InputError", "MisuseError", "TilewiseError", "TraceError", "UnsupportedError"]


class TilewiseError(Exception):
    """Base of all errors raised by tilewise."""


class TraceError(TilewiseError, TypeError, RuntimeError):
    """A mask or score function does something that cannot be turned into a program."""


class InputError(TilewiseError, ValueError, RuntimeError):
    """Arguments that do not describe an attention problem."""


class MisuseError(InputError):
    """Something done at the wrong time or place, for which torch raises RuntimeError."""


class IncompleteError(InputError, AssertionError):
    """An argument without which others mean nothing, for which torch raises AssertionError."""


class UnsupportedError(InputError, NotImplementedError):
    """Something without a meaning here, for which torch raises NotImplementedError."""


class BackendError(TilewiseError, RuntimeError):
    """The backend that was asked for cannot serve this problem."""


def meant(name: object, names: Iterable[str]) -> str:
    """The end of a message about a name that there is not: which one is most like it, if one is."""
    from difflib import get_close_matches  # where somebody is wrong, and not before

    found = get_close_matches(str(name), names, 1)
    return f"; did you mean {found[0]!r}?" if found else ""
