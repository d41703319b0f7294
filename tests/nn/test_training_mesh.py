"""Over a mesh each parameter takes the step of one device; `train_on_mesh.py` finds gradients."""

import functools

import pytest
from host_devices import start

# Sums of float32 in another order, through a few layers and back.
BOUND = 1e-5
# A parameter of each model that shards hold in a way of its own.
KINDS = {"olmoe": "out.bias", "deepseek_v3": "kv_up.keys", "qwen3_next": "attention.norm"}


@functools.cache
def figures(name):
    """Return the figures of one model, which take a process of their own."""
    return start("train_on_mesh.py", [name])[name]


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_one_device(name):
    """Biases of outputs count once; what shards share has the gradient of all of them."""
    errors = figures(name)["errors"]
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= BOUND, (worst, errors[worst])
    assert any(KINDS[name] in path for path in errors)


@pytest.mark.parametrize("name", KINDS)
def test_copies_stay_equal(name):
    """Key heads that two shards hold have one gradient, to the bit."""
    assert figures(name)["copies"] == 0.0
