"""Test scales of input channels, which AWQ stores as `pre_quant_scale`."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.devices.host_devices import make_mesh
from support.files.checkpoint_edits import GIVEN, W4A16, edited
from support.files.given import reference_tensors
from support.models.architecture import KERNELS, logit_error, run

from jax_nvfp4_moe import CheckpointError, load_model

AWQ = "glm4_moe-groups-modelopt-awq"
IDS = jnp.asarray([[5, 17, 3, 60, 11]])


def logits(folder, ids=IDS, **options):
    return np.asarray(run(load_model(folder, **{**KERNELS, "scheme": "w4a16", **options}), ids))


def test_a_power_of_two_moves_between_scale_and_weight(tmp_path):
    """The scale belongs to one projection, also where several projections read the same input.

    A product with a power of two is exact, so half the global scale with channel scales of 2 gives
    the same bits. Without the channel scales, the logits differ.
    """
    modules = [f"model.layers.0.self_attn.{name}" for name in ("v_proj", "o_proj")]

    def halve(tensors):
        for module in modules:
            tensors[f"{module}.weight_scale_2"] /= 2

    def move(tensors):
        halve(tensors)
        for module in modules:
            width = 2 * tensors[f"{module}.weight"].shape[1]
            tensors[f"{module}.pre_quant_scale"] = np.full(width, 2, ml_dtypes.bfloat16)

    expected = logits(GIVEN / W4A16)
    np.testing.assert_array_equal(logits(edited(tmp_path, W4A16, move)), expected)
    assert logit_error(logits(edited(tmp_path, W4A16, halve)), expected) > 1e-2


def test_the_bound_of_logits_catches_scales_that_are_left_out(tmp_path):
    """The reference rounds the scaled input; see `tests.reference.rounding.after_scaling`."""
    tensors = reference_tensors(GIVEN / AWQ)

    def forget(tensors):
        tensors["model.layers.1.self_attn.o_proj.pre_quant_scale"][:] = 1

    found = logits(edited(tmp_path, AWQ, forget), tensors["input_ids"], scheme="checkpoint")
    assert logit_error(found, tensors["logits"]) > 1e-3


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_channel_scales_that_no_tool_writes_are_refused(tmp_path, value):
    """Tools divide the weights by them."""

    def edit(tensors):
        tensors["model.layers.1.self_attn.o_proj.pre_quant_scale"][1] = value

    with pytest.raises(CheckpointError, match=r"1 of \d+ channel scales are not positive and fin"):
        load_model(edited(tmp_path, AWQ, edit))


@pytest.mark.eight_devices
def test_scales_are_sharded_with_the_columns_that_they_multiply():
    mesh = make_mesh((1, 3))
    # The ids and the scheme of the test above, so that both compile one program.
    how = {"ids": reference_tensors(GIVEN / AWQ)["input_ids"], "scheme": "checkpoint"}
    one, three = logits(GIVEN / AWQ, **how), logits(GIVEN / AWQ, mesh=mesh, **how)
    assert logit_error(three, one) < 1e-5


def test_scales_of_routed_experts_are_refused_with_a_sentence(tmp_path):
    name = "model.layers.0.mlp.experts.3.down_proj.pre_quant_scale"

    def add(tensors):
        tensors[name] = np.ones(128, ml_dtypes.bfloat16)

    with pytest.raises(CheckpointError) as caught:
        load_model(edited(tmp_path, W4A16, add))
    (problem,) = caught.value.problems
    assert name in problem
    assert "input channels of routed experts are not supported" in problem


def test_a_scale_of_another_size_is_refused(tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.o_proj.pre_quant_scale"] = np.ones(8, np.float32)

    with pytest.raises(CheckpointError, match=r"o_proj.pre_quant_scale.*expected .*\[256\]"):
        load_model(edited(tmp_path, W4A16, add))
