"""Call one compiled expert layer again and again with other routing; one line of JSON.

    python replay_cuda_graph.py MOE_TARGET_SUFFIX ACTIVATION_SCALE

XLA puts the FFI call into a CUDA graph where XLA_FLAGS allow it, so `test_cuda_kernel.py` runs
this in a process of its own. The truth is float64; a graph that kept the first routing would give
every call the first output.
"""

import json
import sys

import cuda_calls
import float64_layer
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from float64_layer import Options

CALLS, TOKENS, TOP_K, EXPERTS = 8, 33, 3, 6


def main(suffix, mode):
    """Run the calls and count outputs that differ from the first and from the truth."""
    cuda_calls.register()
    rng, options = np.random.default_rng(0), Options(activation_scale=mode)
    layer = float64_layer.random_layer(rng, EXPERTS, 128, 64)
    x = rng.normal(0, 1, (TOKENS, 128)).astype(ml_dtypes.bfloat16)
    weights = rng.uniform(0.1, 1, (TOKENS, TOP_K)).astype(np.float32)
    device = jax.tree.map(jnp.asarray, layer)
    call = jax.jit(lambda x, ids, weights: cuda_calls.moe(x, device, ids, weights, options, suffix))
    outputs, wrong = set(), 0
    for _ in range(CALLS):
        ids = rng.integers(-1, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
        y = np.asarray(call(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights)), np.float64)
        outputs.add(y.tobytes())
        truth = float64_layer.moe(x, layer, ids, weights, options)
        wrong += bool(np.abs(y - truth).max() > 0.05 * np.abs(truth).max())
    print(json.dumps({"calls": CALLS, "different_outputs": len(outputs), "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
