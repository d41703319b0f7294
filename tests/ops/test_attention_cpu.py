"""Run the suites of attention on the CPU kernels, and test what only these do."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cpu_calls
from support.kernels import attention_suite, latent_attention_suite
from support.kernels.attention_suite import (
    AttentionSuite,
    in_float64,
    jitted_attention,
    plain,
    worst,
)
from support.kernels.axes import axis
from support.kernels.latent_attention_suite import LatentAttentionSuite

from jax_nvfp4_moe.ops import attention

# These kernels run on CPUs alone, and would not be chosen where there is a GPU.
pytestmark = pytest.mark.usefixtures("on_cpu")

NAMES = ("amx", "avx512")
ISAS = [pytest.param(isa, marks=getattr(pytest.mark, f"isa_{isa}")) for isa in NAMES]
isas = pytest.mark.parametrize("isa", ISAS)


def on_cpu(isa, *operands, **options):
    return jitted_attention(*operands, **options, backend=f"attention_{isa}")


class TestAttention(AttentionSuite):
    isa = axis(*ISAS)
    case = axis(*attention_suite.CASES)
    dtype = axis("bfloat16")

    @pytest.fixture
    def run(self, isa):
        return functools.partial(on_cpu, isa)


class TestLatentAttention(LatentAttentionSuite):
    isa = axis(*ISAS)
    case = axis(*latent_attention_suite.CASES)
    dtype = axis("bfloat16")

    @pytest.fixture
    def run(self, isa):
        return lambda q, k, positions, **options: on_cpu(isa, q, k, None, positions, **options)


# A block has up to 128 heads and 256 keys. Up to eight tokens have their keys in parts of 1024.
SIZES = {
    # name: rows, tokens, query heads, key heads, keys, width, value width, first position
    "no full vector": (1, 2, 6, 3, 5, 1, 1, 0),
    "odd widths": (1, 300, 4, 1, 1000, 33, 7, 600),
    "130 heads in three parts": (1, 3, 130, 1, 2500, 64, 40, 2400),
    "parts of two rows": (2, 1, 32, 4, 4096, 128, 128, 3000),
    "nine tokens": (1, 9, 16, 2, 2100, 64, 64, 2050),
    "several blocks": (2, 515, 3, 1, 515, 128, 128, 0),
    "the widest": (1, 20, 3, 1, 300, 1024, 1000, 250),
}
OPTIONS = {
    "causal": {},
    "window": {"window": 100},
    "window of one": {"window": 1},
    "chunk": {"chunk": 70},
    "chunk and window": {"chunk": 300, "window": 260},
    "negative scale": {"scale": -0.3},
    "scale of zero": {"scale": 0.0},
}
SCALED = ("odd widths", "130 heads in three parts")  # a block, and parts: both apply the scale


@functools.cache
def make(name):
    b, t, n, m, s, d, dv, start = SIZES[name]
    rng = np.random.default_rng(0)
    shapes = (b, t, n, d), (b, m, s, d), (b, m, s, dv)
    q, k, v = (np.asarray(rng.normal(size=x) * 1.5, jnp.bfloat16) for x in shapes)
    return q, k, v, np.broadcast_to(start + np.arange(t, dtype=np.int32), (b, t))


def arguments(size, options):
    """Return the operands and options of a case. Windows have sinks."""
    operands, given = make(size), OPTIONS[options]
    if "window" in given:
        given = {**given, "sinks": np.linspace(-3, 4, operands[0].shape[2], dtype=np.float32)}
    return operands, given


@functools.cache
def yardstick(size, options):
    """Return the results in float64, and twice the error of plain XLA, for all kernels."""
    operands, given = arguments(size, options)
    expected = in_float64(*operands, **given)
    return expected, 2 * worst(plain(*operands, **given), expected)


@pytest.mark.parametrize(
    ("size", "options"),
    [(s, o) for s in SIZES for o in OPTIONS if s in SCALED or "scale" not in OPTIONS[o]],
)
@isas
def test_matches_float64(isa, size, options):
    """The error is within the bound. Wrong sinks, or wrong values without sinks, are above it."""
    operands, given = arguments(size, options)
    expected, bound = yardstick(size, options)
    assert worst(on_cpu(isa, *operands, **given), expected) <= bound
    q, k, v, positions = operands
    if "sinks" in given:
        given = {**given, "sinks": np.full_like(given["sinks"], 100)}
    else:
        v = 2 * v
    assert worst(on_cpu(isa, q, k, v, positions, **given), expected) > max(5 * bound, 0.1)


@isas
def test_the_best_is_the_default_for_bfloat16(isa):
    """The default has the bits of AMX where the CPU has it, which differ from those of AVX-512."""
    q, k, v, positions = make("nine tokens")
    best = cpu_calls.present_isas()[0]
    default = jitted_attention(q, k, v, positions)
    is_default = np.array_equal(default, on_cpu(isa, q, k, v, positions))
    assert is_default == (isa == best)
    with pytest.raises(Exception, match=f"attention_{isa}: needs bfloat16"):
        attention(*(x.astype(np.float32) for x in (q, k, v)), positions, backend=f"attention_{isa}")


@pytest.mark.parametrize("size", ["parts of two rows", "several blocks"])
@isas
def test_results_do_not_depend_on_what_runs_beside(isa, size):
    """Bits repeat, and are those of a call with one row and some of the tokens."""
    q, k, v, positions = make(size)
    whole = np.asarray(on_cpu(isa, q, k, v, positions))
    for _ in range(3):
        np.testing.assert_array_equal(whole, on_cpu(isa, q, k, v, positions))
    some = slice(min(100, q.shape[1] - 1), None)
    part = on_cpu(isa, q[1:, some], k[1:], v[1:], positions[1:, some])
    np.testing.assert_array_equal(whole[1:, some], part)


@isas
def test_a_row_does_not_depend_on_the_parts_of_another(isa):
    """A short row beside a long one has the bits that it has alone, in one part of its keys."""
    q, k, v, positions = make("parts of two rows")
    positions = np.array([[3000], [500]], np.int32)
    both = np.asarray(on_cpu(isa, q, k, v, positions))
    np.testing.assert_array_equal(both[1:], on_cpu(isa, q[1:], k[1:], v[1:], positions[1:]))
    room = 600  # fewer keys than a part has
    np.testing.assert_array_equal(
        both[1:], on_cpu(isa, q[1:], k[1:, :, :room], v[1:, :, :room], positions[1:])
    )


@isas
def test_nan_stays_in_the_results_of_its_query(isa):
    q, k, v, positions = make("nine tokens")
    wrong = q.copy()
    wrong[0, 4, 3, 7] = np.nan
    got, expected = (np.array(on_cpu(isa, x, k, v, positions)) for x in (wrong, q))
    assert np.isnan(got[0, 4, 3]).all()
    got[0, 4, 3] = expected[0, 4, 3]
    np.testing.assert_array_equal(got, expected)


@isas
def test_batches_and_gradients(isa):
    """`vmap` equals a loop, and gradients are those of plain XLA."""
    q, k, v, positions = make("nine tokens")
    both = jax.jit(jax.vmap(lambda q: on_cpu(isa, q, k, v, positions)))(np.stack([q, 2 * q]))
    for got, given in zip(both, (q, 2 * q), strict=True):
        np.testing.assert_array_equal(got, on_cpu(isa, given, k, v, positions))

    def gradients(backend):
        def loss(q, k, v):
            return attention(q, k, v, positions, backend=backend).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    for got, expected in zip(gradients(f"attention_{isa}"), gradients("reference"), strict=True):
        np.testing.assert_array_equal(got, expected)


@isas
def test_an_exported_program_takes_any_length(isa):
    """The sizes of a call may be symbols: nothing about it is computed from them in Python."""
    t, s = jax.export.symbolic_shape("t, s")
    shapes = ((1, t, 4, 16), (1, 2, s, 16), (1, 2, s, 16))
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    run = jax.jit(functools.partial(attention, backend=f"attention_{isa}"))
    exported = jax.export.export(
        run,
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(f"nvfp4_attention_{isa}")],
    )(*operands, jax.ShapeDtypeStruct((1, t), jnp.int32))
    q, k, v, _ = make("nine tokens")
    for length, keys in itertools.product((1, 9), (40, 2100)):
        given = q[:, :length, :4, :16], k[..., :keys, :16], v[..., :keys, :16]
        at = np.arange(20, 20 + length, dtype=np.int32)[None]
        np.testing.assert_array_equal(exported.call(*given, at), on_cpu(isa, *given, at))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 2, 8, 24)}, r"k \[b, m, s, d\]: expected \[1, 2, 8, 16\], got \[1, 2, 8, 24\]"),
        ({"k": (1, 3, 8, 16), "v": (1, 3, 8, 16)}, r"n \(q\): expected a positive multiple of 3"),
        ({"k": (1, 0, 8, 16), "v": (1, 0, 8, 16)}, r"m \(k\): expected at least 1, got 0"),
        ({"v": (1, 2, 9, 16)}, r"v \[b, m, s, width\]: expected \[1, 2, 8, 16\]"),
        ({"v": (1, 2, 8, 15)}, r"v's width: expected at least 16, got 15"),
        ({"positions": (1, 4)}, r"positions \[b, t\]: expected \[1, 3\], got \[1, 4\]"),
        ({"sinks": (5,)}, r"sinks \[n\]: expected \[4\], got \[5\]"),
    ],
)
@isas
def test_the_target_checks_its_operands(isa, change, message):
    shapes = {"q": (1, 3, 4, 16), "k": (1, 2, 8, 16), "v": (1, 2, 8, 16)}
    shapes |= {"positions": (1, 3), "sinks": (0,), **change}
    dtypes = {"positions": jnp.int32, "sinks": jnp.float32}
    operands = [np.zeros(x, dtypes.get(name, jnp.bfloat16)) for name, x in shapes.items()]
    y = jax.ShapeDtypeStruct((1, 3, 4, 16), jnp.bfloat16)
    options = {"scale": np.float32(1), "window": np.int32(0), "chunk": np.int32(0)}
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.ffi.ffi_call(f"nvfp4_attention_{isa}", y)(*operands, **options))
