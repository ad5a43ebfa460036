"""Video models of diffusers made sparse: tiny random models, each method, what stays dense, and the way back."""

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn

import tilewise as tw
from tests.support.brute import dense_mask
from tests.support.compare import check, normal
from tests.support.diffusers_models import BATCH, DISPATCHED, TEXT_MASK, Inputs, Tiny, steps, text
from tilewise import masks
from tilewise.errors import InputError, UnsupportedError
from tilewise.integrations import diffusers as client
from tilewise.integrations import route
from tilewise.integrations.video_methods import LEAST_REACH, METHODS, Call, Method, Run, Video, fitted, radial_decay, radial_pairs, reach_keeping

GRID = (5, 6, 9)  # in cubes of 4 x 4 x 4, ragged along every axis
CUBES = 2 * 2 * 3


def latents(dtype: torch.dtype, patch: int = 1, batch: int = BATCH) -> Tensor:
    return normal(batch, 4, GRID[0], GRID[1] * patch, GRID[2] * patch, seed=0, dtype=dtype)


def wan(dtype: torch.dtype) -> Inputs:
    return {"hidden_states": latents(dtype, 2), "timestep": torch.tensor([300, 300]), "encoder_hidden_states": text(16, dtype)}


def hunyuan(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": latents(dtype),
        "encoder_hidden_states": text(16, dtype),
        "timestep": steps(dtype, 1000),
        "encoder_attention_mask": TEXT_MASK.to(dtype),
        "pooled_projections": normal(BATCH, 8, seed=2, dtype=dtype),
        "guidance": steps(dtype, 1000),
    }


def ltx(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": normal(BATCH, math.prod(GRID), 4, seed=0, dtype=dtype),
        "encoder_hidden_states": text(16, dtype),
        "timestep": steps(dtype, 1000),
        "encoder_attention_mask": TEXT_MASK.to(dtype),
        **dict(zip(("num_frames", "height", "width"), GRID, strict=True)),
    }


def tiny(name: str, inputs: Any, **config: Any) -> Tiny:
    known = next(t for t in DISPATCHED if t.name == name)
    return Tiny(name, known.kind, known.config | config, inputs, stronger=3.0)


WAN = tiny("wan, text", wan, num_layers=3)
HUNYUAN = tiny("hunyuan-video", hunyuan)
MODELS = [WAN, HUNYUAN, tiny("ltx-video", ltx, num_layers=2)]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    yield
    client.unregister()


def lists_of(watched: "tw.watch") -> dict[str, int]:
    """By layer: how many of its calls had tiles chosen from the data."""
    counts = {layer.name: sum(use.calls for use in layer.uses if use.mask.startswith("lists")) for layer in watched.layers}
    return {name: count for name, count in counts.items() if count}


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("method", ["top_k", "radial"])
def test_keeping_all_is_dense_attention_with_gradients(model: Tiny, method: str) -> None:
    """By the error rule, against the model in fp64 on torch's attention: lists with ragged cubes, and a rule."""
    check(model.make(), model.call, lambda made: client.sparse(made, method, keep=1.0))


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_on_every_model(model: Tiny, method: str) -> None:
    made = model.make()
    dense = model.call(made, torch.float32)
    with client.sparse(made, method, keep=1.0):
        torch.testing.assert_close(model.call(made, torch.float32), dense)
    with client.sparse(made, method, keep=0.3):
        with tw.watch(made) as watched:
            found = model.call(made, torch.float32)
        with tw.attention_backend("math"):
            torch.testing.assert_close(model.call(made, torch.float32), found)
    assert (found - dense).abs().max() > 1e-3
    used = [use for layer in watched.layers for use in layer.uses if method in use.mask or "lists" in use.mask]
    assert used and all(use.skipped is not None for use in used)
    if method == "top_k":
        kept = math.ceil(0.3 * CUBES) / CUBES if model is not HUNYUAN else (math.ceil(0.3 * CUBES) + 1) / (CUBES + 1)  # text is always on
        assert all(use.skipped == pytest.approx(1 - kept) for use in used)
    assert torch.equal(model.call(made, torch.float32), dense)


@pytest.mark.parametrize("method", METHODS)
def test_text_stays_dense_and_its_padding_hidden(method: str) -> None:
    """What a padded token holds changes nothing; what a real one holds changes every token of the video, whatever is kept of that."""
    made, inputs = HUNYUAN.make(), hunyuan(torch.float32)
    other, another = copy.deepcopy(inputs), copy.deepcopy(inputs)
    other["encoder_hidden_states"][1, 4:] += 1.0  # padding, of the second sample
    another["encoder_hidden_states"][1, 3] += 1.0
    with client.sparse(made, method, keep=0.05):
        out, same, moved = (made(**given, return_dict=False)[0] for given in (inputs, other, another))
    torch.testing.assert_close(same, out)
    assert torch.equal(moved[0], out[0]) and bool(((moved[1] - out[1]).abs().amax(0) > 0).all())


def test_a_training_step() -> None:
    """With activations computed again in the backward, after another call of the model: each finds the video that it was made for."""
    made = WAN.make().train()
    small, large = wan(torch.float32), wan(torch.float32)
    small["hidden_states"] = small["hidden_states"][:, :, :3]

    def gradients() -> list[Tensor]:
        made.zero_grad()
        sum(made(**given, return_dict=False)[0].square().mean() for given in (small, large)).backward()  # type: ignore[union-attr]  # no int
        return [p.grad.clone() for p in made.parameters() if p.grad is not None]

    with client.sparse(made, keep=0.3):
        plain = gradients()
        made.enable_gradient_checkpointing()
        for found, wanted in zip(gradients(), plain, strict=True):
            torch.testing.assert_close(found, wanted)
    assert all(bool(g.isfinite().all()) for g in plain) and any(float(g.abs().max()) > 0 for g in plain)


def test_training_after_sampling_in_inference_mode() -> None:
    made, inputs = WAN.make(), wan(torch.float32)
    inputs["hidden_states"] = inputs["hidden_states"][:, :, :4, :10]  # a size that no other test has: orders and masks are remembered
    for method in METHODS:
        with client.sparse(made, method, keep=0.5):
            with torch.inference_mode():
                sampled = made(**inputs, return_dict=False)[0]
            trained = made(**inputs, return_dict=False)[0]
            trained.sum().backward()
            torch.testing.assert_close(trained, sampled)


# -- what stays dense --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dense", "sparse_layers"), [(0, [0, 1, 2]), (2, [2]), ({1}, [0, 2]), ([0, 2], [1]), (3, [])], ids=str)
def test_dense_layers(dense: Any, sparse_layers: list[int]) -> None:
    made = WAN.make()
    with client.sparse(made, keep=0.3, dense_layers=dense), attention_backend("tilewise"), tw.watch(made) as watched:
        WAN.call(made, torch.float32)
    assert lists_of(watched) == {f"blocks.{k}.attn1": 1 for k in sparse_layers}
    assert not watched.bypassing  # the others went to the backend in use


def test_layers_of_two_kinds_are_counted_in_order() -> None:
    made = HUNYUAN.make()
    with client.sparse(made, keep=0.3, dense_layers={0}), route(made), tw.watch(made) as watched:
        HUNYUAN.call(made, torch.float32)
    assert lists_of(watched) == {"single_transformer_blocks.0.attn": 1}


def test_dense_steps() -> None:
    """Guidance calls the model twice in a step; a second run of the pipeline begins anew."""
    made, inputs = WAN.make(), wan(torch.float32)

    def run(timesteps: list[int]) -> list[bool]:
        sparse_calls = []
        for timestep in timesteps:
            with tw.watch(made) as watched:
                made(**inputs | {"timestep": torch.tensor([timestep, timestep])})
            sparse_calls.append(bool(lists_of(watched)))
        return sparse_calls

    with torch.no_grad(), client.sparse(made, keep=0.3, dense_layers=2, dense_steps=2):
        assert run([999, 999, 900, 900, 500, 500, 100]) == [False, False, False, False, True, True, True]
        assert run([999, 900, 500]) == [False, False, True]
        per_token = torch.full((2, math.prod(GRID)), 200)
        per_token[:, :54] = 0  # Wan 2.2: the first frame is given, and has no noise
        with tw.watch(made) as watched:
            made(**inputs | {"timestep": per_token})
        assert lists_of(watched)


def test_compiled() -> None:
    """With breaks in the graph; steps are counted all the same."""
    made, inputs = WAN.make(), wan(torch.float32)
    dense = WAN.call(made, torch.float32)
    with torch.no_grad(), client.sparse(made, keep=0.3, dense_steps=1):
        compiled = torch.compile(made, backend="eager")
        found = [compiled(**inputs | {"timestep": torch.tensor([t, t])}, return_dict=False)[0] for t in (300, 300, 299)]
        wanted = [made(**inputs | {"timestep": torch.tensor([t, t])}, return_dict=False)[0] for t in (300, 300, 299)]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found[1], dense)
    assert (found[2] - dense).abs().max() > 1e-2


# -- the way back, and other settings ----------------------------------------------------------------------------------


def test_undone_replaced_copied() -> None:
    made = WAN.make()
    dense = WAN.call(made, torch.float32)
    first = client.sparse(made, keep=0.3)
    sparse_output = WAN.call(made, torch.float32)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(made)))
    second = client.sparse(nn.ModuleDict({"wrapped": made}), "radial", keep=1.0)  # replaces the first
    torch.testing.assert_close(WAN.call(made, torch.float32), dense)
    assert torch.equal(WAN.call(twin, torch.float32), sparse_output)
    second.undo()
    first.undo()
    assert torch.equal(WAN.call(made, torch.float32), dense)
    assert not made._forward_pre_hooks and not made.rope._forward_hooks
    assert all(not layer.attn1._forward_hooks and layer.attn1.processor._attention_backend is None for layer in made.blocks)


def test_an_error_in_a_layer_leaves_nothing_behind() -> None:
    made, inputs = WAN.make(), wan(torch.float32)
    dense = WAN.call(made, torch.float32)
    sparse_model = client.sparse(made, keep=0.3)
    rope = made.rope.register_forward_hook(lambda module, args, output: tuple(t[:, :7] for t in output))
    with pytest.raises(RuntimeError):
        made(**inputs)
    rope.remove()
    with tw.watch(made) as watched:
        WAN.call(made, torch.float32)
    assert len(lists_of(watched)) == 3
    sparse_model.undo()
    assert torch.equal(WAN.call(made, torch.float32), dense)


def test_cross_attention_to_images_stays() -> None:
    known = next(t for t in DISPATCHED if t.name == "wan, image")
    made = known.make()
    dense = known.call(made, torch.float32)
    with client.sparse(made, keep=1.0), attention_backend("tilewise"), tw.watch(made) as watched:
        torch.testing.assert_close(known.call(made, torch.float32), dense)
    reached_layers = {layer.name: layer.calls for layer in watched.layers}
    assert reached_layers == {"blocks.0.attn1": 1, "blocks.0.attn2": 2} and not watched.bypassing


def test_cubes_of_another_shape() -> None:
    made = WAN.make()
    with client.sparse(made, keep=0.2, cube=(1, 8, 16)), tw.watch(made) as watched:
        WAN.call(made, torch.float32)
    shares = [use.skipped for layer in watched.layers for use in layer.uses if use.mask.startswith("lists")]
    assert shares == [pytest.approx(0.8)] * 3  # one cube a frame, of which one of five is kept


# -- rules ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("frames", "per_frame"), [(1, 7), (5, 54), (9, 40), (3, 300)])
@pytest.mark.parametrize("keep", [0.01, 0.3, 0.6, 1.0])
def test_rules_keep_at_least_their_share(frames: int, per_frame: int, keep: float) -> None:
    tokens = frames * per_frame
    decay = radial_decay(keep, frames, per_frame)
    pairs = int(dense_mask(masks.radial(frames, per_frame, decay=decay, least=LEAST_REACH), 1, 1, tokens, tokens).sum())
    assert pairs == radial_pairs(frames, per_frame, decay) >= keep * tokens**2
    for count in (frames, per_frame):
        reach = reach_keeping(keep, count)
        apart = (torch.arange(count)[:, None] - torch.arange(count)).abs()
        assert (apart <= reach).double().mean() >= keep and (reach == 0 or (apart < reach).double().mean() < keep)


def test_heads_that_look_through_time_are_found() -> None:
    """Of two heads, one has its keys by place, the other by frame: the masks of each keep what it looks at."""
    frames, per_frame = GRID[0], GRID[1] * GRID[2]
    token = torch.arange(frames * per_frame)
    by_frame = nn.functional.one_hot(token // per_frame, 64).float()
    by_place = nn.functional.one_hot(token % per_frame, 64).float()
    q = 12 * torch.stack([by_place, by_frame])[None]
    call = Call(GRID, Run(), False)
    video = Video(q, q, torch.randn(1, 2, len(token), 8), None, 1.0, call, 0)
    out = Method("spatial_temporal", 0.2, (4, 4, 4)).attend(video)
    assert call.run.temporal[0].tolist() == [True, False]
    torch.testing.assert_close(out, tw.attention(q, q, video.value, scale=1.0), atol=1e-4, rtol=1e-4)


# -- errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "sta"}, "unknown method 'sta'; allowed are top_k, top_p, radial, spatial_temporal"),
        ({"keep": 0.0}, "keep is a share above 0 and up to 1, got 0.0"),
        ({"keep": 25}, "got 25"),
        ({"dense_layers": 4}, "up to 3, or a collection of their numbers, from 0 to 2, got 4"),
        ({"dense_layers": {3}}, "got {3}"),
        ({"dense_layers": "first"}, "got 'first'"),
        ({"dense_steps": -1}, "dense_steps is a number of steps, 0 or more, got -1"),
        ({"cube": (4, 4)}, "a cube has at least 1 frame"),
        ({"cube": 64}, "a cube has at least 1 frame, 1 row and 1 column of tokens, as (4, 4, 4), got (64,)"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    made = WAN.make()
    client.unregister()
    with pytest.raises(InputError) as raised:
        client.sparse(made, **options)
    assert said in str(raised.value) and not made._forward_pre_hooks
    with pytest.raises(ValueError, match="tilewise"):  # nothing is left behind
        client.backend_name()


def test_other_models_and_calls() -> None:
    flux = DISPATCHED[0].make()
    with pytest.raises(InputError, match="WanTransformer3DModel, HunyuanVideoTransformer3DModel, LTXVideoTransformer3DModel, got FluxTransformer2DModel"):
        client.sparse(flux)
    with pytest.raises(InputError, match=r"of a pipeline, give the model in it: sparse\(pipeline.transformer\)"):
        client.sparse(object())
    own = WAN.make()
    own.blocks[1].attn1.processor = object()
    with pytest.raises(InputError, match="processors that call diffusers' attention dispatcher, got object"):
        client.sparse(own)
    made = MODELS[2].make()
    with client.sparse(made), pytest.raises(InputError, match="needs num_frames, height and width in its call"):
        made(**ltx(torch.float32) | {"num_frames": None, "video_coords": torch.zeros(BATCH, 3, math.prod(GRID))})
    with client.sparse(made), pytest.raises(InputError, match="a video of 4 x 6 x 9 has 216 tokens, the layer 270"):
        made(**ltx(torch.float32) | {"num_frames": 4, "video_coords": torch.zeros(BATCH, 3, math.prod(GRID))})


def test_what_a_sparse_layer_cannot_honour_is_refused() -> None:
    made = WAN.make()
    with client.sparse(made):
        for block in made.blocks:
            block.attn1.processor._parallel_config = object()
        with pytest.raises(UnsupportedError, match="does not support context parallelism"):
            WAN.call(made, torch.float32)


@pytest.mark.parametrize(
    ("cube", "grid", "wanted"),
    [
        ((4, 4, 4), (5, 10, 14), (4, 4, 4)),
        ((100, 100, 100), (5, 10, 14), (8, 16, 16)),  # no longer than the video
        ((4, 4, 4), (1, 32, 32), (1, 8, 8)),  # one frame: as many tokens
        ((4, 4, 4), (1, 3, 5), (1, 4, 8)),
        ((1, 2, 2), (9, 9, 9), (1, 2, 2)),  # as small as the user wants it
    ],
)
def test_cubes_fit_the_video(cube: tuple[int, ...], grid: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert fitted(cube, grid) == wanted
