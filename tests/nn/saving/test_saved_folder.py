"""Test prepared modules through Orbax: equal numbers come back, never in a wrong layout."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.devices.host_devices import call
from support.files.given import CHECKPOINTS, EXAMPLE

from jax_nvfp4_moe import CheckpointError, NVFP4MoE, Target, load_model, load_moe, prepare
from jax_nvfp4_moe.checkpoint.writing.files import sole_writer
from jax_nvfp4_moe.nn.saving import saved_folder
from jax_nvfp4_moe.nn.saving.saved_folder import LAYOUTS, restore, save
from jax_nvfp4_moe.nn.variables import NVFP4Param
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor
from jax_nvfp4_moe.parallel import find_expert_mesh, shard_experts
from jax_nvfp4_moe.testing import random_moe_params

X = np.random.default_rng(0).standard_normal((3, 256)).astype(jnp.bfloat16)
LARGE = {"num_experts": 16, "hidden": 256, "intermediate": 128}


@functools.cache
def large():
    return random_moe_params(jax.random.key(0), **LARGE)


def experts(count, hidden, intermediate):
    """Return a part of the codes and scales of `large`, so that random weights compile once."""
    params = large()

    def cut(weight, rows, columns):
        parts = (weight.packed, rows, columns // 2), (weight.block_scale, rows, columns // 16)
        packed, scale = (np.asarray(a)[:count, :n, :k] for a, n, k in parts)
        return NVFP4Tensor(*map(jnp.asarray, (packed, scale, first(weight.global_scale))))

    def first(array):
        return jnp.asarray(np.asarray(array)[:count])

    return MoEParams(
        cut(params.gate_up, 2 * intermediate, hidden),
        cut(params.down, hidden, intermediate),
        gate_up_input_scale=first(params.gate_up_input_scale),
        down_input_scale=first(params.down_input_scale),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the example, and the folder where it is saved."""
    model, folder = load_model(EXAMPLE), tmp_path_factory.mktemp("saved") / "m"
    save(folder, model)
    return model, folder


def same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_comes_back(saved):
    model, folder = saved
    restored = restore(folder, nnx.eval_shape(lambda: model))
    same(nnx.state(restored), nnx.state(model))
    # Equal arrays and static parts make the same program, which needs no run.
    assert nnx.graphdef(restored) == nnx.graphdef(model)


def test_a_block_with_shared_experts_comes_back(tmp_path):
    folder = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
    moe = load_moe(folder, 1, scheme="checkpoint")
    save(tmp_path / "m", moe)
    restored = restore(tmp_path / "m", load_moe(folder, 2, scheme="checkpoint"))
    np.testing.assert_array_equal(call(restored, X), call(moe, X))


def test_the_state_alone_through_a_standard_checkpointer(tmp_path):
    state = nnx.state(load_moe(EXAMPLE, 1))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "s", state)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        same(checkpointer.restore(tmp_path / "s", shapes), state)


@pytest.mark.parametrize("layout", ["canonical", "cpu_16x16", "mma_64x64"])
def test_parameters_alone(tmp_path, layout):
    params = experts(4, 80, 48)
    params = params.to_layout(layout)
    save(tmp_path / "m", params)
    shapes = jax.eval_shape(lambda: params)
    restored = restore(tmp_path / "m", shapes)
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    same(restored, params)
    for other in ("canonical", "cpu_16x16", "mma_64x64", "fp4_64x64"):
        wanted = params.to_layout(other)
        for like in (wanted, jax.eval_shape(lambda wanted=wanted: wanted)):
            converted = restore(tmp_path / "m", like)
            assert jax.tree.structure(converted) == jax.tree.structure(wanted)
            same(converted, wanted)


def params_in(layout):
    """Return experts on one device."""
    params = experts(8, 64, 48)
    return params.to_layout(layout)


def shard(params, devices):
    """Spread the experts over the first `devices`."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("expert",))
    return jax.device_put(params, NamedSharding(mesh, PartitionSpec("expert")))


def check_sharded_experts(folder, layout):
    """Restore experts that eight devices share on eight and on two devices."""
    params = shard(params_in(layout), 8)
    save(folder, params)
    other = "cpu_16x16" if layout == "canonical" else "canonical"
    for devices, wanted in ((8, layout), (2, layout), (8, other)):
        like, params = shard(params_in(wanted), devices), params_in(wanted)
        if devices == 2:  # shapes are enough, and take no memory
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
            )
        restored = restore(folder, like)
        for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
            assert len(got.addressable_shards) == devices
            assert got.addressable_shards[0].data.shape[0] == 8 // devices
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def check_sharded_tree(folder, layout):
    """Restore experts sharded along `tensor`. Elsewhere, restoring must fail, not reorder rows."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 3), ("expert", "tensor"), kinds, devices=jax.devices()[:6])
    params = shard_experts(params_in("canonical"), find_expert_mesh(mesh))
    save(folder, params)
    for got, want in zip(*map(jax.tree.leaves, (restore(folder, params), params)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    for like in (params_in("canonical"), shard(params_in(layout), 8)):
        with pytest.raises(
            CheckpointError, match=r"saved on 3 shards along 'tensor', but .* are on 1"
        ):
            restore(folder, like)


@pytest.mark.eight_devices
@pytest.mark.parametrize("layout", ["canonical", "mma_64x64"])
def test_sharded_experts_come_back_sharded_and_not(tmp_path, layout):
    """Experts are saved on eight devices and restored on eight, on two and on one."""
    check_sharded_experts(tmp_path / "m", layout)
    check_sharded_tree(tmp_path / "sharded", layout)
    params = params_in(layout)
    same(restore(tmp_path / "m", jax.eval_shape(lambda: params)), params)


@pytest.mark.parametrize(
    "shards",
    [
        ["rows", [[32, 3]], 3],  # three parts of 64 rows
        ["diagonal", [[32, 2]], 2],
        ["rows", [], 2],
        ["rows", [[32, 0]], 2],
        7,
    ],
)
def test_shards_that_do_not_divide_are_refused(tmp_path, shards):
    moe = NVFP4MoE(4, 64, 32, top_k=2, rngs=nnx.Rngs(0), backend="reference")
    save(tmp_path / "m", moe)
    record = json.loads((tmp_path / "m" / LAYOUTS).read_text())
    assert record["shards"] == {}
    record["shards"]["experts/params"] = shards
    (tmp_path / "m" / LAYOUTS).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"layouts\.json: shards of experts/params: "):
        restore(tmp_path / "m", moe)


def test_a_block_is_restored_for_another_kernel(tmp_path):
    """The arrays have the same shapes in both layouts, so only the record tells them apart."""
    params = experts(4, 64, 32)
    moe = NVFP4MoE(4, 64, 32, top_k=2, params=params, backend="reference", rngs=nnx.Rngs(0))
    save(tmp_path / "m", moe)

    def other(target):
        return NVFP4MoE(4, 64, 32, top_k=2, params=params, target=target, rngs=nnx.Rngs(1))

    for target in (Target("cpu"), Target("cuda", (9, 0)), Target("cuda", (8, 0))):
        restored = restore(tmp_path / "m", nnx.eval_shape(lambda target=target: other(target)))
        wanted = other(target).experts.params.get_value()
        assert wanted.layout != "canonical"
        assert restored.experts.plan.layout == wanted.layout
        same(restored.experts.params.get_value(), wanted)
    again = restore(tmp_path / "m", other(Target("cpu")))
    np.testing.assert_array_equal(again.route(X[:, :64])[0], moe.route(X[:, :64])[0])
    save(tmp_path / "n", restored)
    back = restore(tmp_path / "n", moe)
    same(nnx.state(back), nnx.state(moe))
    np.testing.assert_array_equal(back(X[:, :64]), moe(X[:, :64]))


def test_a_model_is_restored_for_another_kernel(saved):
    like = load_model(EXAMPLE, backend="reference")
    restored = restore(saved[1], nnx.eval_shape(lambda: like))
    same(nnx.state(restored), nnx.state(like))


def test_a_layout_that_nobody_knows_is_refused(tmp_path):
    moe = NVFP4MoE(4, 64, 32, top_k=2, rngs=nnx.Rngs(0), backend="reference")
    save(tmp_path / "m", moe)
    record = json.loads((tmp_path / "m" / LAYOUTS).read_text())
    for value in record["layouts"].values():
        value[0] = "of_tomorrow"
    (tmp_path / "m" / LAYOUTS).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="the folder has \\['of_tomorrow'") as caught:
        restore(tmp_path / "m", moe)
    assert len(caught.value.problems) == 2


def moe_for_hopper(hidden, intermediate):
    """Return a block whose experts are padded in a CUDA layout and run by the reference."""
    params = experts(4, hidden, intermediate)
    moe = NVFP4MoE(
        4, hidden, intermediate, top_k=2, params=params, rngs=nnx.Rngs(0), backend="reference"
    )
    moe.experts.params = NVFP4Param(prepare(params, target=Target("cuda", (9, 0))))
    return moe


def test_padded_columns_come_back(tmp_path):
    moe = moe_for_hopper(80, 48)
    save(tmp_path / "m", moe)
    restored = restore(tmp_path / "m", nnx.eval_shape(lambda: moe))
    params = restored.experts.params.get_value()
    assert (params.hidden, params.intermediate, params.layout) == (80, 48, "mma_64x64")
    np.testing.assert_array_equal(restored(X[:, :80]), moe(X[:, :80]))


def test_other_columns_in_the_same_bytes_are_refused(tmp_path):
    """Intermediate sizes 48 and 64 pad to the same shapes, so only the record tells them apart."""
    save(tmp_path / "m", moe_for_hopper(64, 48))
    with pytest.raises(CheckpointError, match="rows and columns: expected"):
        restore(tmp_path / "m", moe_for_hopper(64, 64))


def test_a_folder_of_another_format_is_refused_in_one_sentence(tmp_path):
    """Formats differ in the names of variables, so a list of differences would name them all."""
    moe = NVFP4MoE(4, 64, 32, top_k=2, params=experts(4, 64, 32), router_weight=jnp.ones((4, 64)))
    save(tmp_path / "m", moe)
    record = json.loads((tmp_path / "m" / LAYOUTS).read_text())
    arrays = {name.replace("token_router/", "router_"): v for name, v in record["arrays"].items()}
    (tmp_path / "m" / LAYOUTS).write_text(json.dumps(record | {"version": 3, "arrays": arrays}))
    with pytest.raises(CheckpointError, match="expected format version 4, got 3") as raised:
        restore(tmp_path / "m", moe)
    assert "router" not in str(raised.value)


def test_another_version_of_a_layout_is_refused(tmp_path):
    moe = NVFP4MoE(4, 64, 32, top_k=2, rngs=nnx.Rngs(0), backend="reference")
    save(tmp_path / "m", moe)
    record = json.loads((tmp_path / "m" / LAYOUTS).read_text())
    for value in record["layouts"].values():
        value[1] += 1
    (tmp_path / "m" / LAYOUTS).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="layout, version, rows and columns"):
        restore(tmp_path / "m", moe)


def test_other_shapes_are_refused(tmp_path):
    moe = NVFP4MoE(4, 64, 32, top_k=2, rngs=nnx.Rngs(0), backend="reference")
    save(tmp_path / "m", moe)
    wider = NVFP4MoE(4, 64, 48, top_k=2, rngs=nnx.Rngs(0), backend="reference")
    with pytest.raises(CheckpointError, match="dtype and shape: expected"):
        restore(tmp_path / "m", wider)


LIMITED = """
import resource, sys
import numpy as np
from jax_nvfp4_moe.nn.saving.saved_folder import save

bytes = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
save(sys.argv[1], {"bytes": bytes})
"""


def test_a_second_try_works_after_the_disk_was_full(tmp_path):
    """No file may exceed 20 KB. The arrays do not fit into that, and the record does."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "m")]
    # The limit would also truncate compiled programs in the cache that other processes read.
    alone = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 1
    assert f'Failed writing: "{tmp_path / "m"}' in done.stderr
    assert os.listdir(tmp_path) == []
    save(tmp_path / "m", large())
    assert sorted(os.listdir(tmp_path / "m")) == ["arrays", LAYOUTS]


def test_a_second_writer_is_told_and_destroys_nothing(tmp_path):
    with sole_writer(tmp_path), pytest.raises(ValueError, match="another process is writing to"):
        save(tmp_path, large())
    save(tmp_path, large())
    assert sorted(os.listdir(tmp_path)) == ["arrays", LAYOUTS]


def test_folders_that_do_not_serve(tmp_path):
    moe = NVFP4MoE(4, 64, 32, top_k=2, rngs=nnx.Rngs(0))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a new or an empty folder"):
        save(tmp_path, moe)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path} has no layouts\.json"):
        restore(tmp_path, moe)
    with pytest.raises(ValueError, match=r"file is a file$"):
        save(tmp_path / "file", moe)


def small_tree(value):
    return {"weight": jnp.full((2, 16), value, jnp.float32)}


def value_in(folder):
    return float(restore(folder, small_tree(0))["weight"][0, 0])


def test_an_earlier_save_is_replaced_when_asked(tmp_path):
    save(tmp_path, small_tree(1))
    with pytest.raises(ValueError, match=r"has an earlier save.*overwrite=True"):
        save(tmp_path, small_tree(2))
    assert value_in(tmp_path) == 1
    for value in (2, 3, 4):
        save(tmp_path, small_tree(value), overwrite=True)
        assert value_in(tmp_path) == value
        assert len(os.listdir(tmp_path)) == 2
    save(tmp_path / "new" / "folder", small_tree(5), overwrite=True)
    assert value_in(tmp_path / "new" / "folder") == 5


def test_other_files_are_never_overwritten(tmp_path):
    save(tmp_path, small_tree(1))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="has files in it that are no save"):
        save(tmp_path, small_tree(2), overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert value_in(tmp_path) == 1


@pytest.mark.parametrize("when", ["arrays", "record"])
def test_an_earlier_save_outlives_a_failure(when, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "no space left")

    save(tmp_path, small_tree(1))
    before = sorted(os.listdir(tmp_path))
    with monkeypatch.context() as patch:
        if when == "arrays":
            patch.setattr(orbax.checkpoint.StandardCheckpointer, "save", fail)
        else:
            patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space left"):
            save(tmp_path, small_tree(2), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == before
    assert value_in(tmp_path) == 1
    save(tmp_path, small_tree(3), overwrite=True)
    assert value_in(tmp_path) == 3


@pytest.mark.parametrize("after", ["arrays", "record"])
def test_an_earlier_save_outlives_a_killed_process(after, tmp_path, monkeypatch):
    """The process ends before the record is renamed, or between that and the deletion."""
    save(tmp_path, small_tree(1))
    with monkeypatch.context() as patch:
        # A killed process deletes nothing.
        patch.setattr(saved_folder, "_clear", lambda folder: None)
        if after == "arrays":
            patch.setattr(saved_folder, "_finish", lambda folder: None)
        save(tmp_path, small_tree(2), overwrite=True)
    assert {"arrays", "arrays.next"} <= set(os.listdir(tmp_path))
    assert value_in(tmp_path) == {"arrays": 1, "record": 2}[after]
    with pytest.raises(ValueError, match="has an earlier save"):
        save(tmp_path, small_tree(3))
    save(tmp_path, small_tree(3), overwrite=True)
    assert value_in(tmp_path) == 3
    assert len(os.listdir(tmp_path)) == 2


def test_tensors_know_their_layout_in_a_tree():
    params = experts(4, 64, 32)
    flipped = dataclasses.replace(params.down, layout="cpu_16x16")
    assert jax.tree.structure(params.down) != jax.tree.structure(flipped)


def test_names_in_a_folder_stay(tmp_path):
    """The names of arrays in a folder do not depend on layouts, as the paths of a pytree do."""
    small = {"num_experts": 2, "hidden": 64, "intermediate": 64}
    moe = NVFP4MoE(**small, top_k=1, params=experts(*small.values()), rngs=nnx.Rngs(0))
    save(tmp_path / "m", moe)
    record = json.loads((tmp_path / "m" / LAYOUTS).read_text())
    expected = {
        f"experts/params.{weight}.{name}"
        for weight in ("gate_up", "down")
        for name in ("packed", "block_scale", "global_scale")
    }
    scales = {"experts/params.gate_up_input_scale", "experts/params.down_input_scale"}
    assert record["arrays"].keys() == expected | scales | {"token_router/weight"}
    assert moe.experts.params.get_value().layout != "canonical"
