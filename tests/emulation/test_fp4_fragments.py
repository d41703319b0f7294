"""Compare the fragments of the FP4 MMA with CuTe's maps, on the host.

The tests cover the layouts and both emulations. CuTe's ``MMA_Traits`` come from CUTLASS's headers
in the PyPI package nvidia-cutlass. The package is found without an import, because an import would
run a generator.
"""

import functools
import importlib.util
import pathlib
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from support.emulation import cuda_emulation
from support.files.given import ROOT, TESTS
from support.kernels.float64_layer import CODE_VALUES, E4M3, unpack

from jax_nvfp4_moe.numerics.layouts import find_layout, to_layout

pytestmark = [pytest.mark.cuda_build, pytest.mark.cutlass]

M, N, K = 16, 8, 64


def cutlass_include():
    """Return the folder of CUTLASS's headers."""
    spec = importlib.util.find_spec("cutlass_library")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        return pathlib.Path(root) / "source" / "include"
    raise FileNotFoundError("cutlass_library: install nvidia-cutlass==4.2.0.0 for its headers")


@pytest.fixture(scope="module")
def maps(tmp_path_factory):
    """Return operand -> offsets [lane, value]; the offset of row r and column c is r + rows * c."""
    cuda = cuda_emulation.cuda_include()
    includes = [f"-I{path}" for path in (cutlass_include(), cuda, cuda / "cccl")]
    program = tmp_path_factory.mktemp("fragments") / "fp4_fragments"
    source = TESTS / "cpp" / "fp4_fragments.cc"
    subprocess.run(["g++", "-std=c++17", "-w", *includes, source, "-o", program], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in lines.splitlines())
    return {name: np.array(offsets, int).reshape(32, -1) for name, *offsets in rows}


def words(values, bits):
    """Pack values [32, n] of `bits` bits into words, with the first value in the low bits."""
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    return (values.reshape(32, -1, count).astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)


def test_maps_are_those_of_the_kernels_comment(maps):
    lane, j = np.arange(32)[:, None], np.arange(8)
    g, q = lane // 4, lane % 4
    k = 8 * q + j
    a = [r + M * c for c in (k, k + 32) for r in (g, g + 8)]
    np.testing.assert_array_equal(maps["a"], np.concatenate(a, axis=1))
    np.testing.assert_array_equal(maps["b"], np.concatenate([g + N * k, g + N * (k + 32)], axis=1))
    sums = [r + M * (2 * q + c) for r in (g, g + 8) for c in (0, 1)]
    np.testing.assert_array_equal(maps["sums"], np.concatenate(sums, axis=1))
    # Each 16 of k have the same scale, which is a byte of the lane's word.
    every_k = np.arange(K)
    np.testing.assert_array_equal(maps["scale_a"], g + 8 * (q % 2) + M * every_k)
    np.testing.assert_array_equal(maps["scale_b"], g + N * every_k)


@pytest.mark.parametrize("gated", [False, True])
def test_layout_has_the_fragments_of_a(maps, gated):
    """Each lane finds its 16 bytes and its word of scales where the kernel reads them in a tile."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (64, K // 2), np.uint8)
    scales = rng.integers(1, 127, (64, K // 16), np.uint8)
    name = "fp4_64x64_gated" if gated else "fp4_64x64"
    there = to_layout(jnp.asarray(packed), jnp.asarray(scales).view(E4M3), find_layout(name))
    tile, tile_scales = (np.asarray(array) for array in there)
    codes, lane = unpack(packed), np.arange(32)
    for warp in range(4):
        # The rows of the tile that are rows 0 to 7 and 8 to 15 of the MMA.
        low = (8 if gated else 16) * warp + np.arange(8)
        rows = np.concatenate([low, low + (32 if gated else 8)])
        want = codes[rows][maps["a"] % M, maps["a"] // M]
        got = unpack(tile.reshape(4, 32, 16)[warp])
        np.testing.assert_array_equal(got, want)
        place = maps["scale_a"][:, ::16]
        want = scales[rows][place % M, place // M // 16]
        words_of_warp = tile_scales.view(np.uint8).reshape(4, 16, 4)[warp]
        np.testing.assert_array_equal(words_of_warp[lane % 2 * 8 + lane // 4], want)


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_product_of_fragments_is_that_of_matrices(maps, library, shuffled, seed):
    """The sums are equal bit for bit: scales of 1 to 2 keep every partial sum in 24 bits."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 16, (M, K)), rng.integers(0, 16, (N, K))
    scale_a, scale_b = (rng.integers(0x38, 0x40, (rows, K // 16)) for rows in (M, N))
    if seed == 3:
        scale_b[5, 2] = 0x7F  # NaN in one column

    def fragment(values, name, rows, group=1):
        offsets = maps[name][:, ::group]
        return values[offsets % rows, offsets // rows // group]

    sums = cuda_emulation.multiply_fp4(
        library,
        words(fragment(a, "a", M), 4),
        words(fragment(b, "b", N), 4),
        words(fragment(scale_a, "scale_a", M, 16), 8),
        words(fragment(scale_b, "scale_b", N, 16), 8),
        shuffled=shuffled,
    )
    values = [
        CODE_VALUES[codes] * np.repeat(scale.astype(np.uint8).view(E4M3).astype(float), 16, -1)
        for codes, scale in ((a, scale_a), (b, scale_b))
    ]
    want = values[0] @ values[1].T
    np.testing.assert_array_equal(sums, want[maps["sums"] % M, maps["sums"] // M])
    if seed == 3:
        assert np.isnan(want).sum() == M


@functools.cache
def nvcc():
    """Return the path of nvcc."""
    return cuda_emulation.cuda_include().parent / "bin" / "nvcc"


@pytest.mark.parametrize(("architecture", "compiles"), [("120f", True), ("120", False)])
def test_an_architecture_without_its_suffix_does_not_compile(tmp_path, architecture, compiles):
    """Plain sm_120 lacks the instruction. An emulation would be correct, but silently slow."""
    source = tmp_path / "product.cu"
    source.write_text('#include "cuda/instructions/fp4_mma.cuh"\n', encoding="utf-8")
    ffi = ROOT / "ffi"
    code = f"arch=compute_{architecture},code=sm_{architecture}"
    command = [nvcc(), "-std=c++17", f"-I{ffi}", "-gencode", code, "-cubin", source]
    done = subprocess.run(
        [*command, "-o", tmp_path / "product.cubin"], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == compiles, done.stderr
    assert compiles or "compile for 120f or 120a" in done.stderr
