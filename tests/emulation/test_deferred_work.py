"""Test kernels that do the work of the kernel before them: one launch has the bits of two."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.emulation import cuda_emulation, deferred_emulation
from support.emulation.emulation_suite import run_layer
from support.kernels.head_suite import Call
from support.kernels.kernel_cases import Options, make_layer, uniform
from support.kernels.linear_few_suite import make_linear

from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.heads import HeadOptions

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

H200 = 132  # multiprocessors
PAIRS = ("bfloat16-bfloat16", "bfloat16-float32", "float16-float16")


def make_norm(h, pair):
    """Return x, the addend and the weight of a norm of one row."""
    dtype, weight_dtype = (jnp.dtype(name) for name in pair.split("-"))
    rng = np.random.default_rng(h)
    x, added = (np.asarray(rng.normal(0, 1, (1, h)), dtype) for _ in range(2))
    return x, added, np.asarray(rng.normal(1, 0.3, h), weight_dtype)


def assert_equal(run, *, saved):
    """Assert that `run` has the same bits with as many launches less as are `saved`."""
    (together, count), (apart, others) = run(together=True), run(together=False)
    assert others - count == saved
    assert together == apart


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
# The row has one piece of 16 bytes, then one or two for each thread, and as many as fit.
@pytest.mark.parametrize(("n", "k"), [(1, 8), (128, 2048), (77, 2056), (24, 4096)])
def test_a_dense_layer_normalizes_its_row(library, n, k, pair, added, older):
    norm = make_norm(k, pair)
    norm = norm if added else (norm[0], None, norm[2])
    rng = np.random.default_rng(n)
    weight = np.asarray(rng.normal(0, 1, (n, k)), norm[0].dtype)
    bias = np.float32(rng.normal(0, 1, n)) if added else None

    def run(**options):
        return deferred_emulation.norm_and_dense(
            library, norm, weight, bias, H200, older=older, **options
        )

    assert_equal(run, saved=1)


@pytest.mark.parametrize(
    ("n", "k", "pair"),
    [
        (300 * 8, 256, "bfloat16-bfloat16"),  # more outputs than run at once: dense_few.cu
        (8, 4104, "bfloat16-bfloat16"),  # a row of more pieces than the block has
        (8, 64, "bfloat16-float16"),  # types that only the kernel of the norm has
    ],
)
def test_a_dense_layer_leaves_other_norms_to_their_kernel(library, n, k, pair):
    norm = make_norm(k, pair)
    weight = np.asarray(np.random.default_rng(n).normal(0, 1, (n, k)), norm[0].dtype)

    def run(**options):
        return deferred_emulation.norm_and_dense(
            library, norm, weight, None, H200, older=True, **options
        )

    assert_equal(run, saved=0)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("engine", ["sm80", "sm90"])
@pytest.mark.parametrize(("n", "k"), [(16, 16), (77, 2032), (40, 2064), (24, 4096)])
def test_a_linear_layer_normalizes_its_row(library, engine, n, k, pair, older):
    norm = make_norm(k, pair)
    numbers = "f16-none" if pair.startswith("float16") else "bf16-none"
    product = make_linear((1, n, k), numbers).operands

    def run(**options):
        with cuda_emulation.capability(library, {"sm80": 8, "sm90": 9}[engine]):
            return deferred_emulation.norm_and_linear(
                library, engine, norm, product, H200, older=older, **options
            )

    assert_equal(run, saved=1)


@pytest.mark.parametrize(("n", "k"), [(16, 4112), (5120, 512)])
def test_a_linear_layer_leaves_other_norms_to_their_kernel(library, n, k):
    """A row of more pieces than the block has, and more outputs on few multiprocessors."""
    norm, product = make_norm(k, PAIRS[0]), make_linear((1, n, k), "bf16-none").operands

    def run(**options):
        with cuda_emulation.capability(library, 9):
            return deferred_emulation.norm_and_linear(
                library, "sm90", norm, product, 7, older=True, **options
            )

    assert_equal(run, saved=0)


# Query heads, key heads, width, rotated channels, room, positions, and options.
TOKENS = {
    "one head": ((1, 1), 8, 8, 4, (3,), {}),
    "groups": ((8, 2), 64, 64, 300, (0, 63, 64, 299), {}),
    "full cache": ((16, 1), 128, 128, 130, (129, 128), {}),
    "part rotates": ((6, 2), 128, 64, 200, (70, 5), {}),
    "outside": ((4, 2), 64, 32, 70, (70, 69, 2**30), {}),
    "window": ((4, 2), 64, 64, 700, (640, 64, 0), {"window": 65}),
    "window of one": ((4, 2), 64, 64, 90, (64, 0), {"window": 1}),
    "chunk": ((4, 2), 64, 64, 700, (640, 64, 639), {"chunk": 64}),
    "parts": ((8, 1), 128, 128, 1100, (1050,), {}),
    "parts without keys": ((8, 1), 128, 128, 2000, (300, 2), {}),
    "wide": ((4, 2), 256, 64, 600, (500, 0), {"gated": True}),
    "between": ((3, 1), 192, 192, 100, (77,), {"rotates_first": True}),
    "no norms": ((4, 4), 64, 0, 100, (50,), {"norms": False}),
    "sinks": ((4, 2), 64, 64, 100, (64, 7), {"sinks": True}),
}


def make_token(name, pair):
    """Return a `head_suite.Call` of one token for each row, and the options of attention."""
    (n, m), width, rotated, room, positions, options = TOKENS[name]
    options = dict(options)
    dtype, weight_dtype = (jnp.dtype(part) for part in pair.split("-"))
    rng, b, half = np.random.default_rng(len(name)), len(positions), rotated // 2
    gated, norms = options.pop("gated", False), options.pop("norms", True)
    if options.get("sinks"):
        options["sinks"] = np.float32(rng.normal(0, 1, n))

    def normal(*shape):
        return np.asarray(rng.normal(0, 1, shape), dtype)

    weights = tuple(np.asarray(rng.normal(1, 0.3, width), weight_dtype) for _ in range(2))
    frequencies = tuple(float(1e4 ** (-i / half)) for i in range(half))
    call = Call(
        normal(b, 1, ((2 if gated else 1) * n + 2 * m) * width),
        np.int32(positions).reshape(-1, 1),
        normal(b, m, room, width),
        normal(b, m, room, width),
        weights if norms else None,
        HeadOptions(
            Rope(frequencies, 1.5) if half else None,
            1e-6,
            options.pop("rotates_first", False),
            gated,
        ),
    )
    return call, options


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("shared_bytes", [99 << 10, cuda_emulation.HOPPER_SHARED_BYTES])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", TOKENS)
def test_attention_prepares_the_heads_of_a_token(library, name, pair, shared_bytes, older):
    call, options = make_token(name, pair)

    def run(**given):
        return deferred_emulation.heads_and_attention(
            library, call, older=older, shared_bytes=shared_bytes, **options, **given
        )

    assert_equal(run, saved=1)


def test_the_new_key_and_value_take_their_place(library):
    """Stale numbers at the place of the new token change nothing, even if they are NaN."""
    call, _ = make_token("groups", PAIRS[0])
    stale = call.keys.copy(), call.values.copy()
    for row, position in enumerate(call.positions[:, 0]):
        for array in stale:
            array[row, :, position] = np.nan
    shared = cuda_emulation.HOPPER_SHARED_BYTES
    run = deferred_emulation.heads_and_attention
    clean, _ = run(library, call, older=True, together=True, shared_bytes=shared)
    other = dataclasses.replace(call, keys=stale[0], values=stale[1])
    assert run(library, other, older=True, together=True, shared_bytes=shared)[0] == clean


def test_attention_leaves_large_groups_to_the_kernel_of_heads(library):
    rng = np.random.default_rng(0)
    call, _ = make_token("one head", PAIRS[0])
    qkv = np.asarray(rng.normal(0, 1, (1, 1, (17 + 2) * 8)), call.qkv.dtype)
    call = dataclasses.replace(call, qkv=qkv)

    def run(**given):
        return deferred_emulation.heads_and_attention(
            library, call, older=True, shared_bytes=99 << 10, **given
        )

    assert_equal(run, saved=0)


# Tokens, width and experts of a token. Rows have one piece of 16 bytes for a part of the threads,
# for each of them, and as many as fit. The last row is too wide, and takes two launches.
COMBINED = [(40, 48, 8), (3, 2048, 8), (300, 1040, 3), (2, 8192, 10), (2, 8208, 2)]
EXPERTS = 5
FEW, MANY = 1000, 1  # multiprocessors for which the launch overlaps, or has the larger L1 cache


@pytest.mark.parametrize("multiprocessors", [FEW, MANY])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("t", "h", "top_k"), COMBINED)
def test_a_norm_sums_the_outputs_of_experts(library, t, h, top_k, pair, weighted, multiprocessors):
    dtype, weight_dtype = (jnp.dtype(name) for name in pair.split("-"))
    rng = np.random.default_rng(h)
    outputs = np.asarray(rng.normal(0, 1, (t, top_k, h)), dtype)
    ids = rng.integers(-1, EXPERTS + 1, (t, top_k)).astype(np.int32)
    ids[1] = -1
    outputs[(ids < 0) | (ids >= EXPERTS)] = np.nan  # nobody has written them
    tokens = outputs, ids, np.float32(rng.random((t, top_k))) if weighted else None
    norm = np.asarray(rng.normal(0, 1, (t, h)), dtype), np.asarray(rng.normal(1, 0.3, h))
    norm = norm[0], norm[1].astype(weight_dtype)

    def run(**options):
        return deferred_emulation.combine_and_norm(
            library, tokens, norm, EXPERTS, multiprocessors, **options
        )

    assert_equal(run, saved=1 if h <= 8192 else 0)


# Rows, width, and inputs of a linear gate, or which other gate there is. Rows have fewer pieces
# than a linear gate has parts, as many, and more. Gates have none for some threads, and several.
GATED = [
    (3, 48, 64),
    (1, 2048, 2048),
    (2, 2304, 2304),
    (2, 8192, 7168),
    (1, 16, 8),
    (40, 1040, "none"),
    (3, 2304, "each row"),
    (2, 8208, "none"),  # too wide, as the next one
    (2, 8208, 64),
    (2, 52, 64),  # pieces that are not whole, in the row and in the gate
    (2, 64, 52),
]


@pytest.mark.parametrize("pair", [*PAIRS, "float32-float32"])
@pytest.mark.parametrize(("rows", "h", "gate"), GATED)
def test_a_norm_adds_shared_experts(library, rows, h, gate, pair):
    dtype, weight_dtype = (jnp.dtype(name) for name in pair.split("-"))
    rng = np.random.default_rng(h)

    def normal(*shape):
        return np.asarray(rng.normal(0, 1, shape), dtype)

    given = {"none": None, "each row": normal(rows)}
    inputs = 0 if isinstance(gate, str) else gate
    given = given[gate] if isinstance(gate, str) else (normal(rows, inputs), normal(inputs) / 32)
    parts, norm = (normal(rows, h), normal(rows, h)), (normal(rows, h), rng.normal(1, 0.3, h))
    norm = norm[0], norm[1].astype(weight_dtype)

    def run(**options):
        return deferred_emulation.gated_and_norm(library, parts, given, norm, H200, **options)

    fits = h <= 8192 and h % 8 == 0 and inputs % 8 == 0 and dtype != np.float32
    assert_equal(run, saved=1 if fits else 0)


@pytest.mark.parametrize("engine", ["sm80", "sm90"])
@pytest.mark.parametrize("scale", ["none", "static"])
def test_experts_leave_their_sum_to_the_next_kernel(library, engine, scale):
    def make(tokens):
        case = tokens, 3, 5, 64, 32, uniform(tokens, 3, 5)
        return make_layer(case, jnp.bfloat16, Options(activation_scale=scale))

    call = make(70)
    whole = run_layer(library, engine, call)
    np.testing.assert_array_equal(
        run_layer(library, engine, call, function="moe_and_combine"), whole
    )
    with pytest.raises(RuntimeError, match="CUDA error"):  # the second product sums few tokens
        run_layer(library, engine, make(2), function="moe_and_combine")
