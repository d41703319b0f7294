"""Test MXFP4: values are those of transformers, and the cast to NVFP4 changes none of them."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from support.files.checkpoint_edits import E2M1
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe.checkpoint.safetensors import Tensors, read_header
from jax_nvfp4_moe.numerics import mxfp4
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor

CASES = (
    "random",
    "each_code",
    "zeros_between",
    "all_zero",
    "room_in_codes",
    "small",
    "large",
)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def stored(case):
    """Return codes ``[e, n, k/2]``, scales, and the values that transformers decodes from them."""
    path, problems = CHECKPOINTS / "mxfp4-values" / "values.safetensors", []
    with Tensors({path.name: path}, read_header(path, path.name, problems)) as tensors:
        blocks, scales, values = (
            tensors.read(f"{case}.{name}") for name in ("blocks", "scales", "values")
        )
    assert not problems
    return blocks.reshape(*blocks.shape[:-2], -1), scales, values


def cast(packed, scales):
    """Return codes, block scales and the global scale of one matrix, as a reader makes them."""
    needed = mxfp4.stored_range(scales)
    if not needed.fits:
        needed = mxfp4.needed_range(packed, scales)
    assert mxfp4.find_problem(scales, needed) is None
    exponent = mxfp4.find_global_exponent(needed)
    codes = mxfp4.cast_codes(packed, scales, exponent)
    return codes, mxfp4.cast_scales(scales, exponent), np.float32(2.0) ** exponent


def decode(packed, block_scale, global_scale):
    """Decode NVFP4 in float64, by tables of its two formats."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    scale = E4M3[block_scale.view(np.uint8)] * np.float64(global_scale)
    return E2M1.astype(np.float64)[codes] * np.repeat(scale, 16, axis=-1)


def assert_same_bits(actual, expected):
    """Assert equal float32 bits, which include the sign of zero."""
    np.testing.assert_array_equal(
        np.asarray(actual, np.float32).view(np.uint32), expected.view(np.uint32)
    )


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_transformers(case):
    packed, scales, values = stored(case)
    assert_same_bits(mxfp4.dequantize(packed, scales), values)


@pytest.mark.parametrize("case", CASES)
def test_the_cast_changes_no_value(case):
    for packed, scales, values in zip(*stored(case), strict=True):
        arrays = cast(packed, scales)
        assert_same_bits(decode(*arrays), values)
        # The package's own compiled decoding agrees, because no float32 here is subnormal.
        assert_same_bits(NVFP4Tensor.from_packed(*arrays).dequantize(), values)


@pytest.mark.parametrize("span", [1, 2, 17, 18])
@pytest.mark.parametrize("lowest", [-127, -126, -60, 0, 100])
def test_every_range_of_18_powers_keeps_its_codes(span, lowest):
    rng = np.random.default_rng(span)
    scales = rng.integers(lowest, lowest + span, (16, 8))
    scales.flat[:2] = lowest, lowest + span - 1
    scales = (scales + 127).astype(np.uint8)
    packed = rng.integers(0, 256, (16, 128), np.uint8)
    codes, block_scale, global_scale = cast(packed, scales)
    assert codes is packed
    assert np.abs(global_scale) >= np.finfo(np.float32).tiny
    expected = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(16, -1)].astype(np.float64)
    expected *= np.repeat(2.0 ** (scales.astype(float) - 127), 32, axis=-1)
    np.testing.assert_array_equal(decode(codes, block_scale, global_scale), expected)


def test_a_range_of_19_powers_is_a_problem():
    packed = np.full((1, 32), 0x27, np.uint8)  # 6 and 1 in turn: codes can be halved once
    scales = np.array([[110, 128]], np.uint8)
    needed = mxfp4.needed_range(packed, scales)
    assert needed == (-17 + 1, 1)
    assert mxfp4.find_problem(scales, needed) is None
    packed[:] = 0x17  # 6 and 0.5 in turn: no code can be halved
    needed = mxfp4.needed_range(packed, scales)
    assert needed == (-17, 1)
    message = mxfp4.find_problem(scales, needed)
    assert message is not None
    assert "from 2^-17 to 2^1" in message
    assert "18 consecutive powers of two" in message


def test_nan_scales_are_a_problem():
    scales = np.array([[120, 255]], np.uint8)
    assert np.isnan(mxfp4.dequantize(np.full((1, 32), 0x22, np.uint8), scales)[0, 32:]).all()
    message = mxfp4.find_problem(scales, mxfp4.stored_range(scales))
    assert message == "1 of 2 MXFP4 scales are NaN"


def representable(codes, power):
    """Return whether NVFP4 has ``codes * 2 ** power`` for some block scale; try all scales."""
    wanted = E2M1[list(codes)].astype(np.float64) * 2.0**power
    scales = E4M3[np.isfinite(E4M3) & (E4M3 > 0)]
    products = scales[:, None] * E2M1[:8].astype(np.float64)
    return any(np.isin(wanted, row).all() for row in products)


def test_no_choice_of_codes_and_scales_reaches_further():
    """For every set of codes, the cast takes exactly the powers of two that NVFP4 can represent."""
    for count in (1, 2, 3):
        for codes in itertools.combinations(range(1, 8), count):
            packed = np.resize(np.array(codes, np.uint8), 32)
            packed = (packed[0::2] | packed[1::2] << 4)[None]
            for power in range(-16, 16):
                low, high = mxfp4.needed_range(packed, np.array([[power + 127]], np.uint8))
                taken = low >= -9 and high <= 8
                assert taken == representable(codes, power), (codes, power)
                if taken:
                    scales = np.array([[power + 127]], np.uint8)
                    arrays = (
                        mxfp4.cast_codes(packed, scales, 0),
                        mxfp4.cast_scales(scales, 0),
                        1.0,
                    )
                    wanted = mxfp4.dequantize(packed, scales)
                    np.testing.assert_array_equal(decode(*arrays), wanted)


def test_the_check_of_bits_catches_one_code():
    packed, scales, values = (array[0] for array in stored("random"))
    codes, block_scale, global_scale = cast(packed, scales)
    codes = codes.copy()
    codes[0, 0] ^= 1
    with pytest.raises(AssertionError):
        assert_same_bits(decode(codes, block_scale, global_scale), values)
