"""Checks that all architectures' tests share, against the reference tensors of a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
from given import reference_tensors

from jax_nvfp4_moe import load_moe

EXACT = {"scheme": "checkpoint", "dtype": jnp.float32, "backend": "reference"}
run = jax.jit(lambda model, ids: model(ids))


def relative(actual, expected):
    """Return the error relative to `expected`, both as vectors."""
    actual = np.asarray(actual, np.float64).reshape(expected.shape)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def moe_layers(tensors):
    """Return the layers that have an expert block in the reference tensors."""
    return sorted({int(name.split(".")[1]) for name in tensors if name.endswith("moe.input")})


def block_errors(folder, layer, **changes):
    """Return the relative errors of router weights, routed experts and the block of one layer."""
    prefix = f"layers.{layer}.moe."
    tensors = reference_tensors(folder)
    given = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
    moe = load_moe(folder, layer, **{**EXACT, **changes})
    chosen, weights = given["topk_indices"], given["topk_weights"]
    ids, own = map(np.asarray, moe.route(jnp.asarray(given["experts_input"])))
    order, there = np.argsort(ids, -1), np.argsort(chosen, -1)
    np.testing.assert_array_equal(
        np.take_along_axis(ids, order, -1), np.take_along_axis(chosen, there, -1)
    )
    routed = moe.experts(
        jnp.asarray(given["experts_input"]), jnp.asarray(chosen, jnp.int32), jnp.asarray(weights)
    )
    return {
        "weights": relative(
            np.take_along_axis(own, order, -1), np.take_along_axis(weights, there, -1)
        ),
        "experts": relative(routed, given["experts_output"]),
        "block": relative(moe(jnp.asarray(given["input"])), given["output"]),
    }


def logit_error(logits, expected):
    """Return the largest error of a logit, in units of the RMS of all expected logits."""
    rms = np.sqrt(np.mean(np.square(expected, dtype=np.float64)))
    return np.abs(np.asarray(logits, np.float64) - expected).max() / rms
