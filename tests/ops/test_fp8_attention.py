"""Test `ops.attention` with keys and values in FP8, off GPUs, and which kernels it chooses."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cpu_calls
from support.kernels.attention_suite import Case, in_float64, jitted_attention, worst
from support.kernels.axes import axis
from support.kernels.fp8_attention_suite import FP8, FP8_CASES, Fp8AttentionSuite, make_fp8
from support.ops.gradients import gradients

from jax_nvfp4_moe import Problem, Target, explain
from jax_nvfp4_moe.ops import attention
from jax_nvfp4_moe.ops.causal_attention.meaning import attend
from jax_nvfp4_moe.testing import assert_as_accurate_as

GPU = Target("cuda", (9, 0))
KERNELS = [
    pytest.param(f"attention_{isa}", marks=getattr(pytest.mark, f"isa_{isa}"))
    for isa in ("amx", "avx512")
]
LONG = Case(3, (4, 2), 1300, (64, 48), (1290, 511))  # three blocks of keys
MANY = Case(20, (4, 2), 700, (64, 48), (670, 511))  # more tokens than run as plain XLA


class TestFp8(Fp8AttentionSuite):
    """The default, by the backend for CPUs or by a kernel for bfloat16.

    XLA multiplies masked values by zero, so that what no query sees must be a number. Widths are
    nothing to XLA, and `test_attention_cpu.py` has those of the kernels for bfloat16.
    """

    case = axis(*FP8_CASES)
    widths = axis((192, 128))
    widths_of_nan = axis((192, 128))
    width = axis(64)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self):
        def call(q, k, v, positions, **options):
            seen = np.arange(k.shape[2]) <= np.max(positions, axis=1)[:, None]
            k, v = (np.where(seen[:, None, :, None], x, np.zeros((), FP8)) for x in (k, v))
            return jitted_attention(q, k, v, positions, **options)

        return call

    def test_matches_float64(self, run, case):
        """Take turns, because only the choice of a record depends on the dtype."""
        dtype = ("bfloat16", "float16")[list(FP8_CASES).index(case) % 2]
        super().test_matches_float64(run, case, dtype)


@pytest.mark.parametrize("case", [LONG, MANY])
@pytest.mark.parametrize("backend", ["reference", "attention_cpu", *KERNELS])
def test_all_records_attend_to_the_same_numbers(case, backend):
    """They are those of a call with 16-bit keys, into which `widen` rounds."""
    if jax.default_backend() != "cpu" and backend != "reference":
        pytest.skip("the records for CPUs")
    x = make_fp8(case, jnp.bfloat16)
    (q, k, v, positions), scales = x.given()
    k, v = (np.nan_to_num(e.astype(np.float32)).astype(FP8) for e in (k, v))
    wide = [
        (e.astype(np.float32) * scale[:, None, None]).astype(q.dtype)
        for e, scale in ((k, x.k_scale), (v, x.v_scale))
    ]
    expected = in_float64(q, *wide, positions)
    bound = 2 * worst(jitted_attention(q, *wide, positions, backend="reference"), expected)
    run = functools.partial(jitted_attention, q, k, v, positions, backend=backend)
    assert worst(run(**scales), expected) <= bound
    swapped = {"k_scale": x.v_scale, "v_scale": x.k_scale}
    assert worst(run(**swapped), expected) > 10 * bound


def test_the_room_of_a_cache_costs_nothing():
    """At 128 tokens, a step widens one block of keys, whatever the size of the cache."""
    if jax.default_backend() != "cpu":
        pytest.skip("the record for CPUs")
    one = np.ones(1, np.float32)
    visited = []
    for room in (513, 4096):
        k = np.full((1, 1, room, 16), np.nan, FP8)
        k[:, :, :512] = 1  # 0 * NaN would spread if more than the first block were read
        q = np.ones((1, 1, 2, 16), jnp.bfloat16)
        at = np.array([[128]], np.int32)
        visited.append(attention(q, k, k, at, k_scale=one, v_scale=one))
    np.testing.assert_array_equal(*visited)
    assert np.isfinite(np.asarray(visited[0], np.float32)).all()


@pytest.mark.usefixtures("on_cpu")  # a GPU rounds in another order
def test_gradients_of_queries_are_those_of_wide_keys():
    """They have at most twice the error of plain XLA with wide keys; a dropped scale has more."""
    x = make_fp8(LONG, jnp.float32)
    (q, k, v, positions), scales = x.given()
    k, v = (np.nan_to_num(e.astype(np.float32)).astype(FP8) for e in (k, v))
    wide = [
        e.astype(np.float32) * scale[:, None, None] for e, scale in ((k, x.k_scale), (v, x.v_scale))
    ]

    @jax.jit
    def plain(q, k, v):
        options = {"scale": q.shape[3] ** -0.5, "window": None, "chunk": None}
        return gradients(lambda q: attend(q, k, v, positions, None, **options), q)[0]

    @jax.jit
    def run(q, scales):
        return gradients(lambda q: attention(q, k, v, positions, **scales), q)[0]

    with jax.enable_x64(True):
        exact = np.asarray(plain(*(np.asarray(e, np.float64) for e in (q, *wide))))
    yardstick = plain(q, *wide)
    assert_as_accurate_as(run(q, scales), yardstick, exact)
    dropped = scales | {"v_scale": np.ones_like(scales["v_scale"])}
    with pytest.raises(AssertionError, match=r"over 2\.0 x the yardstick's error"):
        assert_as_accurate_as(run(q, dropped), yardstick, exact)


def lower_for_gpu(t, n, m, widths, dtype=jnp.bfloat16):
    """Return the program of one call on a GPU, as text."""
    d, dv = widths
    shapes = {"q": (1, t, n, d), "k": (1, m, 1024, d), "v": (1, m, 1024, dv)}
    q, k, v = (jax.ShapeDtypeStruct(s, dtype if x == "q" else FP8) for x, s in shapes.items())
    scale, at = jax.ShapeDtypeStruct((m,), jnp.float32), jax.ShapeDtypeStruct((1, t), jnp.int32)

    def run(q, k, v, at, k_scale, v_scale):
        return attention(q, k, v, at, k_scale=k_scale, v_scale=v_scale, target=GPU)

    traced = jax.jit(run).trace(q, k, v, at, scale, scale)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_decoding_is_one_call_on_a_gpu(t, dtype):
    """Nothing converts the cache."""
    text = lower_for_gpu(t, 32, 4, (128, 128), dtype)
    assert re.findall(r"custom_call @(\w+)", text) == ["nvfp4_attention_fp8_cuda"]
    assert not re.search(r"stablehlo\.convert.*f8E4M3FN", text)


@pytest.mark.parametrize(
    ("t", "heads", "widths"),
    [(9, (32, 4), (128, 128)), (1, (65, 1), (64, 64)), (1, (4, 4), (64, 40))],
)
def test_many_rows_and_odd_widths_are_widened_on_a_gpu(t, heads, widths):
    text = lower_for_gpu(t, *heads, widths)
    assert re.findall(r"custom_call @(\w+)", text) == ["nvfp4_attention_cuda"]
    assert len(re.findall(r"stablehlo\.convert.*f8E4M3FN", text)) == 2


def test_explain_says_what_takes_the_kernel():
    sizes = {"key width": 128, "value width": 128}
    problem = Problem("attention", None, GPU, sizes=sizes, cache_dtype=FP8.name)
    found = explain(problem)
    assert found.backend == "attention_cuda"
    assert "up to 64 queries for each key head" in str(found)
    plain = explain(Problem("attention", None, GPU, sizes=sizes))
    assert plain.notes == ()
    if cpu_calls.present_isas()[:1] and cpu_calls.present_isas()[0] in ("amx", "avx512"):
        problem = Problem("attention", None, Target("cpu"), cache_dtype=FP8.name)
        assert "up to 8 tokens run as plain XLA" in str(explain(problem))
