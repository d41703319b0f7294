"""Test deferred arrays: a part equals that part of the whole, and reads only its own bytes."""

import functools
import math
import os
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.files.given import CHECKPOINTS, EXAMPLE, copy_with_config

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.checkpoint import (
    CheckpointError,
    LoadOptions,
    WeightTable,
    open_checkpoint,
    read_source,
)
from jax_nvfp4_moe.checkpoint.reading import reader as reading
from jax_nvfp4_moe.checkpoint.reading.lazy_array import LazyArray, overlap, whole
from jax_nvfp4_moe.checkpoint.safetensors import Tensors
from jax_nvfp4_moe.models.loading import find_model
from jax_nvfp4_moe.nn.building.settings import Settings

# Each case holds a folder, the path of its experts, (experts, hidden, intermediate) and options.
# "each" stores one tensor per expert. "stacked" stores all experts as [e, k, n]. "alternating" also
# has alternating gate and up rows, and biases.
CASES = {
    "each": (EXAMPLE, "model.layers.0.mlp.experts", (16, 256, 192), {}),
    "stacked": (
        CHECKPOINTS / "llama4_text-modelopt-w4a16",
        "model.layers.1.feed_forward.experts",
        (4, 64, 48),
        {"inputs_first": True},
    ),
    "alternating": (
        CHECKPOINTS / "gpt_oss-modelopt-w4a16",
        "model.layers.0.mlp.experts",
        (6, 64, 48),
        {"inputs_first": True, "bias": True, "interleaved": True},
    ),
}


def slices(size):
    bounds = st.tuples(st.integers(0, size), st.integers(0, size))
    return bounds.map(lambda pair: slice(min(pair), max(pair)))


def regions(shape):
    return st.tuples(*map(slices, shape))


@given(st.data())
def test_a_part_of_a_part(data):
    """`overlap` finds the elements that both the part and the region contain."""
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4)))
    region = data.draw(regions(shape))
    first = st.one_of(st.integers(0, shape[0] - 1), slices(shape[0]))
    at = data.draw(st.one_of(st.just(()), st.tuples(first), st.tuples(first, slices(shape[1]))))
    array = np.arange(math.prod(shape)).reshape(shape)
    common = set(array[region].flat) & set(np.atleast_1d(array[at]).flat)
    found = overlap(at, shape, region)
    if found is None:
        assert not common
        return
    inside, of_part = found
    assert set(np.atleast_1d(array[region][inside]).flat) == common
    assert set(np.atleast_1d(array[at][of_part]).flat) == common


@given(regions((4, 6)))
def test_indices(region):
    array = np.arange(24).reshape(4, 6)
    deferred = LazyArray(array.shape, array.dtype, lambda region: array[region])
    np.testing.assert_array_equal(deferred[region], array[region])
    np.testing.assert_array_equal(deferred.map(np.negative)[region[0]], -array[region[0]])
    np.testing.assert_array_equal(deferred[1:, -2:], array[1:, -2:])
    np.testing.assert_array_equal(deferred[()], array)
    assert (deferred.ndim, deferred.nbytes, whole((4, 6))) == (2, 192, (slice(0, 4), slice(0, 6)))
    with pytest.raises(ValueError, match="index: expected slices with step 1"):
        deferred[::2]


@functools.cache
def experts(name):
    """Return the arrays of a layer's experts by name, once read whole and once deferred."""
    folder, prefix, sizes, options = CASES[name]
    checkpoint = open_checkpoint(folder)  # stays open: parts are read later
    table = WeightTable(checkpoint, LoadOptions(input_scales="ignored", only=prefix))
    source = table.experts(prefix, *sizes, **options)
    table.check()
    with table.open_reader() as reader:
        return [flat(read_source(source, reader)), flat(source.read(reader))]


def flat(params):
    found = {
        f"{matrix}.{field}": getattr(getattr(params, matrix), field)
        for matrix in ("gate_up", "down")
        for field in ("packed", "block_scale", "global_scale")
    }
    found |= {name: getattr(params, name) for name in ("gate_up_bias", "down_bias")}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("name", CASES)
@examples(40)
@given(st.data())
def test_any_part_equals_that_of_the_whole(name, data):
    arrays, deferred = experts(name)
    field = data.draw(st.sampled_from(sorted(arrays)))
    region = data.draw(regions(arrays[field].shape))
    part = deferred[field][region]
    assert part.dtype == arrays[field].dtype
    np.testing.assert_array_equal(part.view(np.uint8), arrays[field][region].view(np.uint8))


@pytest.mark.parametrize("name", CASES)
def test_threads_read_the_same(monkeypatch, name):
    """Several threads read chunks that do not end at the boundaries of tensors."""
    arrays, deferred = experts(name)
    into, seen = Tensors.read_bytes, set()

    def recorded(self, tensor, view, *rest):
        seen.add(threading.get_ident())
        assert len(view) <= 100 or name != "each"
        return into(self, tensor, view, *rest)

    monkeypatch.setattr(reading, "_THREAD_BYTES", 100)
    monkeypatch.setattr(Tensors, "read_bytes", recorded)
    for field in ("gate_up.packed", "down.block_scale"):
        part = deferred[field][1:3]
        np.testing.assert_array_equal(part.view(np.uint8), arrays[field][1:3].view(np.uint8))
    # Stacked experts are [e, k, n] in the file. One thread reads and transposes them.
    assert (len(seen) > 1) == (name == "each")


def test_a_file_that_shrinks_ends_all_threads(monkeypatch, tmp_path):
    folder = copy_with_config(EXAMPLE, tmp_path / "m")
    monkeypatch.setattr(reading, "_THREAD_BYTES", 100)
    prefix, sizes = CASES["each"][1:3]

    with open_checkpoint(folder) as checkpoint:
        table = WeightTable(checkpoint, LoadOptions(input_scales="ignored", only=prefix))
        source = table.experts(prefix, *sizes)
        table.check()
        os.truncate(folder / "model.safetensors", 100_000)
        said = pytest.raises(CheckpointError, match="shrank while it was read")
        with table.open_reader() as reader, said:
            read_source(source, reader)


def test_rows_of_experts_are_read_by_range(monkeypatch):
    """Reading gate rows 64 to 127 of experts 4 to 7 touches only those bytes."""
    arrays, deferred = experts("each")
    into, counted = Tensors.read_bytes, []

    def recorded(self, name, view, *rest):
        counted.append((name, len(view)))
        return into(self, name, view, *rest)

    monkeypatch.setattr(Tensors, "read_bytes", recorded)
    part = deferred["gate_up.packed"][4:8, 64:128]
    np.testing.assert_array_equal(part, arrays["gate_up.packed"][4:8, 64:128])
    names = [f"model.layers.0.mlp.experts.{x}.gate_proj.weight" for x in range(4, 8)]
    assert counted == [(name, 64 * 128) for name in names]


def test_a_part_of_bad_scales_is_refused(tmp_path):
    """A load that reads a NaN scale fails, and a load of other experts does not."""
    folder = copy_with_config(CHECKPOINTS / "qwen3moe-modelopt-w4a16", tmp_path / "m")
    name = "model.layers.0.mlp.experts.3.down_proj.weight_scale"
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.tensors.info(name)
    with (folder / info.file).open("r+b") as stream:
        stream.seek(info.start)
        stream.write(b"\x7f")

    def read(experts):
        prefix = "model.layers.0.mlp.experts"
        with open_checkpoint(folder) as checkpoint:
            table = WeightTable(checkpoint, LoadOptions(only=prefix))
            source = table.experts(prefix, 16, *checkpoint_sizes(checkpoint.config))
            with table.open_reader() as reader:
                found = source.read(reader).down.block_scale[experts]
                reader.raise_problems()
                return found

    read(slice(4, 16))
    with pytest.raises(CheckpointError, match=r"experts.3.down_proj.*1 of \d+ block scales are"):
        read(slice(0, 4))


def checkpoint_sizes(config):
    return config["hidden_size"], config["moe_intermediate_size"]


HELD = (
    "gpt_oss-mxfp4",
    "qwen3_moe-ct-w4a4-kv8",
    "qwen3_moe-modelopt-mixed-w4a16-kv8",
    "glm4_moe-groups-modelopt-awq",
)


@pytest.mark.parametrize("name", HELD)
def test_a_value_is_the_same_before_it_is_read(name):
    """All shapes, dtypes and static fields are known from the headers."""
    with open_checkpoint(CHECKPOINTS / name) as checkpoint:
        unread = find_model(checkpoint, Settings(Target("cpu"), scheme="checkpoint"))
        sources = [source for part in unread.parts for source in part.sources.values()]
        assert sources
        with unread.open_reader(progress=False) as reader:
            for source in sources:
                read = read_source(source, reader)
                assert jax.tree.structure(source.value) == jax.tree.structure(read)
                for unread, array in zip(*map(jax.tree.leaves, (source.value, read)), strict=True):
                    assert (unread.shape, unread.dtype) == (array.shape, array.dtype), source.name
