"""Test that layouts are pairs of inverses, and put bytes where their comments say."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from jax_nvfp4_moe.numerics import nvfp4 as formats
from jax_nvfp4_moe.numerics.layouts import LAYOUTS, find_layout, from_layout, to_layout

# Layouts that store block scales without a sign.
SIGNLESS = {"mma_64x64", "mma_64x64_gated", "fp4_64x64", "fp4_64x64_gated", "fp4_128x64"}


# Leading axes, n and k. Tiles have 16, 64 or 128 rows and 16 or 64 columns, and four scales of a
# row are side by side. Gated layouts pad and divide each half of n separately.
SHAPES = {
    "one_block": ((), 2, 16),
    "fills_tiles": ((2,), 128, 128),
    "less_than_a_tile": ((3, 2), 38, 48),
    "rests_of_tiles": ((1, 2), 140, 144),
}


def random_bytes(lead, n, k, seed, scales=(0, 256)):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (*lead, n, k // 2), np.uint8)
    scales = rng.integers(*scales, (*lead, n, k // 16), np.uint8)
    return packed, scales.view(ml_dtypes.float8_e4m3fn)


shapes = pytest.mark.parametrize(("lead", "n", "k"), SHAPES.values(), ids=SHAPES)
bytes_of_any_seed = given(seed=st.integers(0, 2**32 - 1))
there_alone = jax.jit(to_layout, static_argnums=2)


@functools.partial(jax.jit, static_argnums=2)
def there_and_back(packed, scales, layout):
    there = to_layout(packed, scales, layout)
    return from_layout(*there, layout, packed.shape[-2], 2 * packed.shape[-1])


@jax.jit
def values_of(packed, scales):
    return formats.dequantize(packed, formats.decode_scale(scales))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@shapes
@bytes_of_any_seed
@examples(5)
def test_every_layout_comes_back(layout, lead, n, k, seed):
    kept = (1, 128) if layout.name in SIGNLESS else (0, 256)
    packed, scales = random_bytes(lead, n, k, seed, kept)
    back = map(np.asarray, there_and_back(packed, scales, layout))
    np.testing.assert_array_equal(next(back), packed)
    np.testing.assert_array_equal(next(back).view(np.uint8), scales.view(np.uint8))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_matrices_have_every_layout(layout):
    packed, scales = random_bytes((0,), 64, 32, 0)
    one = jax.eval_shape(lambda *a: to_layout(*a, layout), *random_bytes((1,), 64, 32, 0))
    there = there_alone(packed, scales, layout)
    assert [a.shape[1:] for a in there] == [a.shape[1:] for a in one]
    back = there_and_back(packed, scales, layout)
    assert [a.shape for a in back] == [packed.shape, scales.shape]


@pytest.mark.parametrize("layout", sorted(SIGNLESS))
@shapes
@bytes_of_any_seed
@examples(5)
def test_values_come_back_under_every_scale(layout, lead, n, k, seed):
    packed, scales = random_bytes(lead, n, k, seed)
    back = there_and_back(packed, scales, LAYOUTS[layout])
    np.testing.assert_array_equal(values_of(*back), values_of(packed, scales))
    assert not (np.asarray(back[1]).view(np.uint8) & 0x80).any()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_scale_byte_comes_back_in_value(layout):
    codes = np.full((2, 128 * 8), 0x2A, np.uint8)  # -1 and 1
    scales = np.arange(256, dtype=np.uint8).reshape(2, 128).view(ml_dtypes.float8_e4m3fn)
    back = there_and_back(codes, scales, layout)
    np.testing.assert_array_equal(values_of(*back), values_of(codes, scales))


def e5m3(magnitude):
    """Return the byte of a positive number: five exponent bits (bias 10), three mantissa bits."""
    mantissa, exponent = np.frexp(magnitude)
    return 0 if magnitude == 0 else (int(exponent) + 9) * 8 + int(mantissa * 16 - 8)


def rotate_right(word, bits):
    return (word >> bits | word << (32 - bits)) & 0xFFFFFFFF


def kernel_registers(words):
    """Return the four registers of each of two steps, as the kernels' instructions make them."""
    a, b = words
    codes, shared = 0x81C081C0, 0x60306030
    c = (a & shared) | (rotate_right(b, 30) & ~shared & 0xFFFFFFFF)
    even = (a & codes, rotate_right(a, 4) & codes, a << 6 & codes, rotate_right(c, 8) & codes)
    odd = (b & codes, rotate_right(b, 4) & codes, b << 6 & codes, c << 2 & codes)
    return even, odd


def code_at(register, upper):
    """Return the code in one half of a register, from the bits that bfloat16 uses."""
    half = register >> 16 if upper else register & 0xFFFF
    return half >> 6 & 7 | half >> 12 & 8


@pytest.mark.parametrize(("gated", "n", "k"), [(False, 72, 80), (False, 16, 16), (True, 80, 144)])
def test_mma_64x64_gives_each_thread_its_fragments(gated, n, k):
    """Each word that a kernel reads holds only codes of its own rows and columns."""
    name = "mma_64x64_gated" if gated else "mma_64x64"
    packed, scales = random_bytes((), n, k, 0, (1, 127))
    there, there_scales = there_alone(packed, scales, LAYOUTS[name])
    rows, columns = there.shape[0], 2 * there.shape[1]
    assert (rows % 64, columns % 64) == (0, 0)
    codes, magnitude = np.zeros((rows, columns), int), np.zeros((rows, columns // 16))
    halves = 2 if gated else 1  # each is padded separately
    for half in range(halves):
        source = slice(half * n // halves, (half + 1) * n // halves)
        to = slice(half * rows // 2, half * rows // 2 + n // halves)
        codes[to, :k] = np.asarray(formats.unpack(packed))[source]
        magnitude[to, : k // 16] = np.asarray(scales, np.float64)[source]
    tiles = np.asarray(there).reshape(rows // 64, columns // 64, 128, 16).view("<u4")
    scale_tiles = np.asarray(there_scales).view(np.uint8)
    scale_tiles = scale_tiles.reshape(rows // 64, columns // 64, 32, 8).view("<u4")
    for mt, kt, thread in np.ndindex(tiles.shape[:3]):
        w, g, q = thread // 32, thread % 32 // 4, thread % 4
        lo = 32 * mt + 8 * w + g if gated else 64 * mt + 16 * w + g
        pair = (lo, lo + rows // 2) if gated else (lo, lo + 8)
        words = [int(word) for word in tiles[mt, kt, thread]]
        steps = (*kernel_registers(words[:2]), *kernel_registers(words[2:]))
        for j, registers in enumerate(steps):
            for index, register in enumerate(registers):
                column = 64 * kt + 16 * j + 2 * q + 8 * (index // 2)
                assert code_at(register, False) == codes[pair[index % 2], column]
                assert code_at(register, True) == codes[pair[index % 2], column + 1]
            word = int(scale_tiles[mt, kt, 8 * w + g, j // 2])
            both = rotate_right(word, 8 * (j % 2)) & 0x0FF00FF0
            got = [both >> 4 & 0xFF, both >> 20 & 0xFF]
            assert got == [e5m3(magnitude[row, 4 * kt + j]) for row in pair]


@pytest.mark.parametrize(("gated", "n", "k"), [(False, 72, 80), (False, 16, 16), (True, 80, 144)])
def test_fp4_64x64_gives_each_lane_its_fragments(gated, n, k):
    """Compare each register. test_fp4_fragments compares the positions of elements with CuTe."""
    packed, scales = random_bytes((), n, k, 0, (1, 127))
    layout = LAYOUTS["fp4_64x64_gated" if gated else "fp4_64x64"]
    there, there_scales = (np.asarray(a) for a in there_alone(packed, scales, layout))
    rows, columns = there.shape[0], 2 * there.shape[1]
    assert (rows % 64, columns % 64) == (0, 0)
    codes, raw = np.zeros((rows, columns), int), np.zeros((rows, columns // 16), int)
    halves = 2 if gated else 1  # each is padded separately
    for half in range(halves):
        source = slice(half * n // halves, (half + 1) * n // halves)
        to = slice(half * rows // 2, half * rows // 2 + n // halves)
        codes[to, :k] = np.asarray(formats.unpack(packed))[source]
        raw[to, : k // 16] = np.asarray(scales).view(np.uint8)[source]
    tiles = there.reshape(rows // 64, columns // 64, 4, 8, 4, 4, 4)  # w, g, q, register, byte
    registers = np.asarray(formats.unpack(tiles))
    words = there_scales.view(np.uint8).reshape(rows // 64, columns // 64, 4, 2, 8, 4)
    for mt, kt, w, g, q, r in np.ndindex(registers.shape[:6]):
        lo = 32 * mt + 8 * w + g if gated else 64 * mt + 16 * w + g
        row = lo + r % 2 * (rows // 2 if gated else 8)
        first = 64 * kt + 8 * q + 32 * (r // 2)
        got = registers[mt, kt, w, g, q, r]
        np.testing.assert_array_equal(got, codes[row, first : first + 8])
        np.testing.assert_array_equal(words[mt, kt, w, r % 2, g], raw[row, 4 * kt : 4 * kt + 4])


@pytest.mark.parametrize("layout", sorted(SIGNLESS - {"mma_64x64_gated", "fp4_64x64_gated"}))
def test_signless_layouts_move_signs_and_clear_zero_blocks(layout):
    codes = np.full((1, 32), 0x2A, np.uint8)
    raw = np.array([[0x38, 0xB8, 0x00, 0x80]], np.uint8)  # 1, -1, 0, -0
    back = there_and_back(codes, raw.view(ml_dtypes.float8_e4m3fn), LAYOUTS[layout])
    assert np.asarray(back[0])[0].tolist() == [0x2A] * 8 + [0xA2] * 8 + [0] * 16
    assert np.asarray(back[1]).view(np.uint8)[0].tolist() == [0x38, 0x38, 0, 0]


@pytest.mark.parametrize("layout", sorted(SIGNLESS))
def test_signless_layouts_convert_with_one_more_copy(layout):
    """Nothing is widened in memory, so that a layer of 128 experts fits beside its copy."""
    shapes = (
        jax.ShapeDtypeStruct((4, 1536, 1024), jnp.uint8),
        jax.ShapeDtypeStruct((4, 1536, 128), jnp.float8_e4m3fn),
    )
    size = 4 * 1536 * (1024 + 128)
    there = jax.jit(lambda *arrays: to_layout(*arrays, LAYOUTS[layout])).lower(*shapes)
    back = jax.jit(lambda *arrays: from_layout(*arrays, LAYOUTS[layout], 1536, 2048)).lower(*shapes)
    for program in (there, back):
        assert program.compile().memory_analysis().temp_size_in_bytes <= 1.1 * size


def test_cpu_16x16_bytes_stand_where_the_comment_says():
    n, k = 48, 64
    packed, scales = random_bytes((), n, k, 0)
    codes = np.asarray(formats.unpack(packed))
    there, there_scales = map(np.asarray, there_alone(packed, scales, LAYOUTS["cpu_16x16"]))
    words = there.reshape(n // 16, k // 16, 2, 64).view(np.uint16)  # group, block, z, word
    for row, column in [(0, 0), (1, 0), (0, 1), (17, 5), (47, 63), (30, 40)]:
        block, within = divmod(column, 16)
        z, rest = divmod(within, 8)
        word = words[row // 16, block, z, 2 * (row % 16) + rest % 2]
        assert (word >> (4 * (rest // 2))) & 15 == codes[row, column]
    raw = np.asarray(scales).view(np.uint8)
    tiles = there_scales.view(np.uint8).reshape(n // 16, k // 16, 16)
    assert tiles[2, 3, 5] == raw[2 * 16 + 5, 3]


def test_cpu_16x16_pads_rows_with_zeros():
    packed, scales = random_bytes((), 20, 32, 0)
    layout = LAYOUTS["cpu_16x16"]
    there = there_alone(packed, scales, layout)
    assert there[0].shape == (32, 16)
    padding = jax.jit(lambda *there: from_layout(*there, layout, 32, 32))(*there)
    assert not np.asarray(padding[0])[20:].any()
    assert not np.asarray(padding[1]).view(np.uint8)[20:].any()


def test_swizzle_128x4_follows_the_offset_formula():
    m, blocks = 200, 20
    packed, scales = random_bytes((), m, 16 * blocks, 0)
    flat = np.asarray(there_alone(packed, scales, LAYOUTS["swizzle_128x4"])[1])
    flat = flat.view(np.uint8).ravel()
    raw = np.asarray(scales).view(np.uint8)
    row, block = np.indices((m, blocks))
    tiles = -(-blocks // 4)
    offset = (
        (row // 128 * tiles + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    )
    np.testing.assert_array_equal(flat[offset], raw)
    rest = np.ones(flat.size, bool)
    rest[offset] = False
    assert not flat[rest].any()


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match=r"layout: expected one of .*canonical.*got 'marlin'"):
        find_layout("marlin")
