"""The tiles of the C++ kernels."""

LANES = KEYS = 64  # queries and keys, as in kernel/tiles.h
