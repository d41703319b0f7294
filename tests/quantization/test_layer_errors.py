"""Test errors by layer: the tool's tensors as truth, one faulty layer, tables and pictures."""

import dataclasses
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from support.files.checkpoint_edits import edited
from support.files.given import CHECKPOINTS, EXAMPLE, EXAMPLE_REFERENCE, reference_tensors

from jax_nvfp4_moe import CheckpointError, load_moe
from jax_nvfp4_moe.figures import check_plot
from jax_nvfp4_moe.quantization.layer_errors import (
    LayerErrors,
    _compare,
    available_schemes,
    error_report,
    error_rows,
    measure_errors,
    plot_errors,
)

SMALL = CHECKPOINTS / "qwen3moe-modelopt-w4a16"
IDS = np.arange(24) * 7 % 512
MADE = [
    LayerErrors("layers.0.mlp", "w4a16", 0.1, np.array([0.05, np.nan, 0.2])),
    LayerErrors("layers.1.mlp", "w4a16", 0.3, np.array([0.4, 0.1, 0.1])),
    LayerErrors("layers.0.mlp", "w4a4", 0.2, np.array([0.1, np.nan, 0.4])),
    LayerErrors("layers.1.mlp", "w4a4", 0.6, np.array([0.8, 0.2, 0.2])),
]


def test_the_definition():
    truth = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 10.0]], np.float32)
    y = truth + np.array([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]], np.float32)
    error = _compare("m", "w4a16", y, truth)
    assert error.nrmse == pytest.approx(np.sqrt(2 / 125))
    np.testing.assert_allclose(error.rows, [0.2, np.nan, 0.1])
    assert (error.worst_row, error.worst) == (0, pytest.approx(0.2))


def compared(moe, given):
    """Return the errors of experts on the tool's inputs, against the tool's outputs."""
    y = moe.experts(
        jnp.asarray(given["experts_input"]),
        jnp.asarray(given["topk_indices"], jnp.int32),
        jnp.asarray(given["topk_weights"]),
    )
    return _compare("", "", np.asarray(y), given["experts_output"])


def assert_as_near(error, expected):
    """Inputs agree to 1e-6, but an activation that rounds the other way moves a row by 1e-3."""
    assert error.nrmse == pytest.approx(expected.nrmse, rel=1e-2)
    np.testing.assert_allclose(error.rows, expected.rows, rtol=1e-2)


def test_beside_the_tensors_of_the_tool():
    """Inputs and true outputs of layers 1 and 4 come from ModelOpt's torch model."""
    tool = reference_tensors(EXAMPLE_REFERENCE, "w4a16.")
    errors = measure_errors(EXAMPLE, tool["input_ids"][0], dtype="float32")
    assert [error.scheme for error in errors] == ["w4a16"] * 5 + ["w4a4"] * 5
    found = {(error.module, error.scheme): error for error in errors}
    for layer in (1, 4):
        given = {name: tool[f"layers.{layer}.moe.{name}"] for name in (
            "experts_input", "topk_indices", "topk_weights", "experts_output")}  # fmt: skip
        moe = load_moe(EXAMPLE, layer, scheme="w4a4", dtype=jnp.float32)
        other = load_moe(EXAMPLE, layer, scheme="w4a4_unit_scale", dtype=jnp.float32)
        expected, error = compared(moe, given), found[f"layers.{layer}.mlp", "w4a4"]
        assert_as_near(error, expected)
        with pytest.raises(AssertionError):  # scales of 1 round the same inputs differently
            assert_as_near(compared(other, given), expected)
        with pytest.raises(AssertionError):
            assert_as_near(dataclasses.replace(error, rows=error.rows[::-1]), expected)
        # In w4a16, another kernel computes the same products. Rounded activations are far off.
        assert found[f"layers.{layer}.mlp", "w4a16"].worst < 1e-5
        assert error.worst > 100 * 1e-5


def test_one_layer_is_not_blamed_for_another(tmp_path):
    """Layer 0 of the original gives twice as much. The error is 1/2 there, and none in layer 1."""

    def double(tensors):
        for name in tensors:
            if (
                name.startswith("model.layers.0.mlp.experts.")
                and "down_proj.weight_scale_2" in name
            ):
                tensors[name] = tensors[name] * np.float32(2)

    original = edited(tmp_path, SMALL.name, double)
    exact = {"original": original, "dtype": "float32"}
    first, second = measure_errors(SMALL, IDS, **exact)
    assert (first.module, second.module) == ("layers.0.mlp", "layers.1.mlp")
    assert first.nrmse == pytest.approx(0.5, abs=1e-6)
    np.testing.assert_allclose(first.rows, 0.5, atol=1e-6)
    assert second.worst < 1e-5
    assert measure_errors(SMALL, IDS, dtype="float32")[0].worst < 1e-5


def test_schemes_that_a_checkpoint_has():
    assert available_schemes(EXAMPLE) == ("w4a16", "w4a4")
    assert available_schemes(SMALL) == ("w4a16",)
    errors = measure_errors(SMALL, IDS, schemes=["w4a4_token_scale"])
    assert {error.scheme for error in errors} == {"w4a4_token_scale"}
    assert all(error.nrmse > 0.02 for error in errors)


def test_blocks_with_latent_and_shared_experts_and_layers_without(tmp_path):
    """Only the routed experts of Nemotron count, in latent space. The errors are a kernel's."""
    latent = CHECKPOINTS / "nemotron_h-latent-modelopt-w4a16"
    errors = measure_errors(latent, IDS % 128, dtype="float32")
    assert len(errors) == 2
    assert all(error.worst < 1e-5 for error in errors)

    def scale(tensors):
        """Make one matrix of each expert larger by a 256th, as a rounding to bfloat16 may."""
        for name in tensors:
            if ".experts." in name and "down_proj.weight_scale_2" in name:
                tensors[name] = tensors[name] * np.float32(1 + 2**-8)

    original = edited(tmp_path, latent.name, scale)
    errors = measure_errors(latent, IDS % 128, dtype="float32", original=original)
    assert [error.nrmse for error in errors] == pytest.approx([1 / 257] * 2, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": []}, r"token_ids: expected 1 to \d+ integers"),
        ({"token_ids": [0.5]}, "token_ids: expected"),
        ({"token_ids": [512]}, "token_ids: expected ids from 0 to 511"),
        ({"schemes": ["w4a4"]}, "input scales"),
        ({"schemes": ["w8"]}, "scheme: expected"),
        (
            {"original": EXAMPLE},
            "original: expected the model from which .* was quantized; experts of",
        ),
        ({"original": "/nowhere"}, "is not a folder"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises((ValueError, CheckpointError), match=message):
        measure_errors(SMALL, **{"token_ids": IDS, **arguments})


def test_progress_counts_layers():
    seen = []

    class Bar:
        def __init__(self, name):
            seen.append(name)

        def __enter__(self):
            return lambda *at: seen.append(at)

        def __exit__(self, *_):
            seen.append("done")

    measure_errors(SMALL, IDS, dtype="float32", progress=Bar)
    assert seen == ["layers, w4a16", (1, 2), (2, 2), "done"]


def test_the_table_has_the_worst_token_of_each_layer():
    rows = list(error_rows(MADE, ["a", "b", "\n"]))
    assert len({len(row) for row in rows}) == 1
    assert rows[1] == ("layers.0.mlp", "1.00e-01", "2.00e-01", "2 '\\n'",
                       "2.00e-01", "4.00e-01", "2 '\\n'")  # fmt: skip
    assert rows[2][3] == "0 'a'"
    assert rows[3][:3] == ("mean", "2.00e-01", "3.00e-01")
    assert rows[4][4:6] == ("6.00e-01", "8.00e-01")
    assert [row[3] for row in error_rows(MADE)][1:3] == ["2", "0"]


def test_the_report_is_json_without_nan():
    report = json.loads(json.dumps(error_report(MADE), allow_nan=False))
    assert report[0] == {
        "module": "layers.0.mlp", "scheme": "w4a16", "nrmse": 0.1, "worst": 0.2, "worst_row": 2,
        "rows": [0.05, None, 0.2],
    }  # fmt: skip
    none = LayerErrors("m", "w4a16", 0.0, np.array([np.nan]))
    assert error_report([none])[0]["worst"] is None


@pytest.mark.parametrize(("name", "begin"), [("e.png", b"\x89PNG"), ("e.svg", b"<?xml")])
def test_the_picture(tmp_path, name, begin):
    plot_errors(MADE, tmp_path / name, truth="the original")
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_pictures_that_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"plot: expected a name ending in .*png.*; got .*e\.xyz"):
        check_plot(tmp_path / "e.xyz")
    with pytest.raises(ValueError, match="plot: expected a folder that exists"):
        check_plot(tmp_path / "none" / "e.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="plot: matplotlib is not installed; run pip install"):
        plot_errors(MADE, tmp_path / "e.png", truth="")
