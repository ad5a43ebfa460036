"""diffusers' context parallelism on tilewise, in processes that share a gloo group; what they check is in tests/support/diffusers_parallel.py."""

import pytest
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import distributed

from tests.distributed.spawned import spawn
from tilewise.integrations import diffusers as client

needs_gloo = pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo")


@needs_gloo
def test_two_processes() -> None:
    spawn("tests.support.diffusers_parallel", "two", 2)


@needs_gloo
def test_four_processes() -> None:
    spawn("tests.support.diffusers_parallel", "four", 4)


def test_registering_and_unregistering() -> None:
    before = set(_AttentionBackendRegistry._supports_context_parallel)
    client.register(replace_flex=True)
    assert _AttentionBackendRegistry._supports_context_parallel == before | {"tilewise", "flex"}
    client.unregister()
    assert _AttentionBackendRegistry._supports_context_parallel == before
