"""Test which part of a source becomes which tensor: no values are computed."""

import numpy as np
import pytest
from support.files.unquantized import dequantized

from jax_nvfp4_moe.checkpoint.opening import open_checkpoint
from jax_nvfp4_moe.models.loading import find_unquantized
from jax_nvfp4_moe.quantization.selection import select_matrices

PARTS = ("gate", "up", "down")


def halves(stack):
    """Return gate and up of matrices or biases, whose rows gate comes before up."""
    return np.split(stack, 2, axis=1)


def alternating(stack):
    """Return gate and up of matrices or biases whose rows alternate."""
    return stack[:, 0::2], stack[:, 1::2]


@pytest.mark.parametrize(
    ("name", "split"),
    [("gpt_oss-modelopt-w4a16", alternating), ("llama4_text-modelopt-w4a16", halves)],
)
def test_stacked_experts_become_one_matrix_each(tmp_path, name, split):
    """The file stores the experts as ``[e, inputs, outputs]``, and biases as ``[e, outputs]``."""
    with open_checkpoint(dequantized(name, tmp_path / "source")) as checkpoint:
        selection = select_matrices(checkpoint, find_unquantized(checkpoint).table.requests)
        tensors = checkpoint.tensors
        found = {one.module: one.source.read(tensors) for one in selection.matrices}
        shapes = {one.module: one.source.shape(tensors) for one in selection.matrices}
        kept = {
            key: part.read(tensors) for key, part in selection.kept.items() if "experts." in key
        }
        stacks = [key for key in tensors.names() if key.endswith("experts.gate_up_proj")]
        assert stacks
        for key in stacks:
            prefix = key.removesuffix(".gate_up_proj")
            stack, down = (tensors.read(f"{prefix}.{one}_proj") for one in ("gate_up", "down"))
            stack, down = np.swapaxes(stack, 1, 2), np.swapaxes(down, 1, 2)
            matrices = dict(zip(PARTS, (*split(stack), down), strict=True))
            stored = checkpoint.key_mapping.stored(prefix)
            for part, each in matrices.items():
                for expert, matrix in enumerate(each):
                    module = f"{stored}.{expert}.{part}_proj"
                    np.testing.assert_array_equal(found[module], matrix)
                    assert shapes[module] == matrix.shape
            if f"{key}_bias" not in tensors:
                continue
            biases = *split(tensors.read(f"{key}_bias")), tensors.read(f"{prefix}.down_proj_bias")
            for part, each in zip(PARTS, biases, strict=True):
                for expert, bias in enumerate(each):
                    np.testing.assert_array_equal(kept[f"{stored}.{expert}.{part}_proj.bias"], bias)
