"""Every error tilewise raises on purpose.

Each also derives from the builtin its situation would raise in torch, so that `except ValueError` keeps working.
"""


class TilewiseError(Exception):
    """Base of all errors raised by tilewise."""


class TraceError(TilewiseError, TypeError):
    """A mask or score function does something that cannot be turned into a program."""


class InputError(TilewiseError, ValueError):
    """Arguments that do not describe an attention problem."""


class MisuseError(InputError, RuntimeError):
    """An input error for which torch raises RuntimeError: `except` of either kind catches it."""


class BackendError(TilewiseError, RuntimeError):
    """The backend that was asked for cannot serve this problem."""
