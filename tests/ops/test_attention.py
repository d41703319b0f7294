"""Compare ops.attention with float64, on each record that runs here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.attention_gradient_suite import differentiate_plainly
from support.kernels.attention_suite import in_float64, jitted_attention, worst

from jax_nvfp4_moe import NoBackendError, Target
from jax_nvfp4_moe.ops import attention
from jax_nvfp4_moe.ops.positions import PADDING
from jax_nvfp4_moe.testing import assert_as_accurate_as

# There are more keys than a block of 512, and their number is not a multiple of 512. There are more
# queries than a block of 512 of the reference or of 128 on a CPU.
ROWS, KEYS, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 2, 1200, 4, 2, 16, 24
OPTIONS = {
    "causal": {},
    "window": {"window": 100},
    "window of one": {"window": 1},
    "chunk": {"chunk": 300},
    "window and sinks": {"window": 700, "sinks": np.array([0.5, -1.0, 3.0, 0.0], np.float32)},
    "sinks": {"sinks": np.array([2.0, -30.0, 0.0, 8.0], np.float32)},
    "scale": {"scale": 0.7},
}
# Name -> first position of each row, number of queries. The cache is filled up to the last query.
QUERIES = {
    "whole": ((600, 0), 600),
    "one": ((1199, 700), 1),
    "one at the start": ((0, 3), 1),
    "piece": ((950, 130), 140),
    "eight over a border": ((508, 1020), 8),
}
FP8 = jnp.dtype("float8_e4m3fn")
FP8_BOTH = {name: np.ones((2, 2, 8, 16), FP8) for name in ("k", "v")}
ONES = np.ones(2, np.float32)
BACKENDS = ("reference", "attention_cpu") if jax.default_backend() == "cpu" else ("reference",)


@functools.cache
def make(dtype, queries):
    """Return queries, keys, values and positions. Keys after the last position are not zero."""
    starts, t = QUERIES[queries]
    rng = np.random.default_rng(0)
    shapes = ((ROWS, t, HEADS, WIDTH), (ROWS, KEY_HEADS, KEYS, WIDTH))
    q, k = (rng.normal(size=shape) * 1.5 for shape in shapes)
    v = rng.normal(size=(ROWS, KEY_HEADS, KEYS, VALUE_WIDTH))
    positions = np.asarray(starts, np.int32)[:, None] + np.arange(t, dtype=np.int32)
    return (*(np.asarray(x, dtype) for x in (q, k, v)), positions)


@functools.cache
def expected_of(dtype, queries, options):
    return in_float64(*make(dtype, queries), **OPTIONS[options])


# 600 queries take long. A piece has more queries than a block too, and runs with all options.
WHOLE = ("causal", "window and sinks", "chunk")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("queries", "options"),
    [(q, o) for q in QUERIES for o in OPTIONS if q != "whole" or o in WHOLE],
)
def test_float32(queries, options, backend):
    q, k, v, positions = make("float32", queries)
    bound = float32_bound(queries, options)
    run = functools.partial(jitted_attention, **OPTIONS[options], backend=backend)
    y = run(q, k, v, positions)
    assert y.shape == (ROWS, QUERIES[queries][1], HEADS, VALUE_WIDTH)
    expected = expected_of("float32", queries, options)
    assert worst(y, expected) < bound
    assert worst(run(q, k, v, positions + 1), expected) > 100 * bound


def float32_bound(queries, options):
    """Return the bound of `worst` in float32.

    The softmax turns the absolute error of a score into a relative error of its weight. A score is
    off by a few roundings of the largest sum of magnitudes that makes a score.
    """
    return 4 * 2.0**-24 * largest_score(queries) * OPTIONS[options].get("scale", WIDTH**-0.5)


@functools.cache
def largest_score(queries):
    """Return the largest sum of magnitudes that makes a score, for all keys."""
    q, k = (np.abs(x) for x in make("float32", queries)[:2])
    keys = np.repeat(k, HEADS // KEY_HEADS, axis=1)
    return np.matmul(np.moveaxis(q, 2, 1), np.moveaxis(keys, 3, 2)).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", ["causal", "window and sinks"])
@pytest.mark.parametrize("queries", ["whole", "one"])
def test_16_bits(queries, options, dtype):
    """The default has at most twice the reference's error. A wrong window is far above that."""
    operands = make(jnp.dtype(dtype), queries)
    expected = expected_of(jnp.dtype(dtype), queries, options)
    plain = worst(jitted_attention(*operands, **OPTIONS[options], backend="reference"), expected)
    y = jitted_attention(*operands, **OPTIONS[options])
    assert y.dtype == dtype
    assert worst(y, expected) <= 2 * plain
    wrong = {**OPTIONS[options], "window": 90}
    assert worst(jitted_attention(*operands, **wrong), expected) > 10 * plain


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", ["causal", "window", "chunk", "sinks"])
def test_padding_is_finite_and_changes_nothing(options, backend):
    q, k, v, positions = make("float32", "piece")
    run = functools.partial(jitted_attention, **OPTIONS[options], backend=backend)
    alone = run(q[:1, :70], k[:1], v[:1], positions[:1, :70])
    padded = positions.copy()
    padded[0, 70:] = PADDING + np.arange(70)
    padded[1] = PADDING + np.arange(140)  # this row has no token at all
    y = np.asarray(run(q, k, v, padded))
    assert np.isfinite(y).all()
    assert worst(y[:1, :70], np.asarray(alone)) < float32_bound("piece", options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", ["causal", "window and sinks", "scale"])
def test_keys_may_hold_their_values(options, backend):
    """Results and gradients are those of a call that gets the first channels as values.

    They need not be the same bits, because XLA's products may sum in another order.
    """
    q, k, _, positions = make("float32", "piece")
    sinks = OPTIONS[options].get("sinks")
    others = {name: value for name, value in OPTIONS[options].items() if name != "sinks"}
    weights = np.random.default_rng(1).normal(size=(*q.shape[:3], 8)).astype(np.float32)

    def loss(q, k, separate):
        v, width = (k[..., :8], None) if separate else (None, 8)
        y = attention(q, k, v, positions, value_width=width, sinks=sinks, backend=backend, **others)
        return jnp.sum(y * weights), y

    @jax.jit
    def both(*operands):
        run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return run(*operands, separate=False), run(*operands, separate=True)

    ((_, y), gradients), ((_, expected), separate) = jax.tree.map(np.asarray, both(q, k))
    bound = float32_bound("piece", options)
    assert worst(y, expected) < bound < worst(np.roll(y, 1, axis=-1), expected)
    dq, dk, dv, _ = differentiate_plainly(
        (q, k, k[..., :8], sinks), positions, weights, np.float64, **others
    )
    dk[..., :8] += dv
    for got, yardstick, truth in zip(gradients, separate, (dq, dk), strict=True):
        assert_as_accurate_as(got, yardstick, truth)
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(np.roll(got, 1, axis=-1), yardstick, truth)


def test_rows_may_share_their_positions():
    q, k, v, positions = make("float32", "whole")
    shared, positions = positions[:1], np.repeat(positions[:1], ROWS, axis=0)
    np.testing.assert_array_equal(attention(q, k, v, shared), jitted_attention(q, k, v, positions))


def test_a_row_does_not_depend_on_the_others():
    """Blocks of keys that only another row sees do not change a row by a single bit."""
    q, k, v, positions = make("float32", "piece")
    early, late = (np.stack([positions[0], positions[1] + shift]) for shift in (-130, 770))
    one, other = (np.asarray(jitted_attention(q, k, v, at, window=200)) for at in (early, late))
    np.testing.assert_array_equal(one[0], other[0])
    assert (one[1] != other[1]).any()


@pytest.mark.skipif(len(BACKENDS) < 2, reason="the reference is the only record for GPUs")
@pytest.mark.parametrize("options", ["causal", "window and sinks", "chunk"])
def test_gradients(options):
    """Gradients of queries, keys, values and sinks are as accurate as those of plain XLA.

    Forward mode has the tangent of the reference, which is plain XLA too, to the bit.
    """
    given = OPTIONS[options]
    sinks = given.get("sinks")
    others = {name: value for name, value in given.items() if name != "sinks"}
    q, k, v, positions = make("float32", "piece")
    weights = np.random.default_rng(1).normal(size=(*q.shape[:3], VALUE_WIDTH)).astype(np.float32)

    def loss(operands, backend):
        q, k, v, sinks = operands
        y = attention(q, k, v, positions, sinks=sinks, backend=backend, **others)
        return jnp.sum(y * weights)

    operands = (q, k, v, sinks)
    own = jax.jit(jax.grad(loss), static_argnums=1)(operands, "attention_cpu")
    plain, truth = (
        differentiate_plainly(operands, positions, weights, dtype, **others)
        for dtype in (np.float32, np.float64)
    )
    own, plain, truth = ([*map(np.asarray, jax.tree.leaves(x))] for x in (own, plain, truth))
    scales = [np.abs(gradient).max() for gradient in truth]
    if sinks is not None:  # A sink's gradient is a sum over queries, whose terms cancel.
        scales[-1] = np.abs(truth[-1]).sum(axis=(0, 2)).max()
        plain[-1], truth[-1] = (x[-1].sum(axis=(0, 2, 3)) for x in (plain, truth))

    def join(gradients):
        """Join all gradients: of four sinks alone, plain XLA could have no error by chance."""
        return np.concatenate([np.ravel(x / y) for x, y in zip(gradients, scales, strict=True)])

    assert_as_accurate_as(join(own), join(plain), join(truth))
    for index, gradient in enumerate(own):
        wrong = [*own[:index], gradient * 1.001, *own[index + 1 :]]
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(join(wrong), join(plain), join(truth))
    along = jax.tree.map(np.ones_like, operands)

    @jax.jit
    def push_forward(operands):
        return [jax.jvp(lambda o: loss(o, b), (operands,), (along,))[1] for b in BACKENDS]  # noqa: B023

    np.testing.assert_array_equal(*push_forward(operands))


def test_the_room_of_a_cache_costs_nothing():
    """At 128 tokens, a step reads one block of keys, whatever the size of the cache."""
    if "attention_cpu" not in BACKENDS:
        pytest.skip("the record for CPUs")
    visited = []
    q = np.ones((1, 1, 2, 16), np.float32)
    for room in (513, 4096):
        k = np.full((1, 1, room, 16), np.nan, np.float32)
        k[:, :, :512] = 1  # 0 * NaN would spread if more than the first block were read
        visited.append(attention(q, k, k, np.array([[128]], np.int32)))
    np.testing.assert_array_equal(*visited)
    assert np.isfinite(visited[0]).all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": np.ones((2, 3, 4), np.float32)}, "q: expected"),
        ({"q": np.ones((2, 3, 4, 16), np.int8)}, "q: expected"),
        ({"k": np.ones((2, 3, 8, 16), np.float32)}, "v: expected"),
        ({"k": np.ones((2, 2, 8, 12), np.float32)}, "k: expected heads of width 16"),
        ({"v": np.ones((1, 2, 8, 16), np.float32)}, "v: expected"),
        ({"v": np.ones((2, 2, 8, 16), np.float16)}, "v: expected float32"),
        ({"positions": np.ones((2, 3), np.float32)}, "positions: expected integers"),
        ({"positions": np.ones((3, 2), np.int32)}, "positions: expected integers"),
        ({"sinks": np.ones(2, np.float32)}, "sinks: expected shape"),
        ({"window": 0}, "window: expected at least 1"),
        ({"chunk": -1}, "chunk: expected at least 1"),
        ({"v": None}, "value_width: expected a number of channels if v is None"),
        ({"value_width": 8}, "value_width: expected a number .* got 8 and v"),
        ({"v": None, "value_width": 17}, "value_width: expected 1 to 16"),
        ({"v": None, "value_width": 8, "k": np.ones((2, 2, 8, 16), np.float16)}, "k: expected fl"),
        (FP8_BOTH, "k: expected float32 .* float8_e4m3fn .* need k_scale and v_scale"),
        ({**FP8_BOTH, "k_scale": ONES}, r"v_scale: expected float32 \(2,\), .* got None"),
        ({**FP8_BOTH, "v_scale": ONES}, r"k_scale: expected float32 \(2,\), .* got None"),
        ({"k_scale": ONES, "v_scale": ONES}, "k: expected float8_e4m3fn .* got float32"),
        ({**FP8_BOTH, "k_scale": ONES, "v_scale": ONES[:1]}, r"v_scale: expected .* \(1,\)"),
        ({**FP8_BOTH, "k_scale": np.ones(2), "v_scale": ONES}, "k_scale: .* got float64"),
        (
            {"k": FP8_BOTH["k"], "k_scale": ONES, "v_scale": ONES, "v": None, "value_width": 8},
            "k_scale, v_scale: expected None",
        ),
    ],
)
def test_errors_name_the_argument(changed, words):
    given = {
        "q": np.ones((2, 3, 4, 16), np.float32),
        "k": np.ones((2, 2, 8, 16), np.float32),
        "v": np.ones((2, 2, 8, 16), np.float32),
        "positions": np.zeros((2, 3), np.int32),
    }
    with pytest.raises(ValueError, match=words):
        attention(**{**given, **changed})


def test_a_record_for_another_device_says_why():
    operands = make("float32", "one")
    with pytest.raises(NoBackendError, match=r"needs cpu, got cuda 9\.0"):
        attention(*operands, target=Target("cuda", (9, 0)), backend="attention_cpu")


@pytest.mark.parametrize("options", [{}, {"window": 256}])
def test_memory_of_the_backward_pass_grows_with_the_context(options):
    """Scores of all queries would grow with its square: four times the context takes 11 times."""

    def total(q, k, v, positions):
        return jnp.sum(attention(q, k, v, positions, **options).astype(jnp.float32))

    def temporary_bytes(tokens):
        q, k = (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in ((1, tokens, 4, 64), (1, 2, tokens, 64))
        )
        positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, k, positions).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 4.5 * temporary_bytes(1024)
