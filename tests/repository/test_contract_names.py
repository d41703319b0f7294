"""Test the public names and their arguments, because other code calls them as they are here."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_nvfp4_moe as nvfp4

pytestmark = pytest.mark.every_case  # each name is another promise

SIGNATURES = {
    "load_model": "path, *, scheme=None, dtype=bfloat16, backend=None, mesh=None, "
    "axis_names=None, dispatch='psum', draft=None, draft_head=None",
    "load_moe": "path, layer, *, scheme=None, dtype=bfloat16, backend=None, mesh=None, "
    "axis_names=None, dispatch='psum'",
    "generate": "model, input_ids, *, max_new_tokens, lengths=None, temperature=0.0, top_k=None, "
    "top_p=1.0, stop_ids=None, key=None, draft=None, draft_tokens='auto', prefill_chunk=None, "
    "stats=False",
    "stream": "model, input_ids, *, max_new_tokens, lengths=None, temperature=0.0, top_k=None, "
    "top_p=1.0, stop_ids=None, key=None, draft=None, draft_tokens='auto', prefill_chunk=None",
    "save": "folder, module, *, overwrite=False",
    "restore": "folder, like",
    "add_lora": "model, rank, *, targets='mixers', alpha=None, dtype=float32, "
    "merge_aware=False, rngs",
    "save_lora": "model, folder",
    "load_lora": "model, folder, *, dtype=float32, merge_aware=False",
    "merge_lora": "model",
    "merge_model": "source, adapters, destination, *, shard_bytes=5000000000",
    "load_tokenizer": "folder",
    "quantize_experts": "gate, up, down, *, algorithm='max', interleaved=False, gate_up_bias=None, "
    "down_bias=None, gate_up_input_scale=None, down_input_scale=None",
    "ragged_dot": "lhs, rhs, group_sizes, *, ragged_dot_dimension_numbers=None, precision=None, "
    "preferred_element_type=None, group_offset=None, activation=None, out_sharding=None, "
    "manual_axis_type=None, zero_initialize=False, fuse_gateup_activation=None, scheme=None, "
    "target=None, backend=None",
    "calibrate": "module, batches, *, scheme=None",
    "NVFP4Linear.from_dense": "kernel, *, algorithm='max', options",
    "NVFP4MoE.from_dense": "gate, up, down, router_kernel, options",
    "NVFP4Experts.from_dense": "gate, up, down, options",
    "quantize": "x, global_scale=None",
    "prepare": "params, *, scheme=None, target=None, backend=None, dtype=bfloat16, top_k=1",
    "ops.grouped_gemm": "x, weight, group_sizes, *, input_scale=None, scheme=None, target=None, "
    "backend=None",
    "ops.linear": "x, weight, *, input_scale=None, bias=None, scheme=None, target=None, "
    "backend=None, plan=None",
    "ops.quantize_nvfp4": "x, *, global_scale=None, scale_layout='linear', target=None, "
    "backend=None",
    "ops.activate": "gate_up, activation='silu', *, target=None, backend=None",
    "ops.add_gated": "x, gate, z, *, target=None, backend=None",
    "ops.add_linear_gated": "x, gate_input, gate_weight, z, *, target=None, backend=None",
    "ops.gate_heads": "x, gates, *, target=None, backend=None",
    "ops.chain_calls": "function",
    "ops.add_rms_norm": "x, added, weight, *, eps, target=None, backend=None",
    "ops.prepare_heads": "qkv, positions, keys, values, *, q_weight=None, k_weight=None, "
    "eps=1e-06, rope=None, rotates_first=False, gated=False, k_scale=None, v_scale=None, "
    "multiply_by_reciprocal=False, target=None, backend=None",
    "ops.prepare_latents": "down, positions, cache, *, kv_weight, q_weight=None, eps=1e-06, "
    "rope=None, interleaved=False, target=None, backend=None",
    "ops.causal_convolution": "x, positions, inputs, *, weight, bias=None, widths=None, first=0, "
    "heads=1, stride=None, target=None, backend=None",
    "ops.gated_delta_rule": "q, k, v, g, beta, state, *, lengths=None, normalize=False, "
    "dtype=bfloat16, target=None, backend=None",
    "ops.gated_delta_step": "projected, positions, inputs, state, *, conv_weight, A_log, dt_bias, "
    "norm, rates=None, interleaved=False, eps=1e-06, kept=None, target=None, backend=None",
    "ops.kimi_delta_step": "projected, decays, gates, positions, inputs, state, *, conv_weight, "
    "A_log, dt_bias, norm, rates=None, lower_bound=None, eps=1e-05, kept=None, target=None, "
    "backend=None",
    "ops.mamba2_scan": "x, dt, a, B, C, D, state, *, lengths=None, dtype=bfloat16, target=None, "
    "backend=None",
    "ops.mamba2_step": "projected, positions, inputs, state, *, conv_weight, conv_bias=None, "
    "A_log, dt_bias, D, norm, activation='silu_no_mul', step_limits=(0.0, inf), eps=1e-05, "
    "kept=None, target=None, backend=None",
    "ops.route": "router, logits, bias=None, *, target=None, backend=None",
    "testing.random_moe_params": "key, *, num_experts, hidden, intermediate, gated=True",
    "NVFP4Tensor.from_packed": "packed, block_scale, global_scale",
    "NVFP4Tensor.from_qarray": "array, axis=-2",
    "Target": "platform, compute_capability=None",
}


def find(name):
    value = nvfp4
    for part in name.split("."):
        value = getattr(value, part)
    return value


def spelled(parameter):
    if parameter.default is parameter.empty:
        return parameter.name
    default = parameter.default
    dtype = default in (jnp.bfloat16, jnp.float32)
    return f"{parameter.name}={jnp.dtype(default).name if dtype else repr(default)}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(find(name)).parameters.values()
    words = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(spelled(parameter))
    assert ", ".join(words) == SIGNATURES[name]


def test_the_op_of_the_experts():
    parameters = inspect.signature(nvfp4.ops.moe_mlp).parameters
    words = list(parameters)
    assert words[:4] == ["x", "params", "expert_ids", "expert_weights"]
    assert words[4:8] == ["scheme", "target", "backend", "activation"]
    assert parameters["activation"].default == "silu"
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[4:])


def test_errors_are_value_errors():
    assert issubclass(nvfp4.CheckpointError, ValueError)
    assert issubclass(nvfp4.NoBackendError, ValueError)


def test_schemes_are_strings():
    assert [str(s) for s in nvfp4.Scheme] == [
        "w4a16",
        "w4a4",
        "w4a4_unit_scale",
        "w4a4_token_scale",
    ]


def test_attributes_of_the_weights():
    params = nvfp4.testing.random_moe_params(
        jax.random.key(0), num_experts=2, hidden=32, intermediate=16
    )
    assert isinstance(params, nvfp4.MoEParams)
    tensor = params.gate_up
    assert isinstance(tensor, nvfp4.NVFP4Tensor)
    assert (
        tensor.shape == tensor.codes.shape == tensor.dequantize(jnp.bfloat16).shape == (2, 32, 32)
    )
    assert (tensor.packed.shape, tensor.packed.dtype) == ((2, 32, 16), jnp.uint8)
    assert (tensor.block_scale.shape, tensor.block_scale.dtype) == ((2, 32, 2), jnp.float8_e4m3fn)
    assert tensor.codes.dtype == jnp.float4_e2m1fn
    assert tensor.global_scale.dtype == jnp.float32
    assert tensor.layout == "canonical"
    assert tensor.nbytes == 2 * (32 * 16 + 32 * 2) + tensor.global_scale.nbytes
    for name in ("down_input_scale", "gate_up_input_scale"):
        assert getattr(params, name).shape == (2,)
    assert params.gate_up_bias is params.down_bias is None


def test_what_explain_returns():
    problem = nvfp4.Problem(
        "moe_mlp", nvfp4.Scheme.W4A16, nvfp4.Target(platform="cuda", compute_capability=(9, 0))
    )
    choice = nvfp4.explain(problem)
    assert isinstance(choice, nvfp4.Choice)
    assert (choice.scheme, choice.backend) == ("w4a16", "moe_w4a16_sm90")
    assert "moe_w4a4_sm100" in choice.reasons
    assert isinstance(nvfp4.Target.current(), nvfp4.Target)


def test_modules_are_flax_modules():
    assert issubclass(nvfp4.NVFP4Experts, nnx.Module)
    assert issubclass(nvfp4.NVFP4Param, nnx.Variable)
    for module in (nvfp4.NVFP4MoE, nvfp4.NVFP4Linear):
        assert issubclass(module, nnx.Module)
        assert inspect.signature(module.__init__).parameters["rngs"].default is None
    block = nvfp4.NVFP4MoE(2, 32, 16, top_k=1, rngs=nnx.Rngs(0))
    for part in (block, block.route, block.experts, block.token_router, block.router_logits):
        assert callable(part)
    assert isinstance(block.experts, nvfp4.NVFP4Experts)
    assert isinstance(block.experts.params, nvfp4.NVFP4Param)
