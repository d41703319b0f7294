"""Test the example that runs a layer of MaxText on NVFP4 kernels, with the real MaxText."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.filterwarnings("ignore"),  # of MaxText and what it imports
]
if importlib.util.find_spec("maxtext") and importlib.util.find_spec("qwix"):
    import qwix

    from jax_nvfp4_moe.examples import swap_maxtext


def call(layer, x):
    return layer(x)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ici_tensor_parallelism": 2},
        {"ici_expert_parallelism": 2, "use_ring_of_experts": True},
    ],
    ids=["one device", "tensor", "expert"],
)
def test_the_layer_computes_what_it_does_with_dequantized_weights(options, monkeypatch):
    devices = jax.devices()[: 1 + bool(options)]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    layer, mesh = swap_maxtext.make_layer(**options)
    assert mesh.size == len(devices)
    x = jax.random.normal(jax.random.key(0), (2, 8, 64))
    packed, dense = swap_maxtext.swap(layer), nnx.clone(layer)
    for name in swap_maxtext.KERNELS:
        getattr(dense, name)[...] = qwix.dequantize(getattr(packed, name)[...])
    with jax.set_mesh(mesh):
        expected = nnx.jit(call)(dense, x)
        before = nnx.jit(call)(layer, x)
        with swap_maxtext.use_our_kernels():
            actual = nnx.jit(call)(packed, x)
            graph, state = nnx.split(packed)
            lowered = jax.jit(lambda state, x: call(nnx.merge(graph, state), x)).lower(state, x)
    kernels = re.findall(r"custom_call @(nvfp4_\S+?)\(", lowered.as_text())
    assert kernels == ["nvfp4_grouped_gemm_w4a16_cpu"] * 3
    # Two products, whose sums of 64 and 96 float32 numbers have another order.
    bound = 4 * (64 + 96) * 2**-24 * float(jnp.abs(expected).max())
    assert float(jnp.abs(actual - expected).max()) <= bound
    assert float(jnp.abs(before - expected).max()) > 100 * bound  # quantization changes the result


def test_the_example_runs(capsys, monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    swap_maxtext.main()
    error = float(capsys.readouterr().out.split()[-1])
    assert 0.01 < error < 0.3
