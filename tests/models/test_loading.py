"""Test what `load_model` and `load_moe` read, against the tools that wrote the checkpoints."""

import json
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import (
    CHECKPOINTS,
    EXAMPLE,
    RUNS,
    copy_with_config,
    reference_facts,
    reference_tensors,
)
from support.files.unquantized import SMALL
from support.models.architecture import KERNELS, relative, run

from jax_nvfp4_moe import CheckpointError, Scheme, Target, explain, load_model, load_moe
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.checkpoint.opening import open_checkpoint
from jax_nvfp4_moe.checkpoint.safetensors import Tensors
from jax_nvfp4_moe.models import deepseek_v3, qwen3_moe
from jax_nvfp4_moe.models.config import Fields, read_rope
from jax_nvfp4_moe.models.loading import ARCHITECTURES, abstract_model, find_architecture
from jax_nvfp4_moe.nn.variables import NVFP4Param

QWEN = CHECKPOINTS / "qwen3moe-modelopt-w4a16"
DEEPSEEK = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
EXACT = {"dtype": jnp.float32, "backend": "reference"}
run_block = jax.jit(
    lambda moe, x, given, ids, weights: (moe.route(x), moe.experts(given, ids, weights), moe(x))
)


def layers_of(tensors):
    return sorted({int(name.split(".")[1]) for name in tensors if name.endswith("moe.input")})


@pytest.mark.parametrize("name", ["tiny-w4a16", "tiny-w4a4"])
def test_each_block_of_the_example_is_exact(name):
    """The bound 1e-5 is from the checkpoints' README. Unrounded activations are off by 0.17."""
    folder, reference, prefix, scheme = RUNS[name]
    tensors = reference_tensors(reference or folder, prefix)
    for layer in layers_of(tensors):
        given = {n.split(".moe.")[1]: v for n, v in tensors.items() if f"s.{layer}.moe." in n}
        moe = load_moe(folder, layer, scheme=scheme, **EXACT)
        k = given["topk_indices"].shape[-1]
        there, their_weights = (given[n].reshape(-1, k) for n in ("topk_indices", "topk_weights"))
        shape = (*given["experts_input"].shape[:-1], k)
        routes, routed, block = run_block(
            moe,
            given["input"],
            given["experts_input"],
            there.astype(np.int32).reshape(shape),
            their_weights.reshape(shape),
        )
        ids, weights = (np.asarray(x).reshape(-1, k) for x in routes)
        order, their_order = np.argsort(ids, axis=-1), np.argsort(there, axis=-1)
        np.testing.assert_array_equal(
            np.take_along_axis(ids, order, -1), np.take_along_axis(there, their_order, -1)
        )
        found = np.take_along_axis(weights, order, -1)
        assert relative(found, np.take_along_axis(their_weights, their_order, -1)) < 1e-5
        assert relative(routed, given["experts_output"]) < 1e-5
        assert relative(block, given["output"]) < 1e-5


def test_the_bound_of_blocks_catches_unrounded_activations():
    folder = CHECKPOINTS / "qwen3moe-modelopt-w4a4"
    tensors = reference_tensors(folder)
    moe = load_moe(folder, 0, scheme="w4a16", **EXACT)
    y = jax.jit(lambda moe, x: moe(x))(moe, tensors["layers.0.moe.input"])
    assert relative(y, tensors["layers.0.moe.output"]) > 1e-2


def noise(folder):
    """Return how far the tool's own logits move when its embeddings move by a relative 1e-6."""
    return reference_facts(folder)["sensitivity_to_1e6_noise"]["max_abs_logit_change"]


def typical_error(logits, expected):
    """Return the median token's worst error: in w4a4, a flipped rounding can move one token far."""
    return np.median(np.abs(np.asarray(logits, np.float64) - expected).max(axis=-1))


def test_the_bound_of_logits_catches_a_wrong_rotation(tmp_path):
    folder = copy_with_config(DEEPSEEK, tmp_path / "m", rope_interleave=False)
    tensors = reference_tensors(DEEPSEEK)
    logits = run(load_model(folder, **KERNELS), tensors["input_ids"].astype(np.int32))
    assert typical_error(logits, tensors["logits"]) > 100 * noise(DEEPSEEK)


def test_frozen_weights_are_no_params():
    model = load_model(EXAMPLE)
    params = nnx.state(model, nnx.Param)
    assert not any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(params))
    quantized = jax.tree.leaves(nnx.state(model, NVFP4Param))
    assert sum(leaf.dtype == jnp.uint8 for leaf in quantized) == 5 * (2 + 2)


def test_load_moe_reads_its_own_layer_alone(monkeypatch):
    read = set()
    for method in ("read", "read_bytes"):
        original = getattr(Tensors, method)

        def recorded(self, name, *rest, original=original):
            read.add(name)
            return original(self, name, *rest)

        monkeypatch.setattr(Tensors, method, recorded)
    load_moe(DEEPSEEK, 2, **EXACT)
    assert read
    assert all(name.startswith("model.layers.2.mlp.") for name in read)


@pytest.mark.parametrize(("folder", "layer"), [(DEEPSEEK, 0), (DEEPSEEK, 3), (QWEN, -1)])
def test_load_moe_names_a_layer_without_experts(folder, layer):
    with pytest.raises(ValueError, match=f"layer: expected .* got {layer}"):
        load_moe(folder, layer)


def test_a_relabelled_checkpoint_is_weight_only(tmp_path):
    config = json.loads((EXAMPLE / "config.json").read_text())
    section = config["quantization_config"] | {"quant_algo": "W4A16_NVFP4"}
    folder = copy_with_config(EXAMPLE, tmp_path / "m", quantization_config=section)
    (folder / "hf_quant_config.json").unlink()
    moe = load_moe(folder, 1, scheme="checkpoint")
    assert moe.scheme is Scheme.W4A16
    assert not moe.experts.params.get_value().has_input_scales
    with pytest.raises(ValueError, match="w4a4 needs input scales"):
        load_moe(folder, 1, scheme="w4a4")


def test_explain_a_model_for_other_devices():
    model = abstract_model(EXAMPLE).model
    on_blackwell = explain(model, target=Target("cuda", (10, 0)))
    assert on_blackwell.scheme is Scheme.W4A4
    assert on_blackwell.backend == "moe_w4a4_sm100"
    assert len(on_blackwell.modules) == 5 * 3
    on_hopper = explain(model, target=Target("cuda", (9, 0)))
    assert (on_hopper.scheme, on_hopper.backend) == (Scheme.W4A16, "moe_w4a16_sm90")


def test_arguments_that_no_model_takes():
    with pytest.raises(ValueError, match="mesh"):
        load_model(EXAMPLE, mesh=object())
    with pytest.raises(ValueError, match=r"scheme: expected .* got 'w8a8'"):
        load_model(EXAMPLE, scheme="w8a8")
    with pytest.raises(ValueError, match=r"dtype: expected .* got 'int8'"):
        load_model(EXAMPLE, dtype="int8")
    with pytest.raises(ValueError, match=r"backend: expected one of .* got 'nothing'"):
        load_model(EXAMPLE, backend="nothing")


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (QWEN, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen3MoeForCausalLM"),
        (QWEN, {"architectures": None}, "architectures: None is not supported"),
        (QWEN, {"sliding_window": 0, "use_sliding_window": True}, "sliding_window: expected a pos"),
        (QWEN, {"partial_rotary_factor": 0.5}, "expected 1, because this architecture rotates"),
        (QWEN, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*yarn"),
        (QWEN, {"rope_parameters": {"rope_theta": "x"}}, "rope_theta: expected a finite number"),
        (QWEN, {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        (
            QWEN,
            {"num_experts_per_tok": 17},
            "num_experts_per_tok: expected at most 16 experts, got 17",
        ),
        (QWEN, {"mlp_only_layers": "1"}, "mlp_only_layers: expected a list of integers"),
        (QWEN, {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
        (DEEPSEEK, {"n_group": 5}, "cannot be chosen from 2 of 5 groups of 16"),
        (
            DEEPSEEK,
            {"first_k_dense_replace": -1},
            "first_k_dense_replace: expected an integer of 0 or more",
        ),
    ],
)
def test_configs_that_no_model_fits(tmp_path, source, changes, message):
    folder = copy_with_config(source, tmp_path / "m", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_the_language_model_inside_a_multimodal_mistral():
    """Its type decides, which is "mistral" if the text_config has none."""
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    for kind, expected in (
        ({"model_type": "ministral3"}, "Ministral3ForCausalLM"),
        ({"model_type": "mistral4"}, "Mistral4ForCausalLM"),
        ({"model_type": "mistral"}, "MistralForCausalLM"),
        ({}, "MistralForCausalLM"),
    ):
        found = find_architecture(merge_text_config({**outer, "text_config": kind}))
        assert found is ARCHITECTURES[expected]
    with pytest.raises(CheckpointError, match=r"text_config\.model_type: 'llama' is not supported"):
        find_architecture(merge_text_config({**outer, "text_config": {"model_type": "llama"}}))


def test_all_problems_of_a_config_at_once(tmp_path):
    folder = copy_with_config(QWEN, tmp_path / "m", hidden_size=0, vocab_size=None, head_dim="64")
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert len(caught.value.problems) == 3


def test_spellings_of_one_config():
    config = json.loads((QWEN / "config.json").read_text())
    older = {n: v for n, v in config.items() if n not in ("num_local_experts", "rope_parameters")}
    older |= {"num_experts": 16, "rope_theta": 10000.0, "rope_scaling": None}
    assert qwen3_moe.read_config(older) == qwen3_moe.read_config(config)
    assert qwen3_moe.read_config(config | {"sliding_window": 4096}).num_layers == 2


def test_dense_layers_of_qwen():
    config = json.loads((QWEN / "config.json").read_text())
    read = qwen3_moe.read_config(config | {"num_hidden_layers": 6, "decoder_sparse_step": 2})
    assert read.dense_layers == {0, 2, 4}
    read = qwen3_moe.read_config(config | {"mlp_only_layers": [1]})
    assert read.dense_layers == {1}


def test_kimi_k2_is_a_deepseek_with_one_group():
    config = json.loads((DEEPSEEK / "config.json").read_text())
    config |= {"n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    router = deepseek_v3.read_config(config).router
    assert (router.num_groups, router.groups_kept, router.score) == (1, 1, "sigmoid")


def test_yarn_of_deepseek_v3():
    """Of 32 pairs, the first 11 keep their frequency. From the 24th on, it is divided by 40."""
    scaling = {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    fields = Fields({})
    rope = read_rope(fields, {"rope_theta": 10000, "rope_scaling": scaling}, 64, 163840)
    fields.finish()
    plain = read_rope(fields, {"rope_theta": 10000}, 64, 163840)
    ratio = np.array(plain.frequencies) / np.array(rope.frequencies)
    eps = 4 * np.finfo(np.float32).eps
    np.testing.assert_allclose(ratio[:11], 1, rtol=eps)
    np.testing.assert_allclose(ratio[23:], 40, rtol=eps)
    assert (np.diff(ratio[10:24]) > 0).all()
    assert rope.scale == 1.0
    assert rope.attention_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    without = read_rope(fields, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 64, 4096)
    assert without.scale == pytest.approx(0.1 * math.log(4) + 1)
    other = read_rope(fields, {"rope_scaling": scaling | {"mscale_all_dim": 0.5}}, 64, 163840)
    assert other.scale == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
    assert other.attention_scale == pytest.approx((0.05 * math.log(40) + 1) ** 2)
    given = read_rope(fields, {"rope_scaling": scaling | {"attention_factor": 0.8}}, 64, 163840)
    assert given.scale == 0.8
    fields.finish()


def test_the_rotation_of_llama_3():
    """The formulas of `modeling_rope_utils` of transformers, by wavelengths. Some are blended."""
    factor, low, high, original = 8.0, 1.0, 4.0, 8192
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low}
    scaling |= {"high_freq_factor": high, "original_max_position_embeddings": original}
    fields = Fields({})
    rope = read_rope(fields, {"rope_theta": 5e5, "rope_scaling": scaling}, 128, 131072)
    fields.finish()
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    wavelengths = 2 * math.pi / plain
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    kept, slowed = wavelengths < original / high, wavelengths > original / low
    assert all(some.any() for some in (kept, slowed, ~(kept | slowed)))
    expected = np.where(kept, plain, np.where(slowed, plain / factor, blended))
    np.testing.assert_allclose(rope.frequencies, expected, rtol=2e-6)


def test_a_scheme_that_nothing_can_follow_is_said(caplog):
    with caplog.at_level(logging.WARNING, logger="jax_nvfp4_moe"):
        load_model(SMALL / "source")
        load_model(QWEN, scheme="w4a16")
        assert "has no effect" not in caplog.text
        load_model(SMALL / "source", scheme="w4a16")
    assert (
        "scheme w4a16 has no effect on this checkpoint, which has no NVFP4 weights" in caplog.text
    )


def test_wrong_values_are_those_of_the_first_part_that_has_any(tmp_path):
    """The next part is read ahead, and its values are reported only if its turn comes."""
    folder = copy_with_config(QWEN, tmp_path / "m")
    names = [f"model.layers.{layer}.self_attn.q_proj.weight_scale" for layer in (0, 1)]
    with open_checkpoint(folder) as checkpoint:
        infos = [checkpoint.tensors.info(name) for name in names]
    for info in infos:
        with (folder / info.file).open("r+b") as stream:
            stream.seek(info.start)
            stream.write(b"\x7f")
    for _ in range(5):
        with pytest.raises(CheckpointError, match=r"layers\.0.*block scales are NaN") as caught:
            load_model(folder)
        assert "layers.1" not in str(caught.value)
