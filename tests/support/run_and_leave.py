"""python run_and_leave.py SCRIPT [ARGUMENTS]: runs a script and leaves at once when it has ended well, without Python's own clearing up.

A thread of gloo that still holds a tensor of the last collective while Python ends aborts the process (torch 2.13), whatever the script did before.
"""

import os
import runpy
import sys

TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__)  # of a script, as torchrun starts them

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
