"""Compare the arguments that CUTLASS's collectives receive for a GEMM with numpy and with CuTe."""

import subprocess

import numpy as np
import pytest
from support.emulation import cuda_emulation
from support.files.given import ROOT, TESTS

ROWS = {
    "one_row": [1],
    "empty_groups": [0, 3, 0, 0, 130, 0],
    "no_rows": [0, 0],
    "full_tiles": [128, 256, 1],
    "many_small": [1] * 300,
}


def up(n, multiple):
    return -(-n // multiple) * multiple


def scale_layout(rows, k):
    return [up(rows, 128) // 128, k // 64, 1, 8 * k, 8 * k * up(rows, 128) // 128]


@pytest.mark.cuda_build
@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("weight_rows", "k"), [(48, 64), (200, 320)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_groups_are_those_of_the_formulas(library, rows, weight_rows, k, scaled):
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    e, slots = len(rows), np.random.default_rng(0).permutation(sum(rows)).astype(np.int32)
    scales = np.random.default_rng(1).uniform(0.5, 1, (2, e)).astype(np.float32)
    groups = cuda_emulation.pack_groups(library, starts, slots, scales, weight_rows, k, scaled)
    stride, padded = up(weight_rows, 8), up(weight_rows, 128)
    first_tile = starts[:-1] // 128 + np.arange(e)
    np.testing.assert_array_equal(groups["shapes"], [[weight_rows, n, k] for n in rows])
    np.testing.assert_array_equal(groups["strides"], [[k, k, stride]] * e)
    want = [scale_layout(weight_rows, k) + scale_layout(n, k) for n in rows]
    np.testing.assert_array_equal(groups["scale_layouts"], want)
    want = [
        np.arange(e) * padded * (k // 2),
        np.arange(e) * padded * (k // 16),
        starts[:-1].astype(np.int64) * (k // 2),
        first_tile * (k // 64) * 512,
        2 * starts[:-1].astype(np.int64) * stride,
    ]
    np.testing.assert_array_equal(groups["offsets"], np.stack(want, -1))
    np.testing.assert_array_equal(groups["alpha"], scales[0] * scales[1] if scaled else np.ones(e))
    np.testing.assert_array_equal(groups["places"][slots], np.arange(len(slots)))


def test_scales_of_experts_do_not_overlap():
    rng = np.random.default_rng(2)
    for _ in range(100):
        rows = rng.integers(0, rng.choice([2, 200, 1000]), rng.integers(1, 40))
        starts = np.concatenate([[0], np.cumsum(rows)])
        first = starts[:-1] // 128 + np.arange(len(rows))
        end = first + -(-rows // 128)
        assert (end[:-1] <= first[1:]).all()
        assert end[-1] <= starts[-1] // 128 + len(rows)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Compile cute_scale_layout.cc against the headers of CUTLASS and CUDA."""
    path = tmp_path_factory.mktemp("cute") / "cute_scale_layout"
    cuda = cuda_emulation.cuda_include()
    includes = [
        cuda_emulation.cutlass_include(),
        cuda,
        cuda / "cccl",
        ROOT / "ffi",
    ]
    source = TESTS / "cpp/cute_scale_layout.cc"
    flags = ["-std=c++17", "-O1", "-w", *(f"-I{folder}" for folder in includes)]
    subprocess.run(["g++", *flags, source, "-o", path], check=True)
    return path


@pytest.mark.cuda_build
@pytest.mark.cutlass
def test_layouts_are_those_of_cute(program):
    def count(*arguments):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
        return tuple(map(int, done.stdout.split()))

    compared, different = count()
    assert compared > 3_000_000
    assert different == 0
    assert count("wrong")[1] > 0
