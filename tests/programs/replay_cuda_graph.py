"""Call one compiled expert layer repeatedly with changing routing, and print one line of JSON.

    python replay_cuda_graph.py MOE_TARGET_SUFFIX ACTIVATION_SCALE

XLA puts the FFI call into a CUDA graph if XLA_FLAGS allow it, so tests run this program in its own
process. Outputs are compared with float64. A graph that kept the first routing would return the
first output from every call.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from support.extensions import cuda_calls
from support.kernels import sm100_cases
from support.kernels.float64_layer import Options
from support.kernels.kernel_cases import BF16, make_layer, uniform

CALLS, TOKENS, TOP_K, EXPERTS = 8, 33, 3, 6
CASE = (TOKENS, TOP_K, EXPERTS, 128, 64, uniform(TOKENS, TOP_K, EXPERTS))


def main(suffix, mode):
    """Run the calls. Count the distinct outputs, and those that are far from float64."""
    cuda_calls.register()
    rng, options = np.random.default_rng(0), Options(activation_scale=mode)
    make = sm100_cases.make if suffix == "w4a4_sm100" else make_layer
    case = make(CASE, BF16, options)
    layer, weights = jax.tree.map(jnp.asarray, (case.layer, case.weights))
    call = jax.jit(lambda x, ids: cuda_calls.moe(x, layer, ids, weights, options, suffix))
    outputs, wrong = set(), 0
    for _ in range(CALLS):
        ids = rng.integers(-1, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
        y = np.asarray(call(jnp.asarray(case.x), jnp.asarray(ids)), np.float64)
        outputs.add(y.tobytes())
        exact = dataclasses.replace(case, ids=ids).truth
        wrong += bool(np.abs(y - exact).max() > 0.05 * np.abs(exact).max())
    print(json.dumps({"calls": CALLS, "different_outputs": len(outputs), "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
