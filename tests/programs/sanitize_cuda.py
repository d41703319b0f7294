"""Call every kernel of the CUDA extension on awkward sizes, for compute-sanitizer.

    bash tests/programs/run_compute_sanitizer.sh
    bash tests/programs/run_racecheck_token_scales.sh

With `--token-scales N`, only the calls with one activation scale per token run, N times each.

The sizes fill no tile, leave experts without tokens, route out of range, and cross the end of a
chunk of tokens. The outputs must be finite. Workspaces are not cleared, so that a kernel that reads
uninitialized memory would return values that are not finite.
"""

import argparse

import cuda_calls
import float64_layer
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from float64_layer import Options

from jax_nvfp4_moe import ops
from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.numerics.routing import Router

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)

# tokens, top_k, experts, hidden, intermediate, lowest expert id, highest expert id + 1
LAYERS = (
    (1, 2, 4, 80, 48, 0, 4),
    (70, 3, 5, 80, 48, -2, 7),
    (67, 1, 3, 16, 16, 1, 2),
    (3, 32, 512, 32, 16, 0, 512),
    (4, 8, 6, 208, 336, -2, 8),  # 32 slots: several tiles of k for each warp
)
# tokens, experts, router
ROUTERS = (
    (0, 8, Router(2)),
    (1, 60, Router(8, select="logits")),
    (70, 96, Router(9, score="sigmoid", num_groups=48, groups_kept=9)),
    (70, 512, Router(32, score="sqrt_softplus", num_groups=8, groups_kept=4)),
    (6, 1024, Router(32, num_groups=1024, groups_kept=40)),
)
OPTIONS = (
    Options(),
    Options(activation="swigluoai", limit=7.0, activation_scale="static"),
    Options(activation="relu2", activation_scale="token", weight_on_input=True),
)


def check(name, y):
    """Wait for `y`, and raise an error if it is not finite."""
    if not np.isfinite(np.asarray(y, np.float32)).all():
        raise RuntimeError(f"{name}: an output is not finite")
    print(name, flush=True)


def run_layer(case, dtype, options, suffix="w4a16_sm90"):
    """Run one expert layer."""
    t, k, e, h, i, low, high = case
    rng = np.random.default_rng(0)
    layer = float64_layer.random_layer(rng, e, h, i, gated=options.gated, bias=True)
    x = rng.normal(0, 1, (t, h)).astype(dtype)
    ids = rng.integers(low, high, (t, k)).astype(np.int32)
    weights = rng.uniform(0.1, 1, (t, k)).astype(np.float32)
    operands = jax.tree.map(jnp.asarray, (x, layer, ids, weights))
    y = cuda_calls.moe(*operands, options, suffix)
    check(f"layer {suffix} {case} {np.dtype(dtype)} {options}", y)


def run_product(dtype, mode, suffix="w4a16_sm90"):
    """Run one grouped product with an empty group, a negative size and padding rows."""
    rng = np.random.default_rng(1)
    packed, block_scale = float64_layer.random_weight(rng, 4, 200, 80)
    operands = (
        rng.normal(0, 1, (150, 80)).astype(dtype),
        packed,
        block_scale,
        rng.uniform(0.5, 1, (4, 2)).astype(np.float32),
        np.full(4, 1 / 400, np.float32),
        rng.normal(0, 1, (4, 200)).astype(np.float32),
        np.array([70, 0, -3, 33], np.int32),
    )
    y = cuda_calls.grouped_gemm(*map(jnp.asarray, operands), mode, suffix)
    check(f"product {suffix} {np.dtype(dtype)} {mode}", y)


def run_quantizer(dtype, scale_layout):
    """Quantize rows that do not fill a tile of scales."""
    x = np.random.default_rng(2).normal(0, 1, (130, 80)).astype(dtype)
    packed, block_scale, _ = cuda_calls.quantize(jnp.asarray(x), None, scale_layout)
    check(f"quantizer {np.dtype(dtype)} {scale_layout} codes", packed)
    check(f"quantizer {np.dtype(dtype)} {scale_layout} scales", block_scale)


def run_router(tokens, experts, router):
    """Route with a correction bias."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(0, 2, (tokens, experts)), jnp.float32)
    bias = jnp.asarray(rng.normal(0, 0.3, experts), jnp.float32)
    ids, weights = ops.route(router, logits, bias, backend="route_cuda")
    check(f"router {tokens} {experts} {router} ids", ids)
    check(f"router {tokens} {experts} {router} weights", weights)


def run_fp4(suffix):
    """Run the kernels for FP4 tensor cores, which quantize all activations."""
    for options in (Options(activation_scale="static"), *OPTIONS[1:]):
        for case in LAYERS:
            run_layer(case, ml_dtypes.bfloat16, options, suffix)
        run_product(ml_dtypes.bfloat16, options.activation_scale, suffix)


def run_token_scales(repeats):
    """Run every kernel of a layer or a grouped GEMM with one activation scale per token."""
    options = (Options(activation_scale="token"), OPTIONS[2])
    suffixes = [*cuda_calls.MOE_TARGETS]
    if _ffi.load("_nvfp4_cuda").emulates_blackwell():
        suffixes += ["w4a4_sm100", "w4a4_sm120"]
    for _ in range(repeats):
        for suffix in suffixes:
            for option in options:
                run_layer(LAYERS[1], ml_dtypes.bfloat16, option, suffix)
            run_product(ml_dtypes.bfloat16, "token", suffix)
        for dtype in (np.float16, np.float32):
            run_layer(LAYERS[1], dtype, options[0])
            run_product(dtype, "token")


def main():
    """Run everything once, or only the calls that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token-scales", type=int, metavar="N")
    repeats = parser.parse_args().token_scales
    cuda_calls.register()
    if repeats is not None:
        run_token_scales(repeats)
        return
    for dtype in DTYPES:
        for options in OPTIONS:
            run_layer(LAYERS[1], dtype, options)
        run_product(dtype, "none")
        run_product(dtype, "static")
        run_quantizer(dtype, "linear")
        run_quantizer(dtype, "swizzle_128x4")
    for case in ROUTERS:
        run_router(*case)
    for case in LAYERS:
        run_layer(case, ml_dtypes.bfloat16, Options(activation_scale="token"))
        for suffix in cuda_calls.MOE_TARGETS:
            run_layer(case, ml_dtypes.bfloat16, Options(), suffix)
            run_layer(case, ml_dtypes.bfloat16, Options(activation_scale="static"), suffix)
    # 1040 tokens with 32 experts each make one full chunk of 32768 slots and a short one.
    run_layer((1040, 32, 40, 16, 16, -1, 41), ml_dtypes.bfloat16, Options())
    if _ffi.load("_nvfp4_cuda").emulates_blackwell():
        run_fp4("w4a4_sm100")
        run_fp4("w4a4_sm120")


if __name__ == "__main__":
    main()
