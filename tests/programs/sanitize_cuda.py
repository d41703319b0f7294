"""Call every kernel of the CUDA extension on awkward sizes, for compute-sanitizer.

    bash tests/programs/run_compute_sanitizer.sh
    bash tests/programs/run_racecheck_token_scales.sh

With `--token-scales N`, only the calls with one activation scale per token run, N times each. With
`--parts NAMES`, only these parts run; `PARTS` lists them.

The sizes fill no tile, leave experts without tokens, route out of range, and cross the end of a
chunk of tokens. The outputs must be finite. Workspaces are not cleared, so that a kernel that reads
uninitialized memory would return values that are not finite.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from sanitize_check import check
from sanitize_recurrent import (
    run_convolutions,
    run_delta_rules,
    run_mamba2_scans,
    run_recurrent_steps,
    run_state_windows,
)
from support.extensions import cuda_calls
from support.kernels import dense_fp8_suite as fp8
from support.kernels import float64_layer
from support.kernels.attention_suite import CASES as ATTENTION
from support.kernels.attention_suite import make as make_attention
from support.kernels.dense_few_suite import PAIRS, SIZES
from support.kernels.float64_layer import Options
from support.kernels.fp8_attention_suite import FP8_CASES as FP8_ATTENTION
from support.kernels.fp8_attention_suite import make_fp8
from support.kernels.head_product_suite import CASES as HEAD_PRODUCTS
from support.kernels.head_product_suite import make as make_head_product
from support.kernels.latent_attention_suite import CASES as LATENT_ATTENTION
from support.kernels.latent_attention_suite import make as make_latent_attention
from support.kernels.latents_suite import CASES as LATENTS
from support.kernels.latents_suite import PAIRS as LATENT_PAIRS
from support.kernels.latents_suite import make as make_latents
from support.ops.expert_gradients import layer, ours
from support.ops.gradient_suite import PRODUCTS, ProductGradientSuite, product_gradient
from support.ops.shared_expert_block import HIDDEN, make_layer, run_layers

from jax_nvfp4_moe import Target, ops, prepare
from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.ops.dense import dense, dense_fp8
from jax_nvfp4_moe.ops.head_products import absorb_queries, expand_values
from jax_nvfp4_moe.scheme import FP8ActivationScaling

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)

# tokens, top_k, experts, hidden, intermediate, lowest expert id, highest expert id + 1
LAYERS = (
    (1, 2, 4, 80, 48, 0, 4),
    (70, 3, 5, 80, 48, -2, 7),
    (67, 1, 3, 16, 16, 1, 2),
    (3, 32, 512, 32, 16, 0, 512),
    (4, 8, 6, 208, 336, -2, 8),  # 32 slots: several tiles of k for each warp
    (1, 4, 6, 2064, 48, -2, 8),  # more parts of k for each warp than it has places
)
# The same for experts with few rows, of which a large GPU's blocks claim the tiles.
CLAIMED_LAYERS = (
    (40, 2, 32, 80, 208, 0, 32),
    (90, 2, 32, 80, 48, 0, 32),
    (30, 3, 32, 592, 336, -2, 34),  # whole steps and the rest of k
)
# tokens, experts, router
ROUTERS = (
    (0, 8, Router(2)),
    (1, 60, Router(8, select="logits")),
    (70, 96, Router(9, score="sigmoid", num_groups=48, groups_kept=9)),
    (70, 512, Router(32, score="sqrt_softplus", num_groups=8, groups_kept=4)),
    (6, 1024, Router(32, num_groups=1024, groups_kept=40)),
)
# rows, n, k of linear layers
LINEARS = (
    *((1, 77, 80), (1, 24, 4176), (4, 16, 16), (5, 77, 1040), (16, 40, 592), (64, 77, 1040)),
    *((9, 4300, 144), (33, 4300, 80), (16, 1100, 1040)),
    *((1, 8500, 2064), (5, 8500, 2064), (16, 4100, 1040)),
)
# rows, n, k of layers with plain weights that take the larger output tiles on a large GPU
LARGE_TILES = ((1, 8464, 520), (16, 2200, 520), (64, 600, 1160))
# The same for FP8 weights, whose k is a multiple of 16.
LARGE_FP8_TILES = ((1, 8464, 528), (16, 2200, 528), (64, 600, 1168))
# rows, length, whether there is an addend
NORMS = (
    (0, 64, True),
    (1, 16, True),
    (3, 1037, True),
    (5, 7168, False),
    (2, 16384, True),
    (2, 40000, True),
)
# rows, new tokens, query heads, key heads, width of a head, rotated channels, first position, room
HEADS = (
    (0, 1, 2, 1, 64, 64, 0, 8),
    (1, 1, 1, 1, 4, 0, 0, 1),
    (3, 5, 7, 1, 96, 36, 4, 7),
    (2, 3, 4, 2, 256, 256, 0, 3),
)
OPTIONS = (
    Options(),
    Options(activation="swigluoai", limit=7.0, activation_scale="static"),
    Options(activation="relu2", activation_scale="token", weight_on_input=True),
)


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


def run_linear(sizes, dtype, suffix):
    """Run a linear layer with few rows. Its kernel may divide k between blocks of a cluster."""
    rows, n, k = sizes
    rng = np.random.default_rng(4)
    operands = (
        rng.normal(0, 1, (rows, k)).astype(dtype),
        *float64_layer.random_weight(rng, 1, n, k),
        rng.uniform(0.5, 1, (1, n)).astype(np.float32),
        np.full(1, 1 / 400, np.float32),
        rng.normal(0, 1, (1, n)).astype(np.float32),
        np.zeros(0, np.int32),
    )
    y = cuda_calls.grouped_gemm(*map(jnp.asarray, operands), "none", suffix)
    check(f"linear {suffix} {sizes} {np.dtype(dtype)}", y)


def run_linears():
    """Run linear layers that take each form of the kernel for few rows."""
    for sizes in LINEARS:
        for dtype in (ml_dtypes.bfloat16, np.float16):
            for suffix in cuda_calls.MOE_TARGETS:
                run_linear(sizes, dtype, suffix)


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


def run_attention():
    """Attend to keys whose room is not a number."""
    for name, dtype in itertools.product(ATTENTION, DTYPES[:2]):
        q, k, v, positions = map(jnp.asarray, make_attention(name, np.dtype(dtype)))
        y = ops.attention(q, k, v, positions, backend="attention_cuda", **ATTENTION[name].options)
        check(f"attention {name} {np.dtype(dtype)}", y)
    for name, dtype in itertools.product(FP8_ATTENTION, DTYPES[:2]):
        case = FP8_ATTENTION[name]
        operands, scales = jax.tree.map(jnp.asarray, make_fp8(case, np.dtype(dtype)).given())
        how = {**scales, **case.options, "backend": "attention_cuda"}
        check(f"attention FP8 {name} {np.dtype(dtype)}", ops.attention(*operands, **how))


def run_latents():
    """Attend to latents whose room is not a number, and prepare latents."""
    for name, dtype in itertools.product(LATENT_ATTENTION, DTYPES[:2]):
        case = LATENT_ATTENTION[name]
        q, k, positions = map(jnp.asarray, make_latent_attention(name, np.dtype(dtype)))
        options = {"value_width": case.widths[1], "backend": "latent_attention_cuda"}
        y = ops.attention(q, k, None, positions, **options, **case.options)
        check(f"latent attention {name} {np.dtype(dtype)}", y)
    for name, dtype in itertools.product(HEAD_PRODUCTS, DTYPES[:2]):
        call = make_head_product(name, np.dtype(dtype))
        q, keys, positions = map(jnp.asarray, (call.q, call.keys, call.positions))
        y = absorb_queries(q, keys, positions, **call.options)
        check(f"queries in latents {name} {np.dtype(dtype)}", y)
        y = expand_values(jnp.asarray(call.x), jnp.asarray(call.values))
        check(f"values of latents {name} {np.dtype(dtype)}", y)
    for name, pair in itertools.product(LATENTS, LATENT_PAIRS):
        call = make_latents(name, pair)
        weights = {"q_weight": call.q_weight, "kv_weight": call.kv_weight}
        found = ops.prepare_latents(
            *map(jnp.asarray, call.operands[:3]),
            **{name: None if w is None else jnp.asarray(w) for name, w in weights.items()},
            rope=call.options.rope,
            interleaved=call.options.interleaved,
            backend="latents_cuda",
        )
        for part, y in zip(("q", "cache"), found, strict=True):
            check(f"latents {name} {pair} {part}", y)


def run_norm(rows, h, adds, dtype):
    """Normalize rows with weights of each dtype."""
    rng = np.random.default_rng(4)
    x, added = (jnp.asarray(rng.normal(0, 1, (rows, h)), dtype) for _ in range(2))
    for weight_dtype in DTYPES:
        weight = jnp.asarray(rng.normal(0, 1, h), weight_dtype)
        total, y = ops.add_rms_norm(
            x, added if adds else None, weight, eps=1e-6, backend="norm_cuda"
        )
        name = f"norm {rows} {h} {np.dtype(dtype)} {np.dtype(weight_dtype)}"
        check(f"{name} sum", total)
        check(f"{name} normalized", y)


def run_gating(rows, columns, dtype):
    """Activate and add rows whose width fills no block."""
    rng = np.random.default_rng(6)
    gate_up = jnp.asarray(rng.normal(0, 1, (rows, 2 * columns)), dtype)
    y = ops.activate(gate_up, backend="gating_cuda")
    check(f"gating {rows} {columns} {np.dtype(dtype)} activation", y)
    total = ops.add_gated(y, y[:, :1], y, backend="gating_cuda")
    check(f"gating {rows} {columns} {np.dtype(dtype)} sum", total)
    weight = jnp.ones(2 * columns, dtype)
    linear = ops.add_linear_gated(y, gate_up, weight, y, backend="gating_cuda")
    check(f"gating {rows} {columns} {np.dtype(dtype)} sum behind a linear gate", linear)
    for name, gates in (("of channels", gate_up), ("of heads", gate_up[:, :1])):
        gated = ops.gate_heads(y[:, None], gates, backend="gating_cuda")
        check(f"gating {rows} {columns} {np.dtype(dtype)} gates {name}", gated)


def run_dense(rows, n, k):
    """Multiply by plain weights of each pair of dtypes."""
    rng = np.random.default_rng(6)
    for name in PAIRS:
        dtype, weight_dtype = name.split("-")
        x = jnp.asarray(rng.normal(0, 1, (rows, k)), dtype)
        weight = jnp.asarray(rng.normal(0, 1, (n, k)), weight_dtype)
        for bias in (None, weight[:, 0].astype(dtype), weight[:, 0].astype(jnp.float32)):
            y = dense(x, weight, bias=bias, target=Target.current())
            check(f"dense {rows} {n} {k} {name} bias {None if bias is None else bias.dtype}", y)


def run_dense_fp8(sizes, scales):
    """Multiply by FP8 weights, with rows of each dtype that are not rounded and that are."""
    target = Target.current()
    for x_type, activations in itertools.product(fp8.X_TYPES, ("fp8_weights", "fp8", "fp8_token")):
        call = fp8.make(sizes, x_type, scales=scales).operands
        weight = FP8Tensor(jnp.asarray(call.weight), jnp.asarray(call.scale))
        how = {"activations": FP8ActivationScaling(activations), "input_scale": 0.01}
        y = dense_fp8(jnp.asarray(call.x), weight, target=target, **how)
        check(f"dense {sizes} {x_type} FP8 {activations} {scales}", y)


def run_heads(b, t, n, m, d, rotated, start, room, dtype, gated=False, cache=None):
    """Prepare heads with and without norms; the last tokens may not fit into the cache.

    `cache` is the dtype of the cache, `dtype` by default. A cache in FP8 has scales.
    """
    rng = np.random.default_rng(5)
    heads = (2 if gated else 1) * n + 2 * m
    qkv = jnp.asarray(rng.normal(0, 1, (b, t, heads * d)), dtype)
    keys, values = (jnp.asarray(rng.normal(0, 1, (b, m, room, d)), cache or dtype) for _ in "kv")
    scales = {}
    if cache is not None:
        scale = jnp.asarray(rng.uniform(0.01, 0.1, m), jnp.float32)
        scales = {"k_scale": scale, "v_scale": scale}
    # Of NumPy: initcheck reports the copy by which XLA tiles an array of one number.
    positions = jnp.asarray(np.tile(np.arange(start, start + t, dtype=np.int32), (b, 1)))
    rope = Rope(tuple(0.9**i for i in range(rotated // 2))) if rotated else None
    for weight_dtype in (dtype, jnp.float32):
        weight = jnp.asarray(rng.normal(1, 0.1, d), weight_dtype)
        for norms in ({}, {"q_weight": weight, "k_weight": weight}):
            found = ops.prepare_heads(
                qkv,
                positions,
                keys,
                values,
                **norms,
                **scales,
                rope=rope,
                gated=gated,
                backend="heads_cuda",
            )
            name = f"heads {b} {t} {n} {m} {d} {rotated} {keys.dtype} {bool(norms)} {gated}"
            for part, y in zip(("q", "keys", "values"), found, strict=True):
                check(f"{name} {part}", y)


def run_rows():
    """Run the kernels that handle each row of tokens by itself."""
    for case in ROUTERS:
        run_router(*case)
    for case, dtype in itertools.product(NORMS, DTYPES):
        run_norm(*case, dtype)
    for case, dtype in itertools.product(((0, 64), (1, 1), (3, 129), (64, 512)), DTYPES):
        run_gating(*case, dtype)
    for case, dtype in itertools.product(HEADS, DTYPES[:2]):
        run_heads(*case, dtype)
        run_heads(*case, dtype, gated=True)
        run_heads(*case, dtype, gated=True, cache=jnp.float8_e4m3fn)


def run_dense_layers():
    """Run linear layers with plain and FP8 weights, the largest tiles first."""
    for case in (*LARGE_TILES, *SIZES.values()):
        run_dense(*case)
    for case, scales in itertools.product((*LARGE_FP8_TILES, *fp8.SIZES), fp8.SCALES):
        run_dense_fp8(case, scales)


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    cuda_calls.register()
    if arguments.token_scales is not None:
        run_token_scales(arguments.token_scales)
        return
    for part in arguments.parts:
        PARTS[part]()


def run_chains():
    """Run chains of layers, which leave work to each other, with and without branches."""
    target = Target.current()
    layers = [make_layer(seed, target) for seed in range(2)]
    for rows, shared in itertools.product((1, 3, 16, 70, 1100), (False, True)):
        x = jax.random.normal(jax.random.key(rows), (rows, HIDDEN), jnp.bfloat16)
        run = functools.partial(run_layers, layers=layers, target=target, shared=shared)
        y = ops.chain_calls(run)(x)
        check(f"chain {rows} {shared}", y)
        if not (np.asarray(y) == np.asarray(run(x))).all():
            raise RuntimeError("a chain has other bits than its calls")


def run_claims():
    """Run expert layers of which blocks claim the tiles."""
    for case, dtype in itertools.product(CLAIMED_LAYERS, DTYPES[:2]):
        for options in OPTIONS:
            for suffix in cuda_calls.MOE_TARGETS:
                run_layer(case, dtype, options, suffix)


def run_experts():
    """Run expert layers, grouped products and the quantizer."""
    for dtype in DTYPES:
        for options in OPTIONS:
            run_layer(LAYERS[1], dtype, options)
        run_product(dtype, "none")
        run_product(dtype, "static")
        run_quantizer(dtype, "linear")
        run_quantizer(dtype, "swizzle_128x4")
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


def run_gradients():
    """Multiply by transposed weights: in gradients of products, linears and expert layers."""
    target = Target.current()
    for case, dtype in itertools.product(PRODUCTS, ("bfloat16", "float16")):
        rows, weight, sizes, bar = ProductGradientSuite().operands(case, dtype)
        ready = prepare(weight, target=target, dtype=dtype)
        found = product_gradient(rows, ready, sizes, bar, target=target)
        check(f"gradient of product {case} {dtype}", found)
    for activation, tokens in itertools.product(("silu", "relu2"), (1, 9, 300)):
        x, params, ids, weights = layer(tokens, activation=activation, dtype=jnp.bfloat16)
        found = ours(x, prepare(params, target=target), ids, weights, activation=activation)
        for name, bars in found.items():
            check(f"gradient of layer {activation} {tokens} {name}", bars)


PARTS = {
    "linears": run_linears,
    "attention": run_attention,
    "latents": run_latents,
    "rows": run_rows,
    "dense": run_dense_layers,
    "claims": run_claims,
    "chains": run_chains,
    "delta_rules": run_delta_rules,
    "mamba2_scans": run_mamba2_scans,
    "convolutions": run_convolutions,
    "recurrent_steps": run_recurrent_steps,
    "state_windows": run_state_windows,
    "experts": run_experts,
    "gradients": run_gradients,
}

if __name__ == "__main__":
    main()
