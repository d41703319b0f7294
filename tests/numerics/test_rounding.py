"""Test rounding of weights: ModelOpt's bytes, and each choice of scale against all scales."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.examples import examples
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe.checkpoint.safetensors import Tensors, read_header
from jax_nvfp4_moe.numerics import nvfp4 as formats
from jax_nvfp4_moe.numerics import rounding
from jax_nvfp4_moe.numerics.rounding import ALGORITHMS, quantize_weight

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
SCALES = np.arange(1, 127, dtype=np.uint8).view(E4M3).astype(np.float64)  # all positive scales
# The noise of a block's error norm, in units of its largest magnitude a. Sixteen float32 residuals,
# each off by up to 2^-22 a, contribute 2^-20 a. `rounding` ignores improvements below
# 2^-20 a + 2^-19 a.
NOISE = 2.0**-18
# To compile an algorithm takes far longer than to run it, so that most tests share these shapes.
SHAPE, FEW = (64, 64), (2, 32)


@functools.cache
def program(name):
    """Compile one algorithm. A call gives the global scale, or None to have it computed."""
    return jax.jit(functools.partial(quantize_weight, algorithm=name))


def run(name, x, g=None, importance=None):
    """Quantize. Return codes, bytes of block scales, g, and float64 values ``[n, k]``."""
    packed, block_scale, g = program(name)(x, g, importance=importance)
    packed, block_scale = np.asarray(packed), np.asarray(block_scale)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(x.shape)
    scale = block_scale.astype(np.float64) * np.float64(g)
    values = formats.CODE_VALUES[codes].astype(np.float64) * np.repeat(scale, 16, -1)
    return codes, block_scale.view(np.uint8), float(g), values


def norms(x, values, importance=None):
    """Return the weighted error norm of each block, float64 ``[n, k/16]``."""
    squares = np.square(np.asarray(x, np.float64) - values)
    if importance is not None:
        squares = squares * np.asarray(importance, np.float64)
    return np.sqrt(squares.reshape(len(x), -1, 16).sum(-1))


def least_norms(x, g, importance=None, window=None):
    """Return the least norm over all E4M3 scales, or over those in `window` ``[n, b, 126]``."""
    blocks = np.asarray(x, np.float64).reshape(len(x), -1, 1, 16)
    s = (SCALES * g)[:, None]
    # Find the nearest code by its distance alone, without a rounding rule of the package.
    levels = np.asarray(formats.CODE_VALUES[:8], np.float64)
    distances = np.abs(np.abs(blocks / s)[..., None] - levels).min(-1) * s
    weights = 1.0 if importance is None else np.asarray(importance).reshape(1, -1, 1, 16)
    found = np.sqrt((np.square(distances) * weights).sum(-1))
    return (found if window is None else np.where(window, found, np.inf)).min(-1)


def largest(x, importance=None):
    blocks = np.abs(np.asarray(x, np.float64)).reshape(len(x), -1, 16).max(-1)
    weight = 1.0 if importance is None else np.sqrt(np.asarray(importance).reshape(-1, 16).max(-1))
    return blocks * weight


def rows(shape, kind):
    """Return float32 rows with one of several distributions of weights."""
    rng = np.random.default_rng(3)
    made = {
        "normal": lambda: rng.standard_normal(shape),
        "heavy": lambda: rng.standard_t(3, shape),
        "between 4 and 6": lambda: rng.choice([4.9, 5.0, 5.1, 6.0, -5.0], shape),
        "one large": lambda: np.where(rng.random(shape) < 1 / 16, 50, 1) * rng.uniform(0, 1, shape),
    }
    return made[kind]().astype(np.float32)


KINDS = ("normal", "heavy", "between 4 and 6", "one large")
# Blocks whose scales are normal E4M3 numbers, as the proof in `search` requires. One element is at
# least a tenth of the largest possible value.
BLOCKS = hnp.arrays(np.float32, FEW, elements=st.floats(-1, 1, width=32)).map(
    lambda x: np.where(np.arange(32) % 16 == 7, np.clip(np.abs(x), 0.1, 1), x).astype(np.float32)
)
IMPORTANCE = hnp.arrays(np.float32, 32, elements=st.floats(0, 1e4, width=32))


def given_rows(name):
    path, problems = CHECKPOINTS / "modelopt-rounding" / f"{name}.safetensors", []
    infos = read_header(path, path.name, problems)
    assert not problems
    with Tensors({path.name: path}, infos) as tensors:
        return {name: np.array(tensors.read(name)) for name in tensors.names()}


GIVEN = given_rows("rows")
FOUR_OVER_SIX = given_rows("four_over_six")


@pytest.mark.parametrize(
    "name", sorted({name.rsplit(".", 1)[0] for name in GIVEN}), ids=lambda name: name
)
def test_max_is_modelopt_to_the_byte(name):
    x, g = GIVEN[f"{name}.values"], GIVEN[f"{name}.global_scale"]
    packed, block_scale, found = program("max")(x, None if name == "awkward.own" else g)
    assert np.array_equal(found, g)
    np.testing.assert_array_equal(packed, GIVEN[f"{name}.packed"])
    np.testing.assert_array_equal(
        np.asarray(block_scale).view(np.uint8), GIVEN[f"{name}.block_scale"].view(np.uint8)
    )


@pytest.mark.parametrize("name", sorted({name.rsplit(".", 1)[0] for name in FOUR_OVER_SIX}))
def test_four_or_six_is_modelopts_recipe_to_the_byte(name):
    """Only the scale of a block of zeros differs: ModelOpt stores 1 / g there, and this package 1.

    Both give zeros. Some blocks have code 4, so that "max" with the same global scale differs.
    """
    given = {part: FOUR_OVER_SIX[f"{name}.{part}"] for part in ("values", "packed", "block_scale")}
    x, g = given["values"], FOUR_OVER_SIX[f"{name}.global_scale"]
    packed, block_scale, found = map(np.asarray, program("four_or_six")(x, None))
    assert np.array_equal(found, g)
    np.testing.assert_array_equal(packed, given["packed"])
    zero = np.all(x.astype(np.float32).reshape(*block_scale.shape, 16) == 0, axis=-1)
    expected = np.where(zero, 1, given["block_scale"].astype(np.float32))
    np.testing.assert_array_equal(block_scale.astype(np.float32), expected)
    largest = np.clip(np.float32(1) / g, 2.0**-9, 448).astype(E4M3)
    assert np.all(given["block_scale"][zero] == largest)
    _, other, _ = program("max")(x, g)
    assert np.any(np.asarray(other).astype(np.float32) != expected)


def test_the_recipe_of_modelopt_was_asked_for_blocks_of_zeros():
    values = FOUR_OVER_SIX["edges.bfloat16.values"].astype(np.float32)
    assert np.any(np.all(values.reshape(-1, 16) == 0, axis=-1))


def test_the_rows_of_modelopt_hold_what_they_are_for():
    scales = np.concatenate(
        [GIVEN[f"awkward.{kind}.block_scale"].view(np.uint8).ravel() for kind in ("bf16", "large")]
    )
    assert {1, 56, 126} <= set(scales)  # 2^-9, the 1 of a block of zeros, 448
    x = jnp.asarray(GIVEN["awkward.bf16.values"])
    plain = formats.quantize(x, jnp.float32(1))[1]  # here zero and tiny blocks have scale 0
    assert (np.asarray(plain).view(np.uint8) != GIVEN["awkward.bf16.block_scale"].view("u1")).any()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_the_format(name, kind):
    """Codes are the nearest for the chosen scale, and scales lie in the format's range."""
    x = rows(SHAPE, kind)
    importance = np.linspace(0, 2, 64, dtype=np.float32)
    weights = importance if ALGORITHMS[name].needs_importance else None
    codes, scale, g, _ = run(name, x, importance=weights)
    assert scale.min() >= 1
    assert scale.max() <= 126
    s = np.repeat(scale.view(E4M3).astype(np.float32) * np.float32(g), 16, -1)
    np.testing.assert_array_equal(codes, (x / s).astype(E2M1).view(np.uint8))
    assert np.abs(x).max() / (6 * ALGORITHMS[name].largest) == pytest.approx(g, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["max", "four_or_six", "search"])
def test_squared_error_against_numpy(name, kind):
    x = rows(SHAPE, kind)
    _, scale, g, values = run(name, x)
    _, first, _, by_max = run("max", x, np.float32(g))
    found, bound = norms(x, values), NOISE * largest(x)
    assert (found <= norms(x, by_max) + bound).all()
    best = least_norms(x, g)
    assert (best <= found + bound).all()
    if name == "search":
        assert (found <= best + bound).all()
    elif name == "four_or_six":
        amax = np.abs(x).reshape(len(x), -1, 16).max(-1)
        four = (amax / (np.float32(4) * np.float32(g))).astype(E4M3).view(np.uint8)
        assert ((scale == first) | (scale == four)).all()
        window = np.arange(1, 127) == np.stack([first, four])[..., None]
        assert (found <= least_norms(x, g, window=window.any(0)) + bound).all()
        assert (found > best + bound).any()  # a negative control of the bound
    else:
        assert (found > best + bound).any()


@given(BLOCKS)
@examples(150)
def test_search_finds_the_best_of_all_scales(x):
    g = np.float32(1 / (6 * 256))
    _, _, _, values = run("search", x, g)
    found, best = norms(x, values), least_norms(x, float(g))
    assert (np.abs(found - best) <= NOISE * largest(x)).all()


@given(BLOCKS, IMPORTANCE)
@example(np.full(FEW, 0.3, np.float32), np.full(32, 1e-45, np.float32))
@example(
    np.linspace(0.1, 1, 64, dtype=np.float32).reshape(FEW),
    np.where(np.arange(32) % 16 == 3, 1e-45, 0).astype(np.float32),
)
@examples(150)
def test_weighted_search_finds_the_best_of_its_window(x, importance):
    """Subnormal importance counts as zero, so the yardstick sets it to zero too."""
    g = np.float32(1 / (6 * 256))
    first = run("max", x, g)
    _, _, _, values = run("weighted_search", x, g, importance)
    importance = np.where(importance < np.finfo(np.float32).tiny, 0, importance)
    found = norms(x, values, importance)
    bound = NOISE * largest(x, importance)
    assert (found <= norms(x, first[3], importance) + bound).all()
    center = first[1][..., None].astype(int)
    codes = np.arange(1, 127)
    window = (codes >= center - 14) & (codes <= center + 7)
    assert (np.abs(found - least_norms(x, float(g), importance, window)) <= bound).all()


def test_importance_that_is_subnormal_counts_as_zero():
    """It counts as zero on every device and in every program, whether or not they flush it."""
    x = rows(SHAPE, "normal")
    usual = np.random.default_rng(0).exponential(size=64).astype(np.float32)
    smallest = np.finfo(np.float32).tiny
    below = np.where(np.arange(64) % 2, usual, np.float32(1e-45))
    zeros = np.where(np.arange(64) % 2, usual, np.float32(0))
    for tiny in (np.float32(1e-45), smallest / 2, np.nextafter(smallest, np.float32(0))):
        alone = run("weighted_search", x, importance=np.full(64, tiny, np.float32))
        plain = run("weighted_search", x, importance=np.zeros(64, np.float32))
        np.testing.assert_array_equal(alone[1], plain[1])
    np.testing.assert_array_equal(
        run("weighted_search", x, importance=below)[1],
        run("weighted_search", x, importance=zeros)[1],
    )
    normal = run("weighted_search", x, importance=usual * 0 + smallest)
    np.testing.assert_array_equal(normal[1], run("search", x, np.float32(normal[2]))[1])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_importance_counts_by_its_ratios_alone(scale):
    x = rows(SHAPE, "normal")
    importance = np.random.default_rng(0).exponential(size=64).astype(np.float32)
    usual = run("weighted_search", x, importance=importance)
    np.testing.assert_array_equal(
        run("weighted_search", x, importance=importance * np.float32(scale))[1], usual[1]
    )
    plain = run("search", x, np.float32(usual[2]))
    assert (plain[1] != usual[1]).any()
    ones = run("weighted_search", x, importance=np.ones(64, np.float32))
    np.testing.assert_array_equal(ones[1], plain[1])
    zeros = run("weighted_search", x, importance=np.zeros(64, np.float32))
    np.testing.assert_array_equal(zeros[1], run("max", x, np.float32(usual[2]))[1])


@given(
    hnp.arrays(np.uint8, FEW, elements=st.integers(0, 15)),
    hnp.arrays(np.uint8, (2, 2), elements=st.integers(20, 119)),
    st.floats(2.0**-20, 2.0**10, width=32),
)
@examples(100)
def test_what_can_be_represented_stays(codes, scale, g):
    """The largest code of each block is 6, so that "max" finds the original scale."""
    codes[:, ::16] |= 7
    s = scale.view(E4M3).astype(np.float32) * np.float32(g)
    x = formats.CODE_VALUES[codes] * np.repeat(s, 16, -1)
    for name in ALGORITHMS:
        importance = np.ones(32, np.float32) if ALGORITHMS[name].needs_importance else None
        again, scale_again, _, _ = run(name, x, np.float32(g), importance)
        np.testing.assert_array_equal(scale_again, scale, err_msg=name)
        np.testing.assert_array_equal(again, np.where(x == 0, codes & 7, codes), err_msg=name)


def test_four_keeps_blocks_whose_largest_code_is_four():
    x = np.tile(np.float32([4, 3, 1.5, 0.5]), (2, 8)) * np.float32(1.25)
    g = np.float32(1)
    _, scale, _, values = run("four_or_six", x, g)
    assert (scale.view(E4M3).astype(np.float32) == 1.25).all()
    np.testing.assert_array_equal(values, x)
    assert (run("max", x, g)[3] != x).any()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_zeros_and_extremes(name):
    """A zero block has scale 1, as in ModelOpt. Nothing overflows, vanishes or becomes NaN."""
    few, many = np.zeros((2, *FEW), np.float32)
    few[1, :16], many[0, 3], many[1] = 1e-12, 3, 1e4
    weighted = ALGORITHMS[name].needs_importance
    importance = np.ones(32, np.float32) if weighted else None
    codes, scale, _, _ = run(name, few, np.float32(1), importance)
    assert (scale[0] == 56).all()
    assert (codes[0] == 0).all()
    assert scale[1, 0] == 1
    _, _, _, values = run(name, many, np.float32(1), importance)
    np.testing.assert_array_equal(values[0], many[0])
    assert (values[1] == 6 * 448).all()
    importance = np.ones(64, np.float32) if weighted else None
    _, scale, g, values = run(name, np.zeros(SHAPE, np.float32), importance=importance)
    assert (scale == 56).all()
    assert g == 0
    assert (values == 0).all()


def test_many_matrices_are_each_their_own():
    x = rows((6 * 64, 64), "heavy").reshape(2, 3, *SHAPE)
    importance = np.random.default_rng(1).exponential(size=(3, 64)).astype(np.float32)
    packed, block_scale, g = program("weighted_search")(x, None, importance=importance)
    assert (packed.shape, block_scale.shape, g.shape) == ((2, 3, 64, 32), (2, 3, 64, 4), (2, 3))
    packed, block_scale, g = map(np.asarray, (packed, block_scale, g))
    for i, j in np.ndindex(2, 3):
        alone = program("weighted_search")(x[i, j], None, importance=importance[j])
        np.testing.assert_array_equal(packed[i, j], alone[0])
        np.testing.assert_array_equal(block_scale[i, j].view("u1"), np.asarray(alone[1]).view("u1"))
        assert g[i, j] == alone[2]
    none = program("max")(x[:, :0], None)
    assert (none[0].shape, none[2].shape) == ((2, 0, 64, 32), (2, 0))


def test_memory_is_bounded_by_one_matrix():
    shape = jax.ShapeDtypeStruct((16, 256, 512), jnp.bfloat16)
    taken = program("search").lower(shape).compile().memory_analysis().temp_size_in_bytes
    # The bound is a copy of x, the bytes of block scales, and four float32 copies of one matrix.
    assert taken < shape.size * 2 + shape.size // 16 + 4 * 4 * 256 * 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "best"}, "algorithm: expected one of max, .*; got 'best'"),
        ({"algorithm": "weighted_search"}, "importance: algorithm 'weighted_search' expects one"),
        ({"algorithm": "max", "importance": np.ones(32)}, "importance: .* 'max' expects None"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize_weight(jnp.ones((2, 32)), **arguments)


def test_blocks_are_whole():
    with pytest.raises(ValueError, match=r"x: expected .* multiple of 16"):
        quantize_weight(jnp.ones((2, 24)))


def test_the_table_says_what_each_does():
    assert next(iter(ALGORITHMS)) == "max"
    assert all(row.meaning for row in ALGORITHMS.values())
    magnitude = np.linspace(0, 9, 3001, dtype=np.float32)
    np.testing.assert_array_equal(
        rounding._nearest_code(jnp.asarray(magnitude)), formats.decode(formats.encode(magnitude))
    )
