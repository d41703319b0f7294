"""Test the kernel for plain and FP8 weights and few rows on a CPU, with and without clusters."""

import numpy as np
import pytest
from support.emulation.cuda_emulation import (
    LEAST_SHARED_BYTES,
    Device,
    call_target,
    cut_dense_few,
    emulate,
)
from support.kernels.axes import axis
from support.kernels.dense_few_suite import DenseFewSuite, make
from support.kernels.dense_fp8_suite import DenseFp8Suite

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

H200 = 132  # multiprocessors

# rows, n, k -> weight rows of a tile, blocks of a cluster. The sizes are those of Qwen3-30B-A3B:
# its router, queries with keys and values, outputs, and its vocabulary; then a wide router.
CUTS = {
    (1, 128, 2048): (16, 8),
    (64, 128, 2048): (16, 8),
    (1, 5120, 2048): (16, 1),
    (16, 5120, 2048): (64, 4),
    (64, 5120, 2048): (128, 6),
    (64, 2048, 4096): (128, 8),
    (1, 151936, 2048): (64, 1),
    (64, 151936, 2048): (128, 1),
    (64, 512, 7168): (16, 8),
}
# In two of these devices, the weights are unchanged since the previous kernel. With a single
# multiprocessor, the kernel takes the larger tiles for small layers.
DEVICES = {
    "sm90": Device(H200, LEAST_SHARED_BYTES),
    "sm80": Device(108, LEAST_SHARED_BYTES, forced="tiles", unchanged=True),
    "one": Device(1, LEAST_SHARED_BYTES, unchanged=True),
}


def on_hopper(count):
    """Return a device that takes the kernel for 9.0 for each call."""
    return Device(count, forced="sm90", unchanged=count == H200)


def dense_few(library, device):
    """Return the fixture `run` of the suite for plain weights."""

    def run(x, weight, dtype=np.float32, bias=None):
        y = (len(x), len(weight)), dtype

        def call(*operands):
            return call_target("nvfp4_dense_few_cuda", operands, [y])[0]

        return emulate(library, call, x, weight, bias, device=device)

    return run


class TestDenseFew(DenseFewSuite):
    device = axis(*DEVICES)

    @pytest.fixture
    def run(self, library, device):
        return dense_few(library, DEVICES[device])


class TestDenseSm90(DenseFewSuite):
    """The kernel for 9.0, with two and with four teams, alone and in clusters."""

    pair = axis("bfloat16-bfloat16", "float16-float16")
    count = axis(H200, 7)

    @pytest.fixture
    def run(self, library, count):
        return dense_few(library, on_hopper(count))


def fp8_runner(library, device):
    """Return the fixture `run` of the suite for FP8 weights."""

    def run(call, dtype=np.float32, bias=None):
        y = (len(call.x), len(call.weight)), dtype

        def target(*operands):
            return call_target("nvfp4_dense_fp8_few_cuda", operands, [y])[0]

        operands = call.x, call.weight, call.scale, call.row_scale, bias
        return emulate(library, target, *operands, device=device)

    return run


class TestDenseFp8(DenseFp8Suite):
    device = axis(*DEVICES)

    @pytest.fixture
    def run(self, library, device):
        return fp8_runner(library, DEVICES[device])


class TestDenseFp8Sm90(DenseFp8Suite):
    """The kernel for 9.0, with two and with four teams, alone and in clusters."""

    count = axis(H200, 7)

    @pytest.fixture
    def run(self, library, count):
        return fp8_runner(library, on_hopper(count))


@pytest.mark.parametrize(
    "pair", ["bfloat16-bfloat16", "bfloat16-float32", "bfloat16-float8_e4m3fn"]
)
@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_layers_are_cut_as_the_device_needs(library, sizes, pair):
    x_type, weight_type = pair.split("-")
    cut = cut_dense_few(library, sizes, x_type, weight_type, H200)
    if weight_type != "float32":
        assert (cut.tile, cut.ranks) == CUTS[sizes]
    piece = {16: 256, 64: 128, 128: 64}[cut.tile]
    assert cut.rank_pieces * cut.ranks * piece >= sizes[2]
    # A block of any device may have 99 KiB.
    assert 0 < cut.shared_bytes <= 99 << 10


@pytest.mark.parametrize(("clusters", "blocks"), [(False, 1), (True, 8)])
def test_only_newer_devices_have_clusters(library, clusters, blocks):
    call = make((4, 77, 2048), "bfloat16-bfloat16")
    device = Device(H200, LEAST_SHARED_BYTES, forced="nothing" if clusters else "tiles")
    dense_few(library, device)(call.x, call.weight)
    assert library.largest_cluster_blocks() == blocks
