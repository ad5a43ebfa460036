"""Ahead-of-time builds of the kernels a problem needs."""

from functools import partial

import torch

from tilewise.core.problem import Problem
from tilewise.engines.cuda.config import ForwardConfig, band_for, forward_forms
from tilewise.engines.cuda.launches import fwd_launch_with, schedule_of
from tilewise.engines.gluon import aot as gluon
from tilewise.engines.gpu.aot import Candidates
from tilewise.engines.gpu.launch import Launch


def forward_launches(p: Problem) -> list[Candidates]:
    """The forward, in all forms that lengths may ask for, and what the Gluon engine launches behind it."""
    output, counter, schedule = gluon.output_of(p), torch.empty(1, dtype=torch.int32, device=p.device), schedule_of(p)

    def launch(config: ForwardConfig) -> list[Launch]:
        return [fwd_launch_with(p, output, counter, schedule, config)]

    forms = forward_forms(p, schedule.mapped)
    fixup = [] if forms[0].repairs else [gluon.fwd_fixup(p)]
    return [*[partial(launch, config) for config in forms], *fixup, *(gluon.fwd_mask_bits(p) if band_for(p) is None else [])]
