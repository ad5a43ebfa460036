"""Triton's interpreter runs kernels on the CPU. It must be chosen before Triton is imported, so these tests have a process of their own:

TRITON_INTERPRET=1 python -m pytest tests/interpreter
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
