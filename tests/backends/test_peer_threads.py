"""Run the kernel of sums over GPUs on threads of a CPU, under ThreadSanitizer.

The kernel is compiled unchanged. A thread of the CPU runs a thread of a GPU, and loses its turn at
random moments. ThreadSanitizer reports an access that no stamp, barrier or launch puts in order.
The tests cannot show what NVLink does, or how fast it is.
"""

import subprocess

import pytest
from support.emulation.cuda_emulation import cuda_include
from support.files.given import ROOT, TESTS

pytestmark = pytest.mark.cuda_build

KERNEL = ROOT / "ffi" / "cuda" / "collectives" / "all_reduce.cuh"
# Fault -> pairs of a text of the kernel, and the text in its place.
FAULTS = {
    "one slot": [("epoch % 2", "0 * epoch")],
    "a stamp before all values": [
        ("  __syncthreads();\n  if (thread < count", "  if (thread < count")
    ],
    "values before the stamps": [("  __syncthreads();\n  if (inside)", "  if (inside)")],
    "another order on each GPU": [
        ("int sender = 0; sender < count; ++sender) {", "int i = 0; i < count; ++i) {"),
        (
            "      // The L1 cache",
            "      const int sender = (rank + i) % count;\n      // The L1 cache",
        ),
        ("sender == 0 ?", "i == 0 ?"),
    ],
}


def build(folder, source=None):
    """Compile the program in `folder`, with `source` as the text of the kernel if it is given."""
    folders = [TESTS / "cpp" / "threads", ROOT / "ffi", cuda_include()]
    if source is not None:
        own = folder / "cuda" / "collectives"
        own.mkdir(parents=True)
        (own / KERNEL.name).write_text(source)
        folders.insert(0, folder)
    program = folder / "peer_threads"
    flags = ["-std=c++17", "-O1", "-w", "-fsanitize=thread", "-pthread"]
    includes = ["-include", "cuda_on_threads.h", *(f"-I{path}" for path in folders)]
    source_file = TESTS / "cpp" / "peer_threads.cc"
    subprocess.run(["g++", *flags, *includes, source_file, "-o", program], check=True)
    return program


def run(program, *arguments):
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("peer_threads"))


@pytest.mark.parametrize(("count", "sums", "seed"), [(2, 2000, 1), (3, 400, 2), (8, 40, 3)])
def test_sums_have_the_same_bits_on_all_gpus(program, count, sums, seed):
    done = run(program, count, sums, seed)
    assert (done.stdout, done.stderr, done.returncode) == ("equal\n", "", 0)


@pytest.mark.parametrize(("fault", "reason"), [("late", "timeout"), ("other", "mismatch")])
def test_a_wait_for_another_gpu_ends(program, fault, reason):
    """The GPU that stops, or adds up something else, has rank 1."""
    done = run(program, 2, 50, 4, fault)
    assert done.returncode == 3
    assert done.stdout in (f"rank 0 and rank 1: {reason}\n", f"rank 1 and rank 0: {reason}\n")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tmp_path, fault):
    source = KERNEL.read_text(encoding="utf-8")
    for old, new in FAULTS[fault]:
        assert old in source
        source = source.replace(old, new, 1)
    done = run(build(tmp_path, source), 3, 300, 5)
    assert done.returncode != 0
    assert "is wrong" in done.stdout or "data race" in done.stderr
