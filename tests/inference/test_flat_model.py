"""Test that a flattened model has what `jax.tree.flatten` finds, whatever changed since then."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import EXAMPLE

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.inference import flat_model
from jax_nvfp4_moe.inference.flat_model import flatten_model, restore_model


@pytest.fixture(scope="module")
def loaded():
    return load_model(EXAMPLE, dtype=jnp.float32)


@pytest.fixture
def model(loaded):
    return nnx.clone(loaded)


def check(model):
    """Check that flattening gives the arrays and the structure of `jax.tree.flatten`."""
    flat = flatten_model(model)
    arrays, structure = jax.tree.flatten(model)
    assert flat.structure == structure
    assert len(flat.arrays) == len(arrays)
    assert all(here is there for here, there in zip(flat.arrays, arrays, strict=True))
    assert jax.tree.structure(restore_model(flat)) == structure


def change_value(model):
    model.embedding.set_value(model.embedding.get_value() + 1)


def change_tree_of_value(model):
    model.embedding.set_value((model.embedding.get_value(), jnp.zeros(1)))


def change_metadata(model):
    model.embedding.set_metadata(tag="changed")


def change_variable(model):
    model.embedding = nnx.Param(jnp.ones((2, 3)))


def change_module(model):
    model.layers[0] = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def append_module(model):
    model.layers.append(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def change_static(model):
    model.layers[1].mlp.capacity_of_this_test = 7


def rename(model):
    """The values of all attributes stay the same, and so does their order."""
    model.last_attribute = 1
    flatten_model(model)
    del model.last_attribute
    model.another_name = 1


CHANGES = [
    change_value,
    change_tree_of_value,
    change_metadata,
    change_variable,
    change_module,
    append_module,
    change_static,
    rename,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen(change, model):
    flatten_model(model)
    before = flatten_model(model)
    check(model)
    change(model)
    after = flatten_model(model)
    same = [here is there for here, there in zip(after.arrays, before.arrays, strict=False)]
    assert after.structure != before.structure or not all(same)
    check(model)
    check(model)


def test_modules_are_not_flattened_again(model, monkeypatch):
    flatten_model(model)
    first = flatten_model(model)
    flattened = []
    flatten = jax.tree.flatten
    monkeypatch.setattr(jax.tree, "flatten", lambda x: (flattened.append(x), flatten(x))[1])
    assert flatten_model(model).structure is first.structure
    (variables,) = flattened
    assert all(isinstance(variable, nnx.Variable) for variable in variables)


def test_arrays_are_not_kept(model):
    change_value(model)
    flatten_model(model)
    old = weakref.ref(model.embedding.get_value())
    change_value(model)
    gc.collect()
    assert old() is None


def test_a_model_is_not_kept(loaded):
    model = nnx.clone(loaded)
    flatten_model(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_other_trees(model):
    """Arrays and containers outside of Flax variables are found, too."""

    class Mixed(nnx.Module):
        def __init__(self):
            self.array = nnx.data(jnp.ones(2))
            self.plain = nnx.data([nnx.Param(jnp.ones(3))])

    mixed = Mixed()
    check(mixed)
    mixed.plain.append(nnx.Param(jnp.ones(4)))
    check(mixed)
    mixed.array = jnp.zeros(3)
    check(mixed)
    tree = {"x": np.ones(3), "model": model}
    check(tree)
    check(lambda x: x)
    assert mixed not in flat_model._known
