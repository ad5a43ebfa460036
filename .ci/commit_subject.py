"""A commit's first line has fewer than 72 characters. Called by pre-commit with the message's file."""

import sys
from pathlib import Path

LIMIT = 72

subject = Path(sys.argv[1]).read_text().partition("\n")[0]
if len(subject) >= LIMIT:
    sys.exit(f"the subject has {len(subject)} characters, fewer than {LIMIT} are wanted: {subject!r}\nSay what changed and why in the body.")
