"""A process that measures jobs and writes every event as a line of JSON to its standard output: python -m tilewise.tools.bench_models.worker ORDER"""

import json
import os
import sys
import warnings
from typing import Any

import torch

from tilewise.tools.bench_models import measure
from tilewise.tools.bench_models.rows import Job
from tilewise.tools.bench_models.workload import Scale


def main(order: str) -> None:
    asked = json.loads(order)
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no event

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    warnings.filterwarnings("ignore")
    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
    try:
        measure.run([Job(*job) for job in asked["jobs"]], Scale(asked["tiny"], torch.device(asked["device"])), asked["rounds"], tell)
    except measure.Unusable:
        os._exit(1)  # tidying up would hang or crash


if __name__ == "__main__":
    main(sys.argv[1])
