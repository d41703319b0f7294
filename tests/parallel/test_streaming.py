"""Test streaming of experts to a device: equal bits, and no second copy of the layer."""

import functools

import jax
import numpy as np
import pytest

from jax_nvfp4_moe.checkpoint.reading.read_ahead import read_ahead
from jax_nvfp4_moe.ops.preparation import prepare
from jax_nvfp4_moe.parallel import streaming
from jax_nvfp4_moe.scheme import Target
from jax_nvfp4_moe.testing import random_moe_params

CPU, GPU = Target("cpu"), Target("cuda", (9, 0))
LAYOUTS = ("cpu_16x16", "mma_64x64")


@pytest.fixture(scope="module")
def params():
    return jax.device_get(
        random_moe_params(jax.random.key(0), num_experts=6, hidden=64, intermediate=32)
    )


def chunks(params, step):
    return (
        jax.tree.map(lambda x, first=first: x[first : first + step], params)
        for first in range(0, params.num_experts, step)
    )


@pytest.mark.parametrize("step", [1, 2, 6])
@pytest.mark.parametrize("layout", [*LAYOUTS, None])
def test_chunks_make_the_whole(params, layout, step):
    made = streaming.join_chunks(chunks(params, step), 6, step, layout)
    expected = params if layout is None else jax.jit(lambda p: p.to_layout(layout))(params)
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_chunks_are_prepared_as_the_whole_is(params):
    made = streaming.join_chunks(chunks(params, 3), 6, 3, prepare(params).layout)
    jax.tree.map(np.testing.assert_array_equal, made, prepare(params))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_is_written_in_place(params, layout):
    """The program needs memory for a few chunks, not for a copy of the layer or of one array."""
    count = 600
    chunk = jax.device_put(next(chunks(params, 1)))
    joined = streaming._allocate(chunk, count, layout, None)
    program = streaming._write.lower(joined, chunk, np.int32(0), layout, None).compile()
    memory = program.memory_analysis()
    assert memory is not None
    smallest = joined.down.block_scale.nbytes
    assert memory.alias_size_in_bytes >= joined.nbytes
    assert memory.temp_size_in_bytes < smallest


def test_sizes_of_chunks(params):
    """A chunk's size is at least one, divides the experts of a shard, and is larger on a GPU."""
    expert = params.nbytes // 6
    assert expert * 6 < streaming._CPU_BYTES
    assert streaming.chunk_size(params, 6, CPU) == 6
    many = jax.tree.map(lambda x: np.resize(x, (2048, *x.shape[1:])), params)
    most = streaming._CPU_BYTES // (many.nbytes // 2048)
    assert most < 2039
    assert streaming.chunk_size(many, 2048, CPU) == max(
        n for n in range(1, most + 1) if 2048 % n == 0
    )
    assert streaming.chunk_size(many, 2039, CPU) == 1  # a prime that is too large for one chunk
    assert streaming.chunk_size(many, 2048, GPU) == 2048
    assert streaming.chunk_size(many, 2048, CPU, 2) == 2 * streaming.chunk_size(many, 2048, CPU)


def test_one_chunk_is_read_ahead(monkeypatch, params):
    """While one chunk is written, only the next one is read. A read error reaches the caller."""
    written, alive = [], []

    def counted(first, chunk):
        alive.append(first - len(written))
        if first == 4:
            raise OSError("the disk is gone")
        return chunk

    def write(joined, *args):
        written.append(1)
        return original(joined, *args)

    original = streaming._write
    monkeypatch.setattr(streaming, "_write", write)
    reads = (functools.partial(counted, *one) for one in enumerate(chunks(params, 1)))
    with pytest.raises(OSError, match="the disk is gone"):
        streaming.join_chunks(read_ahead(reads), 6, 1, None)
    assert len(alive) == 5
    assert max(alive) <= 1
