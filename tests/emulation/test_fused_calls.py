"""Test kernels that do the work of the call before them: one launch has the bits of two."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.emulation import cuda_emulation
from support.emulation.chain_emulation import Call, Result, run_apart, run_chain
from support.emulation.cuda_emulation import HOPPER_SHARED_BYTES, Device, call_target, emulate
from support.extensions import cuda_calls
from support.kernels.head_suite import Call as Heads
from support.kernels.kernel_cases import Options, make_layer, uniform
from support.kernels.linear_few_suite import make_linear

from jax_nvfp4_moe.backends.launch_facts import workspace_bytes
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.heads import HeadOptions

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

H200 = 132  # multiprocessors
PAIRS = ("bfloat16-bfloat16", "bfloat16-float32", "float16-float16")
EPS = {"eps": np.float32(1e-6)}


def make_norm(h, pair):
    """Return x, the addend and the weight of a norm of one row."""
    dtype, weight_dtype = (jnp.dtype(name) for name in pair.split("-"))
    rng = np.random.default_rng(h)
    x, added = (np.asarray(rng.normal(0, 1, (1, h)), dtype) for _ in range(2))
    return x, added, np.asarray(rng.normal(1, 0.3, h), weight_dtype)


def call_norm(x, added, weight):
    """Return the call of a norm. Its results are the sum, which is empty without `added`, and y."""
    total = (0, 0) if added is None else x.shape
    added = np.zeros((0, 0), x.dtype) if added is None else added
    results = (total, x.dtype), (x.shape, x.dtype)
    return Call("nvfp4_add_rms_norm_cuda", (x, added, weight), results, EPS)


def assert_fused(library, calls, *, saved, device, unread=(), chained=None):
    """Assert that the first of two calls, fused into the second, has the bits of both alone.

    If operands are unchanged since the previous kernel, the chain has a call ahead of the two.

    Args:
      library: the emulation.
      calls: two calls.
      saved: how many launches less the chain has.
      device: the device.
      unread: results of the first call that need not be written.
      chained: the calls of the chain, if they differ from `calls`.

    Returns:
      The bytes of all results but those of `unread`.
    """

    def to_bytes(results):
        *_, first, (y, *_) = results
        first = [x for index, x in enumerate(first) if index not in unread]
        return [x.tobytes() for x in (*first, y)]

    apart, others = run_apart(library, calls, device)
    ahead = [call_norm(*make_norm(16, PAIRS[0]))] if device.unchanged else []
    chain = [*ahead, *(call.behind(len(ahead)) for call in chained or calls)]
    device = dataclasses.replace(device, unchanged=False)  # the chain knows what is unchanged
    together, count = run_chain(library, chain, len(ahead), device)
    assert others - (count - len(ahead)) == saved
    assert to_bytes(together) == to_bytes(apart)
    return to_bytes(together)


@pytest.mark.parametrize("unchanged", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
# The row has one piece of 16 bytes, then one or two for each thread, and as many as fit.
@pytest.mark.parametrize(("n", "k"), [(1, 8), (128, 2048), (77, 2056), (24, 4096)])
def test_a_dense_layer_normalizes_its_row(library, n, k, pair, added, unchanged):
    norm = make_norm(k, pair)
    norm = norm if added else (norm[0], None, norm[2])
    bias = np.float32(np.random.default_rng(n + 1).normal(0, 1, n if added else 0))
    calls = call_norm(*norm), call_dense(n, norm[0], bias)
    assert_fused(library, calls, saved=1, device=Device(H200, unchanged=unchanged))


def call_dense(n, x, bias):
    """Return the call of a layer with plain weights behind the norm of x, in float32."""
    weight = np.asarray(np.random.default_rng(n).normal(0, 1, (n, x.shape[1])), x.dtype)
    operands = Result(0, 1), weight, bias
    return Call("nvfp4_dense_few_cuda", operands, [((1, n), np.float32)])


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
    calls = call_norm(*norm), call_dense(n, norm[0], np.zeros(0, np.float32))
    assert_fused(library, calls, saved=0, device=Device(H200, unchanged=True))


def call_linear(engine, n, x):
    """Return the call of a layer with NVFP4 weights behind the norm of x."""
    numbers = "f16-none" if x.dtype == np.float16 else "bf16-none"
    operands = make_linear((1, n, x.shape[1]), numbers).operands
    target, operands, outputs, attributes = cuda_calls.grouped_gemm_call(
        jax.tree.map(jnp.asarray, operands), "none", f"w4a16_{engine}"
    )
    results = [(output.shape, output.dtype) for output in outputs]
    return Call(target, (Result(0, 1), *operands[1:]), results, attributes)


@pytest.mark.parametrize("unchanged", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("engine", ["sm80", "sm90"])
@pytest.mark.parametrize(("n", "k"), [(16, 16), (77, 2032), (40, 2064), (24, 4096)])
def test_a_linear_layer_normalizes_its_row(library, engine, n, k, pair, unchanged):
    norm = make_norm(k, pair)
    capability = {"sm80": 8, "sm90": 9}[engine]
    device = Device(H200, capability=capability, unchanged=unchanged)
    calls = call_norm(*norm), call_linear(engine, n, norm[0])
    assert_fused(library, calls, saved=1, device=device)


@pytest.mark.parametrize(("n", "k"), [(16, 4112), (5120, 512)])
def test_a_linear_layer_leaves_other_norms_to_their_kernel(library, n, k):
    """A row of more pieces than the block has, and more outputs on few multiprocessors."""
    norm = make_norm(k, PAIRS[0])
    calls = call_norm(*norm), call_linear("sm90", n, norm[0])
    assert_fused(library, calls, saved=0, device=Device(7, capability=9, unchanged=True))


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
    call = Heads(
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


def call_heads(call, options):
    """Return the calls that prepare heads and compute their attention."""
    (b, t, width), (_, m, s, d) = call.qkv.shape, call.keys.shape
    n, rope = call.options.count_queries(width, m, d), call.options.rope
    none, dtype = np.zeros(0, call.qkv.dtype), call.qkv.dtype
    weights = (none, none) if call.weights is None else call.weights
    frequencies = np.float32(() if rope is None else rope.frequencies)
    cache = call.keys.shape, dtype
    heads = Call(
        "nvfp4_prepare_heads_cuda",
        (call.qkv, call.positions, call.keys, call.values, *weights, frequencies),
        [((b, t, n, d), dtype), cache, cache],
        EPS
        | {
            "rotation_scale": np.float32(1 if rope is None else rope.scale),
            "rotates_first": call.options.rotates_first,
            "gated": call.options.gated,
        },
        in_place={2: 1, 3: 2},
    )
    sinks = options.get("sinks", np.zeros(0, np.float32))
    attention = Call(
        "nvfp4_attention_cuda",
        (Result(0, 0), Result(0, 1), Result(0, 2), call.positions, sinks),
        [
            ((b, t, n, d), dtype),
            ((workspace_bytes("nvfp4_attention_cuda", b, t, n, m, s, d),), np.uint8),
        ],
        {
            "scale": np.float32(d**-0.5),
            "window": np.int32(options.get("window", 0)),
            "chunk": np.int32(options.get("chunk", 0)),
        },
    )
    return heads, attention


@pytest.mark.parametrize("unchanged", [False, True])
@pytest.mark.parametrize("shared_bytes", [99 << 10, HOPPER_SHARED_BYTES])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", TOKENS)
def test_attention_prepares_the_heads_of_a_token(library, name, pair, shared_bytes, unchanged):
    calls = call_heads(*make_token(name, pair))
    device = Device(H200, shared_bytes, unchanged=unchanged)
    assert_fused(library, calls, saved=1, device=device, unread=(0,))


def test_the_new_key_and_value_take_their_place(library):
    """Stale numbers at the place of the new token change nothing, even if they are NaN."""
    call, _ = make_token("groups", PAIRS[0])
    stale = call.keys.copy(), call.values.copy()
    for row, position in enumerate(call.positions[:, 0]):
        for array in stale:
            array[row, :, position] = np.nan
    device = Device(H200, unchanged=True)
    clean, other = (
        assert_fused(library, call_heads(each, {}), saved=1, device=device, unread=(0,))
        for each in (call, dataclasses.replace(call, keys=stale[0], values=stale[1]))
    )
    assert other == clean


def test_attention_leaves_large_groups_to_the_kernel_of_heads(library):
    rng = np.random.default_rng(0)
    call, _ = make_token("one head", PAIRS[0])
    qkv = np.asarray(rng.normal(0, 1, (1, 1, (17 + 2) * 8)), call.qkv.dtype)
    calls = call_heads(dataclasses.replace(call, qkv=qkv), {})
    device = Device(H200, 99 << 10, unchanged=True)
    assert_fused(library, calls, saved=0, device=device, unread=(0,))


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

    def run(*operands, together):
        attributes = {"num_experts": np.int64(EXPERTS), "together": together}
        return call_target("emulated_combine_and_norm", operands, [norm[0]] * 3, **attributes)[1:]

    found = []
    for together in (True, False):
        device, operands = Device(multiprocessors), (*tokens, *norm)
        results = emulate(library, run, *operands, device=device, together=together)
        found.append(([x.tobytes() for x in results], library.launch_count()))
    (together, count), (apart, others) = found
    assert together == apart
    assert others - count == (1 if h <= 8192 else 0)


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

    linear = isinstance(given, tuple)
    gates = given if linear else (np.zeros(0, dtype) if given is None else given,)
    target = f"nvfp4_add_{'linear_' if linear else ''}gated_cuda"
    first = Call(target, (parts[0], *gates, parts[1]), [(parts[0].shape, dtype)])
    calls = (
        first,
        dataclasses.replace(
            call_norm(norm[0], parts[0], norm[1]), operands=(norm[0], Result(0, 0), norm[1])
        ),
    )
    fits = h <= 8192 and h % 8 == 0 and inputs % 8 == 0 and dtype != np.float32
    assert_fused(library, calls, saved=1 if fits else 0, device=Device(H200), unread=(0,))


@pytest.mark.parametrize("unchanged", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("t", "e", "top_k"), [(1, 128, 8), (37, 64, 6), (5, 300, 1)])
def test_a_router_counts_ids_from_the_first_of_its_gpu(library, t, e, top_k, score, unchanged):
    rng = np.random.default_rng(e)
    logits, bias = np.float32(rng.normal(0, 1, (t, e))), np.float32(rng.normal(0, 1, e))
    attributes = {
        "score": score,
        "select_logits": False,
        "renormalize": True,
        "num_groups": np.int32(1),
        "groups_kept": np.int32(1),
        "scaling": np.float32(2.5),
    }
    chosen = ((t, top_k), np.int32), ((t, top_k), np.float32)
    route = Call("nvfp4_route_cuda", (logits, bias), chosen, attributes)
    shift = Call("nvfp4_shift_ids_cuda", (Result(0, 0), np.int32(e // 2)), chosen[:1])
    device = Device(H200, unchanged=unchanged)
    found = assert_fused(library, (route, shift), saved=1, device=device, unread=(0,))
    ids = np.frombuffer(found[-1], np.int32)
    assert ids.min() < 0
    expected = np.argsort(-(1 / (1 + np.exp(-logits)) + bias), axis=1)[:, :top_k] - e // 2
    if score == "sigmoid":
        np.testing.assert_array_equal(np.sort(ids.reshape(t, top_k)), np.sort(expected))


# GPUs, the rank of this one, rows and width. Rows take a part of a block of the memory of peers,
# one, and two. Those of TOO_LARGE are too wide, and more than there are blocks.
REDUCED = [(2, 0, 1, 2048), (2, 1, 5, 64), (3, 2, 3, 4104), (8, 7, 128, 16), (2, 1, 2, 8192)]
TOO_LARGE = [(2, 0, 2, 8208), (2, 1, 129, 16)]


@pytest.mark.parametrize("pair", [*PAIRS, "float32-float32"])
@pytest.mark.parametrize(("count", "rank", "rows", "h"), [*REDUCED, *TOO_LARGE])
def test_a_norm_adds_up_over_gpus(library, count, rank, rows, h, pair):
    dtype, weight_dtype = (jnp.dtype(name) for name in pair.split("-"))
    rng = np.random.default_rng(h)
    size = 10.0 ** rng.integers(-3, 3, (count, rows, h))  # so that the order counts
    terms = np.asarray(rng.normal(0, 1, (count, rows, h)) * size, dtype)
    x, weight = np.asarray(rng.normal(0, 1, (rows, h)), dtype), rng.normal(1, 0.3, h)
    fits = (count, rank, rows, h) in REDUCED and dtype != np.float32
    own = terms[rank].reshape(-1)
    norm = call_norm(x, x, np.asarray(weight, weight_dtype))
    norm = dataclasses.replace(norm, operands=(x, Result(0, 0, x.shape), norm.operands[2]))

    def calls(where, by_rows):
        groups = f"{count} {rank} {rows} {h} {pair} {where}"
        cuda_emulation.connect_peers(library, groups, rank, terms, by_rows=by_rows)
        attributes = {"groups": groups, "size": np.int64(count)}
        return Call("nvfp4_all_reduce_cuda", (own,), [(own.shape, dtype)], attributes), norm

    options = {"saved": int(fits), "device": Device(H200), "unread": (0,)}
    assert_fused(library, calls("apart", False), chained=calls("chained", fits), **options)


@pytest.mark.parametrize("engine", ["sm80", "sm90"])
@pytest.mark.parametrize("scale", ["none", "static"])
def test_experts_leave_their_sum_to_the_next_kernel(library, engine, scale):
    for tokens, saved in ((70, 1), (2, 0)):  # the second product sums few tokens
        case = tokens, 3, 5, 64, 32, uniform(tokens, 3, 5)
        call = make_layer(case, jnp.bfloat16, Options(activation_scale=scale))
        layer = cuda_calls.prepare(jax.tree.map(jnp.asarray, call.layer), gated=True)
        target, operands, outputs, attributes = cuda_calls.moe_call(
            call.x, layer, call.ids, call.weights, call.options, 32, f"w4a16_{engine}"
        )
        results = [(output.shape, output.dtype) for output in outputs]
        norm = call_norm(call.x, call.x, np.ones(64, call.x.dtype))
        calls = (
            Call(target, operands, results, attributes),
            dataclasses.replace(norm, operands=(call.x, Result(0, 0), norm.operands[2])),
        )
        assert_fused(library, calls, saved=saved, device=Device(3), unread=(0, 1))
