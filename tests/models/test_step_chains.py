"""Test how many calls a decoding step for a GPU is, after `ops.chain_calls`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from given import CHECKPOINTS

from jax_nvfp4_moe import Target, ops
from jax_nvfp4_moe.checkpoint import open_checkpoint
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.models.loading import plan_model
from jax_nvfp4_moe.nn.settings import Settings

# Models of which a whole step is one call. Their layers have grouped-query attention with gates or
# sinks or neither, gated delta nets, biases of routers and of linears, which are NVFP4 or bfloat16,
# and shared experts.
ONE_CALL = (
    "exaone_moe-modelopt-w4a16",
    "glm4_moe-groups-modelopt-w4a16",
    "gpt_oss-modelopt-w4a16",
    "gpt_oss-mxfp4",
    "hunyuan_v1_moe-modelopt-w4a16",
    "mixtral-window-modelopt-w4a16",
    "qwen2_moe-modelopt-w4a16",
    "qwen3_5_moe-modelopt-w4a16",
    "qwen3_next-modelopt-w4a16",
    "qwen3_next-options-modelopt-w4a16",
    "qwen3moe-modelopt-w4a16",
    "step3p7-modelopt-w4a16",
)


@functools.cache
def plan(folder):
    """Return the model of a folder for a GPU, without its weights."""
    with open_checkpoint(CHECKPOINTS / folder) as checkpoint:
        return plan_model(checkpoint, Settings(Target("cuda", (9, 0)))).model


def count_calls(folder, batch, read=generation._read):
    """Return the number of calls of kernels of `read` for one token of each row."""
    model = plan(folder)
    cache = jax.eval_shape(lambda: model.init_cache(batch, 64))
    ids = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    program = jax.make_jaxpr(read)(model, ids, cache)
    return str(program).count("ffi_call[")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("folder", ONE_CALL)
def test_a_step_is_one_call(folder, batch):
    assert count_calls(folder, batch, ops.chain_calls(generation._read)) == 1
    assert count_calls(folder, batch) >= 9 * len(plan(folder).layers)
