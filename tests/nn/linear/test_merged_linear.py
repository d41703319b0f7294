"""Test linear layers that read the same input: what is joined, and that no value changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.checkpoint import LinearWeights
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.linear.formats import make_linear
from jax_nvfp4_moe.nn.linear.merged_linear import MergedLinear, find_runs, join_weights
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor, quantize
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme
from jax_nvfp4_moe.testing import assert_as_accurate_as

K, ROWS = 64, {"q": 40, "k": 8, "v": 24}
SCALES = {"q": 1.0, "k": 3.0, "v": 0.1}
X = np.random.default_rng(9).normal(size=(3, K)).astype(np.float32)
CPU, BLACKWELL = Target("cpu"), Target("cuda", (12, 0))


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    """Use the CPU, for which the layers are made, so that a machine with a GPU tests them too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def matrix(name):
    rng = np.random.default_rng(ROWS[name])
    return np.float32(SCALES[name]) * rng.standard_normal((ROWS[name], K), np.float32)


def nvfp4(name, divides=False, declared=Scheme.W4A16):
    weight = quantize(matrix(name))
    if divides:
        weight = dataclasses.replace(weight, global_divisor=1 / weight.global_scale)
    scale = jnp.float32(SCALES[name] / 500) if declared is Scheme.W4A4 else None
    return LinearWeights(weight, input_scale=scale, checkpoint_scheme=declared)


def fp8(name, declared=FP8ActivationScaling.TOKEN):
    scale = np.full(ROWS[name], SCALES[name] / 50, np.float32)
    values = (matrix(name) / scale[:, None]).astype(jnp.float8_e4m3fn)
    values, scale = jnp.asarray(values), jnp.asarray(scale)
    own = jnp.float32(SCALES[name] / 50) if declared is FP8ActivationScaling.STATIC else None
    return LinearWeights(FP8Tensor(values, scale), input_scale=own, checkpoint_scheme=declared)


def dense(name):
    return LinearWeights(jnp.asarray(matrix(name)))


FORMATS = {
    "nvfp4": nvfp4,
    "nvfp4-divisors": lambda name: nvfp4(name, divides=True),
    "fp8": fp8,
    "dense": dense,
}


def layer(weights, **settings):
    """Return the layers `weights`, by name, as a model makes them."""
    how = Settings(CPU, **({"dtype": jnp.float32} | settings))
    made = {}
    for names in find_runs(weights, how):
        joined = join_weights([weights[name] for name in names])
        made["_".join(names)] = make_linear(joined, sum(map(ROWS.get, names)), K, how)
    return MergedLinear(**made)


def apart(weights, **settings):
    """Return the results of the layers, each on its own."""
    each = [layer({name: one}, **settings) for name, one in weights.items()]
    return np.concatenate([one(X) for one in each], axis=-1)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_joined_layers_compute_what_they_compute_apart(name, backend):
    """A kernel gives the same bits. A product in XLA may sum in another order."""
    weights = {one: FORMATS[name](one) for one in ROWS}
    joined = layer(weights, backend=backend)
    assert joined.names == ("q_k_v",)
    found, expected = joined(X), apart(weights, backend=backend)
    if name.startswith("nvfp4") and backend is None:
        np.testing.assert_array_equal(found, expected)
    values = [
        one.weight if name == "dense" else one.weight.dequantize() for one in weights.values()
    ]
    truth = np.asarray(X, np.float64) @ np.concatenate(values).astype(np.float64).T
    assert_as_accurate_as(found, expected, truth)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(np.roll(found, 1, axis=-1), expected, truth)


def test_joined_layers_round_activations_to_fp8_alike():
    """Each token has one scale, whatever the number of rows."""
    weights, how = {name: fp8(name) for name in ROWS}, {"scheme": "checkpoint"}
    joined = layer(weights, **how)
    assert joined.q_k_v.activations is FP8ActivationScaling.TOKEN
    expected, plain = apart(weights, **how), apart(weights)
    bound = 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(joined(X), expected, rtol=0, atol=bound)
    assert np.abs(plain - expected).max() > 1000 * bound


def test_joined_values_are_those_of_the_file():
    weights = [nvfp4(name, divides=True) for name in ROWS]
    joined = join_weights(weights).weight
    assert joined.global_scale.shape == joined.global_divisor.shape == (72,)
    want = np.concatenate([one.weight.dequantize() for one in weights])
    np.testing.assert_array_equal(joined.dequantize(), want)


def test_a_layer_without_a_bias_gets_zeros():
    weights = {name: nvfp4(name) for name in ROWS}
    bias = jnp.arange(8.0)
    weights["k"] = dataclasses.replace(weights["k"], bias=bias)
    joined = join_weights(list(weights.values()))
    np.testing.assert_array_equal(joined.bias, np.r_[np.zeros(40), bias, np.zeros(24)])
    np.testing.assert_array_equal(layer(weights)(X), apart(weights))


@pytest.mark.parametrize(
    ("formats", "how", "names"),
    [
        ((nvfp4, nvfp4, dense), {}, ("q_k", "v")),
        ((nvfp4, dense, nvfp4), {}, ("q", "k", "v")),
        ((dense, fp8, fp8), {}, ("q", "k_v")),
        ("w4a4", {}, ("q_k_v",)),
        ("w4a4", {"scheme": "w4a4_unit_scale"}, ("q_k_v",)),
        ("w4a4", {"scheme": "w4a4_token_scale"}, ("q_k_v",)),
        ("w4a4", {"scheme": "checkpoint"}, ("q", "k", "v")),
        ("w4a4", {"target": BLACKWELL}, ("q", "k", "v")),
        ("fp8", {}, ("q_k_v",)),
        ("fp8", {"scheme": "checkpoint"}, ("q", "k", "v")),
    ],
)
def test_what_is_joined(formats, how, names):
    """Calibrated input scales belong to one layer each, so that layers that use them are alone."""
    declared = {"w4a4": Scheme.W4A4, "fp8": FP8ActivationScaling.STATIC}
    if isinstance(formats, str):
        make = nvfp4 if formats == "w4a4" else fp8
        weights = {name: make(name, declared=declared[formats]) for name in ROWS}
    else:
        weights = {name: make(name) for name, make in zip(ROWS, formats, strict=True)}
    how = Settings(**({"target": CPU} | how))
    assert tuple("_".join(run) for run in find_runs(weights, how)) == names


def test_shapes_alone_decide():
    """A model is built before any weight is read."""
    weights = {name: nvfp4(name) for name in ROWS}
    shapes = jax.eval_shape(lambda: join_weights(list(weights.values())))
    assert isinstance(shapes.weight, NVFP4Tensor)
    assert shapes.weight.global_scale.shape == (72,)
