"""C++ that the CPU engine and the CUDA engine share: the text of every operation, and what it calls (operations.h)."""

from pathlib import Path

HEADERS = Path(__file__).parent
