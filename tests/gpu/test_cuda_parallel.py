"""Test that whole models on the GPUs of one host give the results of one GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.devices.divided_attention import IDS
from support.devices.expert_block import block
from support.devices.host_devices import call, decode, difference, tokens
from support.files.given import CHECKPOINTS, EXAMPLE, EXAMPLE_REFERENCE, reference_tensors
from support.files.resized import write_resized
from support.files.unquantized import dequantized
from support.models.architecture import logit_error, run
from support.models.mixer_cases import CASES as MIXERS

from jax_nvfp4_moe import generate, load_model
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

pytestmark = pytest.mark.several_gpus
SHAPES = [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
# Folder -> the sizes of `tensor` that divide its experts into whole blocks.
MODELS = {
    EXAMPLE: (1, 2, 4),
    CHECKPOINTS / "qwen3moe-modelopt-w4a4": (1, 2, 4),
    CHECKPOINTS / "deepseekv3-modelopt-w4a4": (1, 2),
    CHECKPOINTS / "mixtral-window-modelopt-w4a16": (1,),
    CHECKPOINTS / "qwen3_next-modelopt-w4a16": (1,),
}
CASES = [
    pytest.param(folder, shape, id=f"{folder.name}-{shape[0]}x{shape[1]}")
    for folder, legal in MODELS.items()
    for shape in SHAPES
    if shape[1] in legal
]
FLOAT32 = {"scheme": "w4a16", "dtype": jnp.float32}
ATTENTIONS = ("kimi_k2", "llama4_text", "olmoe-bias", "minimax_m2")


def given_ids(folder):
    own = reference_tensors(EXAMPLE_REFERENCE, "w4a16.") if folder == EXAMPLE else None
    return jnp.asarray((own or reference_tensors(folder))["input_ids"], jnp.int32)


@pytest.mark.parametrize(("folder", "shape"), CASES)
def test_logits_tokens_and_collectives(folder, shape):
    count = shape[0] * shape[1]
    if len(jax.devices()) < count:
        pytest.skip(f"this machine has no {count} GPUs")
    ids = given_ids(folder)
    one = load_model(folder, **FLOAT32)
    mesh = jax.make_mesh(shape, ("expert", "tensor"), devices=jax.devices()[:count])
    model = load_model(folder, mesh=mesh, **FLOAT32)
    assert logit_error(run(model, ids), np.asarray(run(one, ids), np.float64)) < 2e-5
    text = run.lower(model, ids).compile().as_text()
    found = set(re.findall(r"= \S+ (all-[a-z-]+|collective-permute|reduce-scatter)[\(-]", text))
    names = {name.removesuffix("-start") for name in found}
    assert names == ({"all-reduce"} if shape[1] == 1 else names & {"all-reduce", "all-gather"})
    prompt = ids[:1, :8]
    new = [np.asarray(generate(m, prompt, max_new_tokens=4, stop_ids=())) for m in (one, model)]
    np.testing.assert_array_equal(*new)


@pytest.mark.parametrize("dispatch", ["all_to_all", "ragged"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "folder", [EXAMPLE, CHECKPOINTS / "deepseekv3-modelopt-w4a4"], ids=lambda path: path.name
)
def test_tokens_that_are_shared_out_too(folder, count, dispatch):
    """Run prompts, and decode one row, which leaves all shards but one without tokens."""
    if len(jax.devices()) < count:
        pytest.skip(f"this machine has no {count} GPUs")
    ids = given_ids(folder)
    one = load_model(folder, **FLOAT32)
    mesh = jax.make_mesh((count,), ("expert",), devices=jax.devices()[:count])
    model = load_model(folder, mesh=mesh, dispatch=dispatch, **FLOAT32)
    assert logit_error(run(model, ids), np.asarray(run(one, ids), np.float64)) < 2e-5
    name = "ragged-all-to-all" if dispatch == "ragged" else "all-to-all"
    assert name in run.lower(model, ids).compile().as_text()
    new = [
        np.asarray(generate(m, ids[:1, :8], max_new_tokens=4, stop_ids=())) for m in (one, model)
    ]
    np.testing.assert_array_equal(*new)


def assert_cut_alike(folder, ids):
    """Assert that two GPUs along `tensor` give one GPU's logits, for a prompt and for decoding."""
    load = functools.partial(load_model, folder, **FLOAT32)
    one = load()
    cut = load(mesh=jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2]))
    mixers = [m for _, m in nnx.iter_modules(cut) if isinstance(m, HeadParallel)]
    assert any(mixer.expert_mesh is not None for mixer in mixers)
    whole, parts = ([call(m, ids), decode(m, ids)[0]] for m in (one, cut))
    for expected, found in zip(whole, parts, strict=True):
        assert difference(found, expected) < 2e-5


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_cut_by_heads(name, tmp_path):
    """Divide unquantized attentions: latent, Llama 4's, and with one norm over all heads."""
    assert_cut_alike(dequantized(f"{name}-modelopt-w4a16", tmp_path), IDS)


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_cut_by_heads_and_groups(name, tmp_path):
    given, changes = MIXERS[name]
    write_resized(CHECKPOINTS / given, tmp_path, **changes)
    assert_cut_alike(tmp_path, IDS)


@pytest.mark.parametrize("dispatch", ["all_to_all", "ragged"])
@pytest.mark.parametrize("scheme", ["w4a16", "w4a4", "w4a4_unit_scale", "w4a4_token_scale"])
def test_rows_that_travel_as_codes(scheme, dispatch):
    """Two GPUs match one GPU up to the order of sums, for even and odd numbers of tokens."""
    mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
    one, two = (block(scheme=scheme, **how)() for how in ({}, {"mesh": mesh, "dispatch": dispatch}))
    for count in (1, 24, 4097):
        x = tokens(count)
        assert difference(call(two, x), call(one, x)) < 1e-6
