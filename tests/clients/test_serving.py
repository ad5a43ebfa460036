"""Serving: the example on PagedCache, and transformers' continuous batching. Tokens are those of generate() for each prompt alone."""

import importlib.util
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import tilewise as tw
from tests.clients.test_transformers import GEMMA2, GPT_OSS, LLAMA, MISTRAL, VOCABULARY, Tiny
from tilewise.integrations import continuous_batching
from tilewise.integrations import transformers as client

SCRIPT = Path(__file__).parents[2] / "examples" / "serve" / "serve.py"


@pytest.fixture(autouse=True)
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Managers run in a thread of their own, where no scope of this one counts."""
    monkeypatch.setenv("TILEWISE_BACKEND", "blocked")


# -- the example -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    from transformers import AttentionInterface, AttentionMaskInterface

    spec = importlib.util.spec_from_file_location("serve", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("paged")


@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
@pytest.mark.parametrize("sizes", [(), ("--pages=7", "--page-size=8", "--budget=5", "--slots=3"), ("--pages=60", "--page-size=1", "--budget=100")])
def test_example(model: str, sizes: tuple[str, ...], example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main([f"--model={model}", "--requests=8", *sizes])
    printed = capsys.readouterr().out
    assert "8 requests in" in printed and "tokens as of generate()" in printed and "PagedCache(2 layers, 0 of" in printed


def test_example_notices_other_tokens(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a window that is one key too wide."""
    usual = example.seen
    monkeypatch.setattr(example, "seen", lambda window: usual(None if window is None else window + 1))
    with pytest.raises(SystemExit, match="the server"):
        example.main(["--model=gpt-oss", "--requests=8"])


def test_example_with_the_usual_engine(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWISE_BACKEND")
    example.main(["--requests=4"])


def test_example_explains_itself(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    assert "--page-size" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        example.main(["--pages=2"])
    assert "give the cache more than 2 pages of 8" in capsys.readouterr().err


# -- transformers' continuous batching -------------------------------------------------------------------------------------

NEW = 6
UNTIED_GEMMA2 = replace(GEMMA2, settings=GEMMA2.settings | {"tie_word_embeddings": False})  # tied, and as small as this, it only repeats the last token
RANDOM = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(2, VOCABULARY, (n,), generator=RANDOM).tolist() for n in (5, 17, 29, 3)]
SMALL = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 16}  # prompts come in pieces, beside tokens of others


@pytest.fixture
def registered() -> Iterator[None]:
    client.register()
    yield
    client.unregister()


def alone(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :].tolist() for p in prompts]


def together(model: PreTrainedModel, prompts: list[list[int]] = PROMPTS, **sizes: Any) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(prompts, settings, continuous_batching_config=ContinuousBatchingConfig(**(SMALL | sizes)), progress_bar=False)
    return [answers[name].generated_tokens for name in sorted(answers, key=lambda name: int(name.rpartition("_")[2]))]


def made(tiny: Tiny, prompts: list[list[int]] = PROMPTS) -> tuple[Any, list[list[int]]]:
    model = tiny.make().eval()
    wanted = alone(model, prompts)
    model.set_attn_implementation("tilewise")
    return model, wanted


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tiny", [LLAMA, UNTIED_GEMMA2, GPT_OSS, MISTRAL], ids=str)
def test_continuous_batching(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, softcap and sinks included, by the layers' own attention implementation. Layers that see everything have no keys copied out of the cache."""
    model, wanted = made(tiny)
    read, usual = [], FullAttentionCacheAllocator.update
    monkeypatch.setattr(FullAttentionCacheAllocator, "update", lambda self, *args: read.append(len(args[3])) or usual(self, *args))
    calls: list[str] = []
    for name in ("paged_attention", "varlen_attention"):
        counted = getattr(continuous_batching, name)
        monkeypatch.setattr(continuous_batching, name, lambda *args, _name=name, _call=counted, **options: calls.append(_name) or _call(*args, **options))
    with client.continuous_batching():
        assert together(model) == wanted
    assert model.config._attn_implementation == "tilewise"
    assert {"paged_attention", "varlen_attention"} == set(calls) and sum(read) == 0


@pytest.mark.usefixtures("registered")
def test_other_sizes_of_pages_and_batches() -> None:
    model, wanted = made(GPT_OSS)
    with client.continuous_batching():
        for sizes in ({"page_size": 4, "max_batch_tokens": 64}, {"page_size": 32, "max_batch_tokens": 7}):
            assert together(model, **sizes) == wanted


@pytest.mark.usefixtures("registered")
def test_requests_that_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same first 20 tokens: later requests have the two full pages of the first in their tables."""
    prompts = [PROMPTS[2][:20] + prompt for prompt in PROMPTS]
    model, wanted = made(LLAMA, prompts)
    shared, usual = [], PagedAttentionCache.search_prefix_match
    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", lambda *args: shared.append(usual(*args)) or shared[-1])
    with client.continuous_batching():
        assert together(model, prompts) == wanted
    assert max(shared) == 16


@pytest.mark.usefixtures("registered")
def test_requests_that_wait_for_pages() -> None:
    model, wanted = made(LLAMA)
    with client.continuous_batching():
        assert together(model, num_blocks=6) == wanted


WRONG = {
    "narrower": (continuous_batching, "_causal", lambda usual, window: usual(12 if window is None else window - 1)),
    "no sinks": (client, "_changes", lambda usual, cap, bias, added, sinks: usual(cap, bias, added, None)),
    "other softcap": (client, "_changes", lambda usual, cap, *others: usual(2 * cap, *others)),
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("tiny", "wrong"), [(LLAMA, "narrower"), (MISTRAL, "narrower"), (GPT_OSS, "no sinks"), (UNTIED_GEMMA2, "other softcap")], ids=str)
def test_tokens_tell_what_a_layer_asks_for(tiny: Tiny, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: asked for something else, tokens are others."""
    model, wanted = made(tiny)
    module, name, change = WRONG[wrong]
    monkeypatch.setattr(module, name, partial(change, getattr(module, name)))
    with client.continuous_batching():
        assert together(model) != wanted


def test_the_pages_of_a_step_are_made_once() -> None:
    """And anew for whatever they are made of."""
    offsets, rows = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([8, 9, 10, 16, 17, 18, 19, 4])
    where = continuous_batching._where
    made = where(rows, offsets, 5, 4)
    assert made.table.tolist() == [[2, 4], [4, 1]] and made.lengths.tolist() == [3, 5]  # the second of the first sequence is not its own, and not looked at
    assert where(rows, offsets, 5, 4) is made
    assert where(None, offsets, 5, 1).table.tolist() == [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]]
    assert where(rows, offsets, 3, 4).table.tolist() == [[2], [4]]
    assert where(rows, offsets, 5, 2).table.tolist() == [[4, 5, 8], [8, 9, 2]]
    rows[7] = 12
    assert where(rows, offsets, 5, 4).table.tolist() == [[2, 4], [4, 3]]
    offsets[1] = 4
    assert where(rows, offsets, 5, 4).lengths.tolist() == [4, 4]


@pytest.mark.usefixtures("registered")
def test_the_scope_is_needed_and_leaves_nothing_behind() -> None:
    usual = ContinuousBatchingManager.switch_to_cb_friendly_attn
    model = LLAMA.make().eval()
    model.set_attn_implementation("tilewise")
    with pytest.raises(ValueError, match="tilewise is not supported for continuous batching"):
        together(model)
    with client.continuous_batching(), client.continuous_batching():
        pass
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is usual
    model.set_attn_implementation("sdpa")
    with client.continuous_batching():
        together(model)  # others are served as ever
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is usual


def test_scopes_of_threads_may_end_in_any_order() -> None:
    usual = ContinuousBatchingManager.switch_to_cb_friendly_attn
    opened, done = threading.Event(), threading.Event()

    def other() -> None:
        with client.continuous_batching():
            opened.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    with client.continuous_batching():
        thread.start()
        opened.wait(60)
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is not usual  # the other one is still open
    done.set()
    thread.join()
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is usual


def test_older_libraries_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn")
    with pytest.raises(tw.BackendError, match=r"transformers 5\.22 and newer"), client.continuous_batching():
        pass
