"""Run the kernel of sums over GPUs on threads of a CPU, under ThreadSanitizer.

The kernel is compiled unchanged. A thread of the CPU runs a thread of a GPU, and loses its turn at
random moments. ThreadSanitizer reports an access that no barrier or launch puts in order.
The tests cannot show what NVLink does, or how fast it is.
"""

import re
import subprocess

import pytest
from support.emulation.cuda_emulation import cuda_include
from support.files.given import ROOT, TESTS

pytestmark = pytest.mark.cuda_build

KERNELS = ROOT / "ffi" / "cuda" / "collectives"
# Fault -> file, and pairs of a text of it and the text in its place.
FAULTS = {
    "one slot": ("peer_sum.cuh", [("epoch % 2", "0 * epoch")]),
    "one number without its epoch": (
        "peer_sum.cuh",
        [(" &&\n          words[2] >> 32 == epoch", "")],
    ),
    "the epoch of the sum before": (
        "peer_sum.cuh",
        [("words[0] >> 32 ==", "1 + (words[0] >> 32) >=")],
    ),
    "no barrier": ("all_reduce.cuh", [("  __syncthreads();\n", "")]),
    "another order on each GPU": (
        "peer_sum.cuh",
        [
            (
                "int sender = 0; sender < group.count; ++sender) {",
                "int i = 0; i < group.count; ++i) {",
            ),
            (
                "const uint4 words = sender ==",
                "const int sender = (group.rank + i) % group.count;\nconst uint4 words = sender ==",
            ),
            ("sender == 0 ?", "i == 0 ?"),
        ],
    ),
}


def build(folder, name=None, source=None):
    """Compile the program in `folder`, with `source` as the text of file `name` if it is given."""
    folders = [TESTS / "cpp" / "threads", ROOT / "ffi", cuda_include()]
    if name is not None:
        own = folder / "cuda" / "collectives"
        own.mkdir(parents=True)
        (own / name).write_text(source)
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
    """With one slot, values may be gone before another GPU has read them, which then waits."""
    name, changes = FAULTS[fault]
    source = (KERNELS / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in source
        source = source.replace(old, new, 1)
    done = run(build(tmp_path, name, source), 3, 300, 5, "short")
    assert done.returncode != 0
    assert re.search("is wrong|timeout", done.stdout) or "data race" in done.stderr
