"""Test what `quantize_model` refuses, before it writes anything."""

import numpy as np
import pytest
from support.files.checkpoint_edits import read_all
from support.files.given import EXAMPLE
from support.files.unquantized import SMALL, read_config, write_source

from jax_nvfp4_moe import CheckpointError, quantize_model
from jax_nvfp4_moe.numerics.rounding import ALGORITHMS

EXPERTS = "model.layers.0.mlp.experts"


def broken(tmp_path, **changes):
    tensors, config = read_all(SMALL / "source"), read_config(SMALL / "source")
    tensors = {k: v for k, v in (tensors | changes).items() if v is not None}
    return write_source(tmp_path / "source", tensors, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w4a4"}, "token_ids: scheme w4a4 with algorithm max needs a calibration text"),
        ({"scheme": "fp8"}, "scheme: expected w4a16 or w4a4, got 'fp8'"),
        ({"format": "gguf"}, "format: expected modelopt or compressed-tensors, got 'gguf'"),
        ({"modules": "some"}, "modules: expected all or experts"),
        ({"algorithm": "best"}, f"algorithm: expected one of {', '.join(ALGORITHMS)}"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"exclude": ["*.self_atn*"]}, "exclude: no linear or experts match '.*self_atn"),
        ({"exclude": [f"{EXPERTS}.1.*"]}, "expected all experts of a layer or none"),
        ({"exclude": "*.self_attn*"}, "exclude: expected a sequence of names"),
        ({"exclude": ["*"]}, "exclude: nothing is left to quantize"),
        ({"shard_bytes": 0}, "shard_bytes: expected at least 1, got 0"),
        (
            {"token_ids": [1, 2, 3], "scheme": "w4a16"},
            "token_ids: scheme w4a16 .* uses no calibration text",
        ),
        ({"token_ids": [1, 2, 3]}, "expected at least 512 tokens, one window"),
        ({"token_ids": [1, 64], "window": 2}, "ids from 0 to 63, got 1 to 64"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        quantize_model(SMALL / "source", tmp_path / "q", **options)
    assert not (tmp_path / "q").exists()


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="destination: expected a folder that is empty"):
        quantize_model(SMALL / "source", tmp_path)


def test_what_is_quantized_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantize_model(EXAMPLE, tmp_path / "q")


def test_a_source_with_tensors_missing_is_refused_before_anything_is_written(tmp_path):
    source = broken(tmp_path, **{f"{EXPERTS}.0.up_proj.weight": None, "model.norm.weight": None})
    with pytest.raises(CheckpointError) as error:
        quantize_model(source, tmp_path / "q")
    assert len(error.value.problems) == 2
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused(tmp_path, value):
    name = f"{EXPERTS}.0.up_proj.weight"
    weight = read_all(SMALL / "source")[name]
    weight[3, 5] = value
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj: expected finite weights"):
        quantize_model(broken(tmp_path, **{name: weight}), tmp_path / "q")
    assert not (tmp_path / "q" / "config.json").exists()


def test_inputs_that_blocks_do_not_divide_are_refused(tmp_path):
    """All matrices are reported at once, with what to do."""
    tensors, config = read_all(SMALL / "source"), read_config(SMALL / "source")
    for part, cut in (("gate", np.s_[:24]), ("up", np.s_[:24]), ("down", np.s_[:, :24])):
        for expert in range(4):
            name = f"{EXPERTS}.{expert}.{part}_proj.weight"
            tensors[name] = tensors[name][cut]
    source = write_source(tmp_path / "source", tensors, config | {"moe_intermediate_size": 24})
    with pytest.raises(CheckpointError, match="has 24 inputs; expected a multiple of 16") as error:
        quantize_model(source, tmp_path / "q")
    assert len(error.value.problems) == 4
