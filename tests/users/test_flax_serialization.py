"""A user saves weights with `flax.serialization`: bytes and state dictionaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

import jax_nvfp4_moe as nvfp4

HOPPER = nvfp4.Target("cuda", (9, 0))
X = jax.random.normal(jax.random.key(7), (5, 64))


def experts(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((4, 64, 64),) * 3
    return nvfp4.quantize_experts(*map(jax.random.normal, keys, shapes))


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_bytes_of_a_users_tree():
    tree = {"experts": experts(0), "weight": nvfp4.quantize(jnp.ones((32, 64))), "step": 3}
    other = {"experts": experts(1), "weight": nvfp4.quantize(jnp.zeros((32, 64))), "step": 0}
    back = serialization.from_bytes(other, serialization.to_bytes(tree))
    assert_equal(back["experts"], tree["experts"])
    assert_equal(back["weight"], tree["weight"])
    assert back["step"] == 3


def test_a_state_dict_names_its_layout():
    prepared = nvfp4.prepare(experts(0), target=HOPPER)
    found = serialization.to_state_dict(prepared)
    assert sorted(found) == ["down", "gate_up"]
    assert sorted(found["down"]) == [
        f"{name}_mma_64x64" for name in ("block_scale", "global_scale", "packed")
    ]
    assert_equal(serialization.from_state_dict(prepared, found), prepared)
    assert sorted(serialization.to_state_dict(experts(0))["down"]) == [
        "block_scale",
        "global_scale",
        "packed",
    ]


def test_msgpack():
    found = serialization.msgpack_serialize(serialization.to_state_dict(experts(0)))
    back = serialization.from_state_dict(experts(1), serialization.msgpack_restore(found))
    assert_equal(back, experts(0))


@pytest.mark.parametrize("options", [{"target": HOPPER}, {"target": nvfp4.Target("cpu")}])
def test_another_layout_is_refused_by_its_name(options):
    prepared = nvfp4.prepare(experts(0), **options)
    written = serialization.to_bytes({"layer": prepared})
    with pytest.raises(ValueError, match=rf"layer/gate_up.*packed_{prepared.layout}"):
        serialization.from_bytes({"layer": experts(1)}, written)
    with pytest.raises(ValueError, match=rf"layer/gate_up.*packed_{prepared.layout}"):
        serialization.from_bytes({"layer": prepared}, serialization.to_bytes({"layer": experts(0)}))


def test_arrays_of_another_shape_or_presence_are_refused():
    weight, wider = (nvfp4.quantize(jnp.ones((rows, 64))) for rows in (32, 48))
    with pytest.raises(ValueError, match=r"packed: expected shape \(48, 32\), got \(32, 32\)"):
        serialization.from_bytes(wider, serialization.to_bytes(weight))
    with pytest.raises(ValueError, match=r"expected the arrays .*got"):
        serialization.from_state_dict(weight, {"packed": weight.packed})


def test_a_pure_dict_of_an_nnx_model():
    def make(seed, **options):
        return nvfp4.NVFP4MoE(8, 64, 64, top_k=2, rngs=nnx.Rngs(seed), **options)

    trained, fresh = make(0), make(1)
    written = serialization.to_bytes(nnx.to_pure_dict(nnx.state(trained)))
    state = nnx.state(fresh)
    read = serialization.from_bytes(nnx.to_pure_dict(state), written)
    nnx.replace_by_pure_dict(state, read)
    nnx.update(fresh, state)
    np.testing.assert_array_equal(np.asarray(fresh(X)), np.asarray(trained(X)))
    other = nnx.to_pure_dict(nnx.state(make(0, backend="reference")))
    with pytest.raises(ValueError, match="experts/params/gate_up: expected the arrays"):
        serialization.from_bytes(other, written)


def test_the_variables_of_a_linen_module():
    linear = nnx.bridge.to_linen(nvfp4.NVFP4Linear, 64, 32, use_bias=True)
    trained, fresh = (linear.init(jax.random.key(seed), X) for seed in (0, 1))
    read = serialization.from_bytes(fresh, serialization.to_bytes(trained))
    np.testing.assert_array_equal(
        np.asarray(linear.apply(read, X)), np.asarray(linear.apply(trained, X))
    )
