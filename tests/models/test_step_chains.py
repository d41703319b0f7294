"""Test how many calls a decoding step for a GPU is, after `ops.chain_calls`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe import Target, ops
from jax_nvfp4_moe.checkpoint import open_checkpoint
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.models.loading import find_model
from jax_nvfp4_moe.nn.building.settings import Settings

# Models of which a whole step is one call. Their layers have grouped-query attention with gates or
# sinks or neither, gated delta nets, biases of routers and of linears, which are NVFP4 or bfloat16,
# and shared experts.
ONE_CALL = (
    "afmoe-modelopt-w4a16",
    "dots1-modelopt-w4a16",
    "exaone_moe-modelopt-w4a16",
    "glm4_moe-groups-modelopt-w4a16",
    "glm4v_moe-modelopt-w4a16",
    "gpt_oss-modelopt-w4a16",
    "gpt_oss-mxfp4",
    "hunyuan_v1_moe-modelopt-w4a16",
    "hy_v3-modelopt-w4a16",
    "mixtral-window-modelopt-w4a16",
    "qwen2_moe-modelopt-w4a16",
    "qwen3_5_moe-modelopt-w4a16",
    "qwen3_omni_moe-modelopt-w4a16",
    "qwen3_next-modelopt-w4a16",
    "qwen3_next-options-modelopt-w4a16",
    "qwen3moe-modelopt-w4a16",
    "solar_open-modelopt-w4a16",
    "step3p7-modelopt-w4a16",
)
# Models of which a whole step is one call -> how many of their layers have shared experts.
SHARED_EXPERTS = {
    "deepseek_v3-modelopt-mixed-w4a16-kv8": 2,
    "glm4_moe-groups-modelopt-w4a16": 1,
    "mixtral-window-modelopt-w4a16": 0,
    "qwen2_moe-modelopt-w4a16": 2,
    "qwen3_5_moe-modelopt-w4a16": 2,
    "qwen3_next-modelopt-w4a16": 2,
    "qwen3moe-modelopt-w4a16": 0,
}


@functools.cache
def unread(folder, scheme=None):
    """Return the model of a folder for a GPU, without its weights."""
    with open_checkpoint(CHECKPOINTS / folder) as checkpoint:
        return find_model(checkpoint, Settings(Target("cuda", (9, 0)), scheme)).model


def calls_of(folder, batch, read=generation._read, scheme=None):
    """Return the calls of kernels of `read`, as equations, for one token of each row."""
    model = unread(folder, scheme)
    cache = jax.eval_shape(lambda: model.init_cache(batch, 64))
    ids = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    return list(ffi_calls(jax.make_jaxpr(read)(model, ids, cache).jaxpr))


def ffi_calls(jaxpr):
    """Yield the calls of a program and of the functions in it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ffi_call":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from ffi_calls(inner)


def count_branches(chain):
    """Return the number of branches of a chain: of calls whose flags have a fork."""
    buffers = [
        getattr(value, "val", value)
        for name, value in chain.params["attributes"]
        if name.endswith("_buffers")
    ]
    return sum(int(np.asarray(numbers)[2]) & 1 for numbers in buffers)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("folder", ONE_CALL)
def test_a_step_is_one_call(folder, batch):
    assert len(calls_of(folder, batch, ops.chain_calls(generation._read))) == 1
    assert len(calls_of(folder, batch)) >= 9 * len(unread(folder).layers)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_with_an_fp8_cache_calls_the_kernels_for_it(batch):
    """In each layer, both are in one chain, and nothing widens the cache in between."""
    folder, scheme = "qwen3_moe-modelopt-mixed-w4a16-kv8", "checkpoint"
    chains = calls_of(folder, batch, ops.chain_calls(generation._read), scheme)
    targets = [targets_of(chain) for chain in chains]
    fp8 = [f"nvfp4_{name}_fp8_cuda" for name in ("prepare_heads", "attention")]
    layers = len(unread(folder, scheme).layers)
    assert sum(own[i : i + 2] == fp8 for own in targets for i in range(len(own))) == layers
    others = {"nvfp4_attention_cuda", "nvfp4_prepare_heads_cuda"}
    assert not others & {target for own in targets for target in own}


def targets_of(call):
    """Return the targets that a chain runs, or that of another call."""
    attributes = call.params["attributes"]
    found = [getattr(v, "val", v) for name, v in attributes if name.endswith("_target")]
    return found or [call.params["target_name"]]


@pytest.mark.parametrize("folder", SHARED_EXPERTS)
def test_shared_experts_are_branches(folder):
    (chain,) = calls_of(folder, 1, ops.chain_calls(generation._read))
    assert count_branches(chain) == SHARED_EXPERTS[folder]
