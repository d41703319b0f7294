"""Test the kernel for linear layers with few rows on a CPU, with and without clusters."""

import pytest
from support.emulation import cuda_emulation
from support.emulation.emulation_suite import run_product
from support.kernels.axes import axis
from support.kernels.kernel_suite import assert_accurate
from support.kernels.linear_few_suite import LINEARS, LinearFewSuite, make_linear

from jax_nvfp4_moe import Problem, Scheme, Target, explain
from jax_nvfp4_moe.backends.launch_facts import facts

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

H200 = 132  # multiprocessors

# rows, n, k -> slabs, blocks of a cluster. The sizes are those of Qwen3-30B-A3B: queries, keys and
# values, outputs, and a router; then a vocabulary, layers of DeepSeek-V3, and rows that fit into no
# eight blocks at once.
CUTS = {
    (2, 5120, 2048): (1, 1),
    (4, 2048, 4096): (1, 1),
    (5, 5120, 2048): (4, 4),
    (64, 5120, 2048): (8, 6),
    (64, 2048, 4096): (8, 8),
    (16, 128, 2048): (8, 8),
    (1, 151936, 2048): (4, 1),
    (64, 24576, 1536): (8, 4),
    (32, 7168, 16384): (8, 4),
    (8, 2048, 2**18): (8, 8),
}


# The engine and the compute capability of a device.
DEVICES = {"sm80": ("sm80", 8), "sm90": ("sm90", 9), "sm100": ("sm80", 10)}


class TestLinearFew(LinearFewSuite):
    device = axis(*DEVICES)

    @pytest.fixture
    def run(self, library, device):
        engine, major = DEVICES[device]
        return lambda call: run_product(library, engine, call, H200, capability=major)

    @pytest.mark.parametrize("count", [1, 5, 7])
    @pytest.mark.parametrize("case", LINEARS)
    def test_linear_on_few_multiprocessors(self, library, case, count):
        """The weights are unchanged since the previous kernel, as in a chain of calls."""
        call = make_linear(case, "bf16-none")
        assert_accurate(
            lambda call: run_product(library, "sm90", call, count, unchanged=True), call
        )


@pytest.mark.parametrize(("rows", "n", "k"), CUTS)
def test_layers_are_cut_as_the_device_needs(library, rows, n, k):
    cut = cuda_emulation.cut_linear_few(library, rows, n, k, H200)
    assert (cut.slabs, cut.ranks) == CUTS[rows, n, k]
    assert cut.rank_tiles * cut.ranks * 64 >= k
    assert 0 < cut.shared_bytes <= cuda_emulation.HOPPER_SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "k", "clusters"), [(65, 2048, True), (9, 2048, False), (1, 2**18, False)]
)
def test_the_engines_run_what_does_not_fit(library, rows, k, clusters):
    cut = cuda_emulation.cut_linear_few(library, rows, 2048, k, H200, clusters=clusters)
    assert cut.shared_bytes == 0


@pytest.mark.parametrize(("device", "blocks"), [("sm80", 1), ("sm90", 4), ("sm100", 8)])
def test_only_newer_devices_have_clusters(library, device, blocks):
    engine, major = DEVICES[device]
    call = make_linear((8, 77, 1040), "bf16-none")
    run_product(library, engine, call, H200, capability=major)
    assert library.largest_cluster_blocks() == blocks


# n, k -> teams of a block and blocks of a cluster: with many rows of x, with few rows and FP8
# weights, and with few rows and FP4 weights. They are of the layers above, of Llama 3, of a
# vocabulary, and of layers with short rows.
SM90_CUTS = {
    (5120, 2048): ((4, 1), (4, 1), (4, 1)),
    (2048, 4096): ((2, 4), (4, 2), (4, 2)),
    (12288, 2048): ((2, 1), (2, 1), (2, 2)),
    (28672, 4096): ((2, 1), (2, 1), (2, 2)),
    (4096, 14336): ((2, 2), (2, 2), (4, 2)),
    (4096, 2048): ((2, 2), (2, 2), (4, 2)),
    (12288, 1024): ((2, 1), (2, 1), (2, 1)),
    (4096, 896): ((2, 2), (2, 2), (2, 2)),
    (1024, 2048): ((2, 4), (2, 4), (2, 4)),
    (1024, 256): ((2, 1), (2, 1), (2, 1)),
    (248320, 2048): ((2, 1), (2, 1), (2, 1)),
}


@pytest.mark.parametrize(("n", "k"), SM90_CUTS)
def test_layers_are_cut_for_hopper(library, n, k):
    def cut(few, weight_bits):
        found = cuda_emulation.cut_linear_sm90(
            library, n, k, H200, few=few, weight_bits=weight_bits
        )
        return found.teams, found.ranks

    many = {cut(False, bits) for bits in (4, 8, 16)} | {cut(True, 16)}
    assert many == {SM90_CUTS[n, k][0]}
    assert (cut(True, 8), cut(True, 4)) == SM90_CUTS[n, k][1:]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("k", [16, 2048, 14336, 16384, 65536, 2**18])
def test_explain_says_up_to_how_many_rows_the_kernel_runs(library, k, capability):
    target = Target("cuda", capability)
    problem = Problem("grouped_gemm", Scheme.W4A16, target, hidden=k, intermediate=2048)
    clusters = capability >= (9, 0)
    rows = facts().most_linear_rows(k, clusters, target.shared_bytes)
    cuts = [
        cuda_emulation.cut_linear_few(
            library, n, 2048, k, H200, clusters=clusters, shared_bytes=target.shared_bytes
        ).shared_bytes
        for n in range(1, 66)
    ]
    assert [bool(bytes_) for bytes_ in cuts] == [n <= rows for n in range(1, 66)]
    notes = explain(problem).notes
    assert any(f"up to {rows} rows" in note for note in notes) == (rows > 0)
