"""Run experts of the given W4A4 checkpoints on each kernel, on the inputs that the tools saw."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cpu_calls, cuda_calls
from support.files.given import RUNS, reference_tensors
from support.kernels import float64_layer
from support.kernels.float64_layer import Layer, Options
from support.kernels.kernel_cases import BF16, NEXT_CODES, xla

from jax_nvfp4_moe import load_moe
from jax_nvfp4_moe.testing import assert_as_accurate_as

OPTIONS = Options(activation_scale="static")
W4A4_RUNS = [name for name in RUNS if name.endswith("w4a4")]


def on_cpu(x, layer, ids, weights):
    cpu_calls.present_isas()
    with jax.default_device(jax.devices("cpu")[0]):
        return cpu_calls.moe(x, cpu_calls.prepare(layer), ids, weights, OPTIONS)


def on_gpu(suffix):
    def run(x, layer, ids, weights):
        cuda_calls.register()
        return jax.jit(lambda *given: cuda_calls.moe(*given, OPTIONS, suffix))(
            *jax.tree.map(jnp.asarray, (x, layer, ids, weights))
        )

    return run


ON_GPU = {
    "w4a16_sm80": pytest.mark.gpu,
    "w4a16_sm90": pytest.mark.gpu,
    "w4a4_sm100": pytest.mark.fp4_sm100,
    "w4a4_sm120": pytest.mark.fp4,
}
KERNELS = [
    pytest.param(on_cpu, id="w4a16_cpu"),
    *(pytest.param(on_gpu(suffix), id=suffix, marks=mark) for suffix, mark in ON_GPU.items()),
]


def to_layer(params) -> Layer:
    """Return canonical `params` as the operands of a kernel."""
    none = np.zeros((0, 0), np.float32)
    experts = params.num_experts

    def scales(weight, parts):
        scale = np.asarray(weight.global_scale).reshape(experts, -1)
        return np.broadcast_to(scale, (experts, parts)).copy()

    gate_up, down = params.gate_up, params.down
    return Layer(
        *map(np.asarray, (gate_up.packed, gate_up.block_scale)),
        scales(gate_up, 2),
        np.asarray(params.gate_up_input_scale),
        none,
        *map(np.asarray, (down.packed, down.block_scale)),
        scales(down, 1),
        np.asarray(params.down_input_scale),
        none,
    )


@functools.cache
def tensors_of(name):
    folder, reference, prefix, _ = RUNS[name]
    return reference_tensors(reference or folder, prefix)


def operands_of(name, layer):
    """Return x in bfloat16, the layer, expert_ids and expert_weights of a run's MoE layer."""
    folder, _, _, scheme = RUNS[name]
    tensors = tensors_of(name)
    given = {n.split(".moe.")[1]: v for n, v in tensors.items() if f"s.{layer}.moe." in n}
    moe = load_moe(folder, layer, scheme=scheme, dtype=jnp.float32, backend="reference")
    ids = given["topk_indices"].reshape(-1, given["topk_indices"].shape[-1]).astype(np.int32)
    weights = given["topk_weights"].reshape(ids.shape).astype(np.float32)
    x = given["experts_input"]
    return (
        x.reshape(-1, x.shape[-1]).astype(BF16),
        to_layer(moe.experts.params.get_value()),
        ids,
        weights,
    )


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize("name", W4A4_RUNS)
def test_experts_are_as_accurate_as_plain_xla(name, run):
    layers = {int(n.split(".")[1]) for n in tensors_of(name) if n.endswith("moe.input")}
    for layer in sorted(layers):
        operands = operands_of(name, layer)
        truth = float64_layer.moe(*operands, OPTIONS)
        yardstick = float64_layer.moe(*operands, OPTIONS, matmul=xla(BF16)).astype(BF16)
        assert_as_accurate_as(run(*operands), yardstick, truth, tolerated=NEXT_CODES)


def test_the_bound_catches_activations_that_are_not_rounded():
    operands = operands_of("qwen3-w4a4", 0)
    truth = float64_layer.moe(*operands, OPTIONS)
    yardstick = float64_layer.moe(*operands, OPTIONS, matmul=xla(BF16)).astype(BF16)
    plain = float64_layer.moe(*operands, Options()).astype(BF16)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(plain, yardstick, truth, tolerated=NEXT_CODES)
