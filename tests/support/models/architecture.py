"""Checks that all architectures' tests share, against the reference tensors of a checkpoint."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.files.given import CHECKPOINTS, reference_tensors

from jax_nvfp4_moe import load_model, load_moe

EXACT = {"scheme": "checkpoint", "dtype": jnp.float32, "backend": "reference"}
# The same with the CPU kernels for experts and linears. Their programs compile several times faster
# than those of the reference, which other devices run here too.
KERNELS = EXACT | {"backend": ("moe_w4a16_cpu", "reference")}
# Bound of whole-model logits, in units of their root mean square: float32 sums of a few layers. The
# worst token meets it, and reaches 7e-7 to 3.8e-6 where activations are rounded.
LOGIT_BOUND = 1e-5
# In these folders only the median token must meet the bound. Noise of 1e-6 in the embeddings flips
# a rounding in the tool's own run. It moves one token by 0.1 in FP4 and by 4e-5 in FP8, and the
# median token by 1e-5 and 4e-6 (sensitivity_to_1e6_noise in reference.json). The tools saw no such
# flip in other folders.
FLIPS = ("qwen3moe-modelopt-w4a4", "qwen3_moe-ct-mixed")

# One folder for each kind of mixer, mask and cache. How a cache is filled, padding and `generate`
# depend on these alone, and not on the family that has them. test_default_dtype.py fills the cache
# of every folder in two halves, and lets these folders decode.
EACH_MIXER = (
    "deepseek_v3-modelopt-mixed-w4a16-kv8",  # latent attention, FP8 cache
    "deepseek_v4-modelopt-w4a16",  # compressed keys
    "gemma4_edge-modelopt-w4a16",  # keys of an earlier layer, embeddings of single layers
    "glm5_next-modelopt-w4a16",  # windows that an indexer chooses, beside Kimi delta attention
    "glm_moe_dsa-modelopt-w4a16",  # keys that an indexer chooses, also for a later layer
    "gpt_oss-modelopt-w4a16",  # windows and sinks
    "kimi_linear-modelopt-w4a16",  # Kimi delta attention beside latent attention
    "lfm2_moe-modelopt-w4a16",  # short convolutions
    "llama4_text-modelopt-w4a16",  # chunks
    "minimax_m3-modelopt-w4a16",  # chosen blocks of keys
    "nemotron_h-modelopt-w4a16",  # Mamba-2
    "qwen3_moe-ct-w4a4-kv8",  # FP8 cache, rounded activations
    "qwen3_moe-window-modelopt-w4a16",  # windows
    "qwen3_next-modelopt-w4a16",  # gated delta net
    "qwen3moe-modelopt-w4a16",  # grouped-query attention
    "qwen4_exp-modelopt-w4a16",  # windows that an indexer chooses, embeddings of several tokens
)

# One folder for each kind of mixer whose results could depend on the length of a text.
LONG_TEXTS = (
    "gpt_oss-modelopt-w4a16",  # windows and sinks
    "mixtral-window-modelopt-w4a16",  # windows
    "llama4_text-modelopt-w4a16",  # chunks
    "deepseek_v3-direct-modelopt-w4a16",  # latent attention
    "qwen3_next-modelopt-w4a16",  # gated delta net
    "nemotron_h-modelopt-w4a16",  # Mamba-2
    "kimi_linear-modelopt-w4a16",  # Kimi delta attention
    "lfm2_moe-modelopt-w4a16",  # short convolutions
    "glm_moe_dsa-modelopt-w4a16",  # keys that an indexer chooses
    "minimax_m3-modelopt-w4a16",  # chosen blocks of keys
    "deepseek_v4-modelopt-w4a16",  # compressed keys
)

run = jax.jit(lambda model, ids: model(ids))
_run_parts = jax.jit(
    lambda moe, x, given, ids, weights: (moe.route(given), moe.experts(given, ids, weights), moe(x))
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loaded checkpoint and its reference logits.

    Attributes:
      folder: name of the checkpoint.
      model: the loaded model.
      ids: token ids of two prompts, equal ones if the file has only one.
      expected: reference logits of the prompts.
    """

    folder: str
    model: Any
    ids: np.ndarray
    expected: np.ndarray

    def error(self, logits, expected=None):
        """Return the error of logits in units of the bound."""
        expected = self.expected if expected is None else expected
        worst = np.abs(np.asarray(logits, np.float64) - expected).max(axis=-1)
        return self.excess(worst / np.sqrt(np.mean(np.square(expected))))

    def excess(self, errors):
        """Return the worst of all tokens' errors, in `FLIPS` the median, in units of the bound."""
        count = np.median if self.folder in FLIPS else np.max
        return count(errors) / LOGIT_BOUND


def load_case(name, folder=None, how=KERNELS):
    """Load the checkpoint `name`, or a changed copy of it in `folder`, with the arguments `how`."""
    folder = folder or CHECKPOINTS / name
    tensors = reference_tensors(CHECKPOINTS / name)
    model = load_model(folder, **how)
    given = tensors["input_ids"], tensors["logits"]
    ids, logits = (np.resize(value, (2, *value.shape[1:])) for value in given)
    return Case(name, model, ids.astype(np.int32), logits)


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
    chosen, weights = given["topk_indices"].astype(np.int32), given["topk_weights"]
    (ids, own), routed, block = _run_parts(
        moe, given["input"], given["experts_input"], chosen, weights
    )
    order, there = np.argsort(ids, -1), np.argsort(chosen, -1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(ids), order, -1), np.take_along_axis(chosen, there, -1)
    )
    return {
        "weights": relative(
            np.take_along_axis(np.asarray(own), order, -1), np.take_along_axis(weights, there, -1)
        ),
        "experts": relative(routed, given["experts_output"]),
        "block": relative(block, given["output"]),
    }


def logit_error(logits, expected):
    """Return the largest error of a logit, in units of the RMS of all expected logits."""
    rms = np.sqrt(np.mean(np.square(expected, dtype=np.float64)))
    return np.abs(np.asarray(logits, np.float64) - expected).max() / rms
