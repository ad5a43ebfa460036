"""Runs a function in several processes that share a process group; one that hangs or fails ends the test, with what it printed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT = 240  # seconds
COMPILING = 500  # where kernels are compiled for a GPU

# One process imports everything, which takes seconds, and forks the ranks. They end without Python's end: a thread of gloo may still hold a tensor.
_ENTRY = """
import datetime, importlib, json, os, sys, traceback
import torch, torch.distributed as dist
module, function, ranks, folder, backend = sys.argv[1:6]
target = getattr(importlib.import_module(module), function)
torch.set_num_threads(1)

def run(rank):
    with open(f"{folder}/output.{rank}", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = 1
    try:
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=int(ranks), timeout=limit)
        target(*sys.argv[6:])
        dist.barrier()
        code = 0
    except BaseException:  # whatever ended this rank, the test prints it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

children = []
for rank in range(int(ranks)):
    child = os.fork()
    if child == 0:
        run(rank)
    children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


def spawn(module: str, function: str, ranks: int, *arguments: str, backend: str = "gloo", timeout: int = TIMEOUT, **variables: str) -> str:
    """What rank 0 printed. Every rank must end well. `variables` are added to the environment."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _ENTRY, module, function, str(ranks), folder, backend, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=root, start_new_session=True)
        try:
            printed, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, errors = process.communicate()
        files = [Path(folder) / f"output.{rank}" for rank in range(ranks)]
        texts = [file.read_text() if file.exists() else "" for file in files]
    assert process.returncode == 0, f"ended with {process.returncode}:\n{errors}\n" + "\n".join([f"rank {rank}:\n{text}" for rank, text in enumerate(texts)])
    codes = json.loads(printed.splitlines()[-1])
    assert not any(codes), "\n".join([f"rank {rank} ended with {code}:\n{text}" for rank, (code, text) in enumerate(zip(codes, texts, strict=True)) if code])
    return texts[0]
