"""Add up arrays of several GPUs through each other's memory: sums, models, and what goes wrong.

If a sum fails, no call of CUDA in this process succeeds any more. Run the module with ``-x``: what
a test needs is tested before. Start it with CUDA_MODULE_LOADING=EAGER (`connect_peers` says why).

Two GPUs get the bits of `jax.lax.psum`, because the order of two terms does not matter.
"""

import functools
import os
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.devices.host_devices import call, decode, difference, make_mesh
from support.files.given import CHECKPOINTS, EXAMPLE, PROGRAMS

from jax_nvfp4_moe import generate, load_model
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.ops import add_rms_norm, chain_calls
from jax_nvfp4_moe.ops.all_reduce import all_reduce
from jax_nvfp4_moe.parallel import connect_peers
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.whole_steps import from_first_device

pytestmark = pytest.mark.several_gpus

# Bytes of sums: one piece, one block, more than one block, and the most that the kernel takes.
SIZES = [16, 4096, 8192, 8208, 65536, 1 << 20]
FLOAT32 = {"scheme": "w4a16", "dtype": jnp.float32}
CALLS = 4  # XLA makes CUDA graphs in the first two calls of a program


def connect(shape):
    return connect_peers(make_mesh(shape), timeout=10.0)


@pytest.fixture(scope="module")
def mesh():
    return connect((1, 2))


def each(mesh, body):
    """Return a function that runs `body` on the row of each GPU, and gives the rows."""
    rows = mesh.spec(TENSOR)
    mapped = mesh.shard_map(body, (rows,), rows)

    def run(x):
        return mapped(x * from_first_device(jnp.ones((), x.dtype), mesh))

    return jax.jit(run, compiler_options=generation._ONE_GRAPH)


def terms(nbytes, dtype, count=2):
    shape = count, nbytes // jnp.dtype(dtype).itemsize
    return jax.random.normal(jax.random.key(nbytes), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_sums_have_the_bits_of_psum(mesh, nbytes, dtype):
    x = terms(nbytes, dtype)
    own = each(mesh, lambda x: mesh.add_up(x, TENSOR))
    assert "nvfp4_all_reduce_cuda" in own.lower(x).as_text()
    first, *others = (np.asarray(own(x)) for _ in range(CALLS))
    expected = np.asarray(each(mesh, lambda x: all_reduce(x, ("tensor",)))(x))
    for found in (first, *others):
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(first[0].view(np.uint8), first[1].view(np.uint8))


def test_a_program_that_runs_again_goes_on_counting(mesh):
    """The epochs outlive a program, and programs with other sizes use them too."""
    small, large = (
        functools.partial(each(mesh, lambda x: mesh.add_up(x, TENSOR)), terms(size, "bfloat16"))
        for size in (4096, 65536)
    )
    expected = np.asarray(small()), np.asarray(large())
    for i in range(500):
        one, two = (small, large) if i % 3 else (large, small)
        for result in (one(), two()):
            index = 0 if result.shape == expected[0].shape else 1
            np.testing.assert_array_equal(result, expected[index])


def count_wrong(mesh, sums, sizes):
    """Return how many of `sums` sums are wrong on each GPU. The GPUs are late by turns.

    The sums are those of several calls of a program, so that most of them are in a CUDA graph that
    runs again. Every sum waits for the one before. Terms are integers, so that all sums are exact.
    """

    def body(delays):
        part = jax.lax.axis_index("tensor").astype(jnp.float32) + 1

        def step(i, carry):
            wrong, last = carry
            late = delays[0, i % delays.shape[1]]
            last = jax.lax.fori_loop(0, late, lambda _, x: jnp.sqrt(x + 1.0), last)
            for size in sizes:
                at = jnp.arange(size, dtype=jnp.float32)
                term = (at + i % 1009) * part + jnp.minimum(last, 0.0)
                total = mesh.add_up(term, TENSOR)
                wrong += jnp.sum(total != (at + i % 1009) * 3)
                last = jnp.abs(total[0])
            return wrong, last

        start = jnp.int32(0), jnp.float32(0)
        return jax.lax.fori_loop(0, sums // (CALLS * len(sizes)), step, start)[0].reshape(1)

    run, rng, wrong = each(mesh, body), np.random.default_rng(sums), np.zeros(2, np.int64)
    for _ in range(CALLS):
        delays = rng.integers(0, 40, (2, 997)) * (rng.random((2, 997)) < 0.2)
        wrong += np.asarray(run(jnp.asarray(delays, jnp.int32)))
    return wrong


def test_many_sums_with_delays_are_right(mesh):
    assert count_wrong(mesh, 32_000, (4, 1024, 2052, 4)).tolist() == [0, 0]


# Rows and width. The last rows have a kernel of their own for the norm: too wide, and too many.
NORMED = [(1, 2048), (1, 7168), (16, 2048), (128, 256), (2, 16384), (129, 64)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "h"), NORMED)
def test_a_norm_in_a_chain_adds_up_with_the_same_bits(mesh, rows, h, dtype):
    """Sums by rows and others take turns in the memory of the GPUs."""
    rng = np.random.default_rng(h)
    x = jnp.asarray(rng.normal(0, 1, (2, rows, h)), dtype)
    weight, start = jnp.asarray(rng.normal(1, 0.3, h), dtype), jnp.zeros((rows, h), dtype)

    def norms(y):
        total = start
        for _ in range(3):
            total, y = add_rms_norm(total, mesh.add_up(y, TENSOR), weight, eps=1e-6)
        return total, mesh.add_up(y, TENSOR)

    def body(chained, x):
        found = (chain_calls(norms) if chained else norms)(x[0])
        return jnp.stack(found)[None]

    chained, apart = (each(mesh, functools.partial(body, which)) for which in (True, False))
    expected = np.asarray(apart(x))
    for _ in range(CALLS):
        np.testing.assert_array_equal(
            np.asarray(chained(x)).view(np.uint8), expected.view(np.uint8)
        )


def test_more_gpus_add_up_in_the_order_of_their_ranks():
    count = min(len(jax.devices()), 8)
    if count < 3:
        pytest.skip("this machine has no 3 GPUs")
    mesh = connect((1, count))
    x = terms(4096, "float32", count)
    found = np.asarray(each(mesh, lambda x: mesh.add_up(x, TENSOR))(x))
    rows = np.asarray(x)
    expected = functools.reduce(np.add, rows[1:], rows[0])
    for row in found:
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("nbytes", [(1 << 20) + 16, 24])
def test_other_sizes_are_added_up_by_xla(mesh, nbytes):
    text = each(mesh, lambda x: mesh.add_up(x, TENSOR)).lower(terms(nbytes, "float32")).as_text()
    assert "nvfp4_all_reduce_cuda" not in text
    assert text.count('"stablehlo.all_reduce"') == 2  # one lets the GPUs start together


@pytest.mark.parametrize(
    ("folder", "shape"),
    [
        (EXAMPLE, (1, 2)),
        (EXAMPLE, (2, 1)),
        (CHECKPOINTS / "qwen3_5_moe-modelopt-w4a16", (2, 1)),
        (CHECKPOINTS / "deepseekv3-modelopt-w4a4", (1, 2)),
    ],
)
def test_models_give_the_logits_and_tokens_of_one_gpu(folder, shape):
    one = load_model(folder, **FLOAT32)
    two = load_model(folder, mesh=connect(shape), **FLOAT32)
    ids = jnp.arange(2 * 12, dtype=jnp.int32).reshape(2, 12) % one.config.vocab_size
    whole, parts = ([call(m, ids), decode(m, ids)[0]] for m in (one, two))
    for expected, found in zip(whole, parts, strict=True):
        assert difference(found, expected) < 2e-5
    tokens = [
        np.asarray(generate(m, ids[:, :8], max_new_tokens=24, stop_ids=())) for m in (one, two)
    ]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_generate_repeats_its_tokens(shape):
    model = load_model(EXAMPLE, mesh=connect(shape))
    prompt = np.arange(10, dtype=np.int32)[None]
    first, *others = (
        np.asarray(generate(model, prompt, max_new_tokens=64, stop_ids=())) for _ in range(100)
    )
    for tokens in others:
        np.testing.assert_array_equal(tokens, first)


def run_program(*arguments, gpus, timeout=240):
    """Start a program of `tests/programs` for each text of `gpus`, and return what they print."""
    # This process may have taken most of the memory.
    own = {
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_NVLS_ENABLE": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    environment = os.environ | own
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / "peer_sums.py", *map(str, arguments), str(index)],
            env=environment | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, visible in enumerate(gpus)
    ]
    try:
        return [(one.communicate(timeout=timeout)[0], one.returncode) for one in running]
    finally:
        for one in running:
            one.kill()


def test_processes_share_their_memory():
    """Each process has one GPU. They connect by CUDA IPC."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for text, status in run_program("processes", f"127.0.0.1:{port}", gpus=("0", "1")):
        assert status == 0, text
        assert "equal" in text.splitlines()


def test_a_gpu_that_waits_in_vain_ends_with_an_error():
    begin = time.monotonic()
    ((text, _),) = run_program("alone", gpus=("",))
    assert time.monotonic() - begin < 200
    assert "did not meet within 2 s" in text
