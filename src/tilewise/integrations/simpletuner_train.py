"""Runs SimpleTuner's own training script with tilewise registered.

    ACCELERATE_EXTRA_ARGS="-m tilewise.integrations.simpletuner_train" simpletuner train

`simpletuner train` has accelerate run its train.py. With this, accelerate runs this module, with the path of train.py and its arguments.
"""

import os
import runpy
import sys

from tilewise.integrations import simpletuner

USAGE = """this module is run by simpletuner train, with the path of its train.py:
    ACCELERATE_EXTRA_ARGS="-m tilewise.integrations.simpletuner_train" simpletuner train"""


def main() -> None:
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".py"):
        sys.exit(USAGE)
    simpletuner.register()
    script = sys.argv.pop(1)
    sys.argv[0] = script
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if os.environ.get("RANK", "0") == "0":
            print(summary(simpletuner.served()), flush=True)


def summary(served: dict[str, int]) -> str:
    """What was served in this process, validation included."""
    if not served:
        return "tilewise served no attention call: is attention_mechanism flex or tilewise?"
    return f"attention calls served by tilewise: {', '.join(f'{engine} {count}' for engine, count in served.items())}"


if __name__ == "__main__":
    main()
