"""Whole models over the GPUs of one host give what one GPU gives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architecture import logit_error, run
from given import CHECKPOINTS, EXAMPLE, EXAMPLE_REFERENCE, reference_tensors

from jax_nvfp4_moe import generate, load_model

pytestmark = pytest.mark.several_gpus
SHAPES = [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
# Folder, and the sizes of `tensor` that cut its experts into whole blocks.
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
    new = [np.asarray(generate(m, prompt, max_new_tokens=4)) for m in (one, model)]
    np.testing.assert_array_equal(*new)


@pytest.mark.parametrize("exchange", ["all_to_all", "ragged"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "folder", [EXAMPLE, CHECKPOINTS / "deepseekv3-modelopt-w4a4"], ids=lambda path: path.name
)
def test_tokens_that_are_shared_out_too(folder, count, exchange):
    """Prompts, and decoding of one row, which leaves all shards but one without tokens."""
    if len(jax.devices()) < count:
        pytest.skip(f"this machine has no {count} GPUs")
    ids = given_ids(folder)
    one = load_model(folder, **FLOAT32)
    mesh = jax.make_mesh((count,), ("expert",), devices=jax.devices()[:count])
    model = load_model(folder, mesh=mesh, exchange=exchange, **FLOAT32)
    assert logit_error(run(model, ids), np.asarray(run(one, ids), np.float64)) < 2e-5
    name = "ragged-all-to-all" if exchange == "ragged" else "all-to-all"
    assert name in run.lower(model, ids).compile().as_text()
    new = [np.asarray(generate(m, ids[:1, :8], max_new_tokens=4)) for m in (one, model)]
    np.testing.assert_array_equal(*new)
