"""A user saves with Orbax's own checkpointers: the same layout restores, another one is refused."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_nvfp4_moe as nvfp4

HOPPER = {"target": nvfp4.Target(platform="cuda", compute_capability=(9, 0))}
# Modules of equal shapes whose weights have other byte orders than those of this device's kernels.
OTHERS = {
    "reference": {"backend": "reference"},
    "hopper": HOPPER,
    "cpu": {"target": nvfp4.Target(platform="cpu")},
}
X = jax.random.normal(jax.random.key(7), (5, 64))


class Block(nnx.Module):
    """A block of a user's own model."""

    def __init__(self, *, rngs, **options):
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.moe = nvfp4.NVFP4MoE(8, 64, 64, top_k=2, rngs=rngs, **options)
        self.out = nvfp4.NVFP4Linear(64, 64, rngs=rngs, **options)

    def __call__(self, x):
        return self.out(self.moe(self.norm(x)))


def block(seed, **options):
    return Block(rngs=nnx.Rngs(seed), **options)


def layout(module):
    return module.moe.experts.params.get_value().layout


def other_layouts():
    """Return the modules of `OTHERS` whose layout is not that of this device."""
    here = layout(block(0))
    made = {name: block(0, **options) for name, options in OTHERS.items()}
    return {name: module for name, module in made.items() if layout(module) != here}


def save_standard(folder, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)


def restore_standard(folder, state):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "state", state)


def save_pytree(folder, state):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)


def restore_pytree(folder, state):
    how = ocp.checkpoint_utils.construct_restore_args(state)
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(
            folder / "state", args=ocp.args.PyTreeRestore(state, restore_args=how)
        )


def save_managed(folder, state):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))


def restore_managed(folder, state):
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(0, args=ocp.args.StandardRestore(state))


def save_pure(folder, state):
    save_standard(folder, nnx.to_pure_dict(state))


def restore_pure(folder, state):
    nnx.replace_by_pure_dict(state, restore_standard(folder, nnx.to_pure_dict(state)))
    return state


CHECKPOINTERS = {
    "standard": (save_standard, restore_standard),
    "pytree": (save_pytree, restore_pytree),
    "manager": (save_managed, restore_managed),
    "pure_dict": (save_pure, restore_pure),
}


@pytest.fixture(params=CHECKPOINTERS.values(), ids=CHECKPOINTERS)
def checkpointer(request):
    return request.param


def test_the_same_layout_restores_exactly(checkpointer, tmp_path):
    save, restore = checkpointer
    trained, fresh = block(0), block(1)
    save(tmp_path, nnx.state(trained))
    nnx.update(fresh, restore(tmp_path, nnx.state(fresh)))
    for one, other in zip(*map(jax.tree.leaves, map(nnx.state, (trained, fresh))), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    np.testing.assert_array_equal(np.asarray(trained(X)), np.asarray(fresh(X)))


def test_another_layout_is_refused_by_its_name(checkpointer, tmp_path):
    save, restore = checkpointer
    others, here = other_layouts(), block(1)
    assert len(others) >= 2
    named = layout(here)
    for name, module in others.items():
        folder = tmp_path / name
        save(folder, nnx.state(module))
        with pytest.raises(ValueError, match=f"packed_{named}"):
            restore(folder, nnx.state(here))


def test_a_target_of_shapes_alone_is_refused_too(tmp_path):
    save_standard(tmp_path, nnx.state(block(0, backend="reference")))
    abstract = nnx.state(nnx.eval_shape(lambda: block(0)))
    with pytest.raises(ValueError, match="packed_"):
        restore_standard(tmp_path, abstract)


def test_bare_weights_of_another_layout_are_refused(tmp_path):
    weights = nvfp4.quantize(jax.random.normal(jax.random.key(0), (64, 64)))
    for name, other in {"canonical": weights, "hopper": nvfp4.prepare(weights, **HOPPER)}.items():
        save_standard(tmp_path / name, {"weight": other})
        back = restore_standard(tmp_path / name, {"weight": other})["weight"]
        np.testing.assert_array_equal(
            np.asarray(back.dequantize()), np.asarray(weights.dequantize())
        )
    with pytest.raises(ValueError, match="packed_mma_64x64"):
        restore_standard(tmp_path / "hopper", {"weight": weights})


def test_rows_that_were_padded_are_named():
    """Padded weights of 40 and of 48 rows have equal shapes and different meanings."""
    short, long = (
        nvfp4.prepare(nvfp4.quantize(jnp.ones((rows, 64))), **HOPPER) for rows in (40, 48)
    )
    assert short.packed.shape == long.packed.shape
    assert jax.tree.structure(short) != jax.tree.structure(long)
    assert not set(paths(short)) & set(paths(long))


def paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def test_arrays_by_their_paths(tmp_path):
    """A user's own npz file: no name of a layout's arrays is that of another layout's."""

    def save(module):
        flat = {jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(nnx.state(module))}
        # numpy's files know no float8, so users store such arrays as bytes.
        np.savez(
            tmp_path / "weights.npz",
            **{n: np.frombuffer(np.asarray(x).tobytes(), "u1") for n, x in flat.items()},
        )

    here = block(1)
    for module in other_layouts().values():
        save(module)
        stored = np.load(tmp_path / "weights.npz")
        missing = [name for name in paths(nnx.state(here)) if name not in stored]
        assert len(missing) == 9  # three arrays each of gate_up, down and the linear layer
    save(block(0))
    assert set(paths(nnx.state(here))) == set(np.load(tmp_path / "weights.npz"))


def test_canonical_names_are_plain():
    weights = nvfp4.quantize(jnp.ones((64, 64)))
    assert paths(weights) == [".packed", ".block_scale", ".global_scale"]


def test_in_memory_other_layouts_compute_the_same():
    """`nnx.update` and `nnx.merge` take the other module's weights with their layout."""
    expected = np.asarray(block(0)(X), np.float32)
    for module in other_layouts().values():
        updated = block(1)
        nnx.update(updated, nnx.state(module))
        merged = nnx.merge(nnx.graphdef(block(1)), nnx.state(module))
        for one in (updated, merged):
            np.testing.assert_array_equal(np.asarray(one(X), np.float32), expected)


def test_our_own_save_converts(tmp_path):
    expected = np.asarray(block(0)(X), np.float32)
    for name, module in other_layouts().items():
        nvfp4.save(tmp_path / name, module)
        restored = nvfp4.restore(tmp_path / name, block(1))
        np.testing.assert_array_equal(np.asarray(restored(X), np.float32), expected)


def test_split_merge_copy_and_pickle_keep_weights():
    module = block(0)
    expected = np.asarray(module(X), np.float32)
    copies = (nnx.merge(*nnx.split(module)), nnx.clone(module), pickle.loads(pickle.dumps(module)))
    for one in copies:
        np.testing.assert_array_equal(np.asarray(one(X), np.float32), expected)


WHOLE_STATES = ("standard", "pytree", "manager")  # a pure dict holds no metadata of variables


@pytest.mark.two_devices
@pytest.mark.parametrize(
    "checkpointer", [CHECKPOINTERS[name] for name in WHOLE_STATES], ids=WHOLE_STATES
)
def test_a_mesh_that_shards_otherwise_is_refused(checkpointer, tmp_path):
    """The rows of gate and up are in the order of the shards: equal shapes, another order."""
    save, restore = checkpointer
    make = functools.partial(nvfp4.NVFP4MoE, 8, 64, 64, top_k=2, backend="reference")
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    sharded, whole = make(rngs=nnx.Rngs(0), mesh=mesh), make(rngs=nnx.Rngs(1))
    save(tmp_path, nnx.state(sharded))
    with pytest.raises(ValueError, match="rows_32x2_32x2_on_2_shards"):
        restore(tmp_path, nnx.state(whole))
    with pytest.raises(ValueError, match="sharded as ShardLayout"):
        nnx.update(whole, nnx.state(sharded))
    merged = nnx.merge(nnx.graphdef(make(rngs=nnx.Rngs(1))), nnx.state(sharded))
    with pytest.raises(ValueError, match="got 2 parts"):
        merged(X)
    again = make(rngs=nnx.Rngs(2), mesh=mesh)
    nnx.update(again, restore(tmp_path, nnx.state(again)))
    np.testing.assert_array_equal(np.asarray(again(X)), np.asarray(sharded(X)))
