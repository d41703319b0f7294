"""Test checkpoints with reference tensors: blocks, caches and sampling, by one rule.

Each folder of ``tests/checkpoints`` that has a model and its reference is a case. `FAULTS` and
`ROUTER_FAULTS` list wrong values for fields that the architectures read from the config. The bounds
must catch them. test_default_dtype.py compares the logits of each folder.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, WITH_EXPERTS, copy_with_config, reference_tensors
from support.models.architecture import EACH_MIXER, EXACT, LONG_TEXTS, load_case, relative, run

from jax_nvfp4_moe import generate, load_moe
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.inference.prefill import empty_cache
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedTokens
from jax_nvfp4_moe.nn.intermediates import capture

# Bound of one block, from the README of the given checkpoints: float32 sums in another order.
BLOCK_BOUND = 1e-5
# The rotary embedding of ministral3.
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 6,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
# Each entry has a folder and the fields of its config that are changed. `ROUTER_FAULTS` change only
# how a router chooses and weighs experts.
ROUTER_FAULTS = [
    ("olmoe-bias-modelopt-w4a16", {"norm_topk_prob": False}),
    ("glm4_moe-groups-modelopt-w4a16", {"topk_group": 3}),
    ("nemotron_h-latent-modelopt-w4a16", {"routed_scaling_factor": 2.4}),
    ("qwen3_next-modelopt-w4a16", {"norm_topk_prob": False}),
    ("qwen2_moe-modelopt-w4a16", {"norm_topk_prob": True}),
    ("mistral4-modelopt-w4a16", {"topk_group": 3}),
    ("exaone_moe-modelopt-w4a16", {"topk_group": 2}),
    ("lfm2_moe-modelopt-w4a16", {"routed_scaling_factor": 1.4}),
    ("kimi_linear-modelopt-w4a16", {"routed_scaling_factor": 2.5}),
    ("bailing_hybrid-modelopt-w4a16", {"topk_group": 3}),
    ("minimax_m3-modelopt-w4a16", {"routed_scaling_factor": 2.01}),
    ("step3p7-modelopt-w4a16", {"moe_router_scaling_factor": 3.01}),
    ("laguna-modelopt-w4a16", {"moe_router_logit_softcapping": 2.0}),
    ("laguna-modelopt-w4a16", {"moe_routed_scaling_factor": 2.51}),
    ("cohere2_moe-modelopt-w4a16", {"expert_selection_fn": "softmax"}),
    ("cohere2_moe-modelopt-w4a16", {"norm_topk_prob": False}),
    ("mimo_v2_flash-modelopt-w4a16", {"routed_scaling_factor": 1.01}),
    ("glm5_next-modelopt-w4a16", {"routed_scaling_factor": 1.51}),
    ("qwen4_exp-modelopt-w4a16", {"norm_topk_prob": False}),
    ("deepseek_v4-modelopt-w4a16", {"scoring_func": "sigmoid"}),
    ("afmoe-modelopt-w4a16", {"route_scale": 2.81}),
    ("hy_v3-modelopt-w4a16", {"router_scaling_factor": None}),
    ("solar_open-modelopt-w4a16", {"norm_topk_prob": True}),
    ("solar_open-modelopt-w4a16", {"topk_group": 4}),
    ("dots1-modelopt-w4a16", {"norm_topk_prob": False}),
    ("dots1-modelopt-w4a16", {"topk_group": 4}),
    ("glm4v_moe-modelopt-w4a16", {"routed_scaling_factor": 1.51}),
    ("phimoe-modelopt-w4a16", {"router_jitter_noise": None}),
    ("qwen3_omni_moe-modelopt-w4a16", {"norm_topk_prob": True}),
    ("deepseekv3-modelopt-w4a4", {"norm_topk_prob": False}),
    ("qwen3_moe-modelopt-mixed-w4a16-kv8", {"norm_topk_prob": False}),
    ("qwen3_moe-modelopt-w4a4-faults", {"norm_topk_prob": False}),
    ("qwen3moe-ct-w4a4", {"norm_topk_prob": False}),
]
LONGROPE = json.loads((CHECKPOINTS / "phimoe-modelopt-w4a16/config.json").read_text())[
    "rope_parameters"
]
FAULTS = [
    ("mixtral-window-modelopt-w4a16", {"sliding_window": 7}),
    ("llama-modelopt-w4a16", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    ("llama-modelopt-w4a4", {"rms_norm_eps": 1e-3}),
    ("llama-ct-w4a16", {"rms_norm_eps": 1e-3}),
    ("mistral-modelopt-w4a16", {"sliding_window": 7}),
    ("qwen2-modelopt-w4a16", {"max_window_layers": 2, "layer_types": None}),
    ("qwen3-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    (
        "qwen3_5-modelopt-w4a16",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    ("qwen3_5-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("gemma3-modelopt-w4a16", {"sliding_window": 7}),
    ("gemma3-modelopt-w4a16", {"query_pre_attn_scalar": 21}),
    ("gemma3-modelopt-w4a16", {"rope_parameters": None, "rope_theta": 5e3}),
    ("gemma4_dense-modelopt-w4a16", {"final_logit_softcapping": 20.1}),
    ("gemma4_dense-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("gemma4_edge-modelopt-w4a16", {"sliding_window": 7}),
    ("gemma4_edge-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("nemotron_h_dense-modelopt-w4a16", {"time_step_min": 0.05}),
    ("nemotron_h_dense-modelopt-w4a16", {"layer_norm_epsilon": 1e-3}),
    ("exaone4-modelopt-w4a16", {"sliding_window": None, "layer_types": None}),
    ("exaone4-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("smollm3-modelopt-w4a16", {"no_rope_layers": [1, 1]}),
    ("smollm3-modelopt-w4a16", {"sliding_window": 7}),
    ("ministral3-modelopt-w4a16", {"sliding_window": 9}),
    (
        "ministral3-modelopt-w4a16",
        {"rope_parameters": MINISTRAL | {"llama_4_scaling_beta": 0.51}},
    ),
    (
        "ministral3-modelopt-w4a16",
        {"rope_parameters": MINISTRAL | {"original_max_position_embeddings": 7, "factor": 55.0}},
    ),
    ("phi3-modelopt-w4a16", {"sliding_window": 9}),
    ("phi3-modelopt-w4a16", {"original_max_position_embeddings": 16}),
    ("phi3-modelopt-w4a16", {"original_max_position_embeddings": 9}),
    ("granite-modelopt-w4a16", {"attention_multiplier": 0.21}),
    ("granite-modelopt-w4a16", {"residual_multiplier": 0.71}),
    ("granite-modelopt-w4a16", {"embedding_multiplier": 3.1}),
    ("granite-modelopt-w4a16", {"logits_scaling": 2.1}),
    ("granitehybrid-modelopt-w4a16", {"residual_multiplier": 0.71}),
    ("granitehybrid-modelopt-w4a16", {"position_embedding_type": "rope"}),
    ("olmo2-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("olmo3-modelopt-w4a16", {"sliding_window": 7}),
    ("olmo3-modelopt-w4a16", {"layer_types": ["full_attention", "sliding_attention"]}),
    (
        "olmo3-modelopt-w4a16",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    ("seed_oss-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("apertus-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("apertus-modelopt-w4a16", {"rope_parameters": {"rope_theta": 10000.0}}),
    ("olmoe-bias-modelopt-w4a16", {"clip_qkv": 1.1}),
    (
        "glm4_moe-groups-modelopt-w4a16",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    ("glm4_moe_lite-modelopt-w4a16", {"rms_norm_eps": 1e-6}),
    ("deepseek_v3-direct-modelopt-w4a16", {"rope_interleave": True}),
    ("kimi_k2-modelopt-w4a16", {"rope_scaling": None}),
    (
        "minimax_m2-modelopt-w4a16",
        {"rope_parameters": None, "partial_rotary_factor": None, "rotary_dim": 16},
    ),
    ("nemotron_h-modelopt-w4a16", {"time_step_min": 0.05}),
    ("nemotron_h-modelopt-w4a16", {"layer_norm_epsilon": 1e-3}),
    ("qwen3_moe-window-modelopt-w4a16", {"use_sliding_window": False}),
    (
        "qwen3_next-modelopt-w4a16",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    ("qwen3_next-options-modelopt-w4a16", {"rms_norm_eps": 1e-6}),
    (
        "qwen3_next-options-modelopt-w4a16",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    ("gpt_oss-mxfp4", {"sliding_window": 7}),
    ("qwen2_moe-modelopt-w4a16", {"sliding_window": 7}),
    ("qwen2_moe-modelopt-w4a16", {"layer_types": ["full_attention"] * 3}),
    ("ernie4_5_moe-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("mistral4-modelopt-w4a16", {"rope_interleave": False}),
    ("deepseek_v32-modelopt-w4a16", {"index_topk": 7}),
    ("deepseek_v32-modelopt-w4a16", {"indexer_rope_interleave": True}),
    ("glm_moe_dsa-modelopt-w4a16", {"indexer_rope_interleave": False}),
    ("granitemoe-modelopt-w4a16", {"attention_multiplier": 0.25}),
    ("granitemoeshared-modelopt-w4a16", {"residual_multiplier": 0.71}),
    ("granitemoeshared-modelopt-w4a16", {"embedding_multiplier": 3.1}),
    ("granitemoehybrid-modelopt-w4a16", {"logits_scaling": 2.1}),
    ("granitemoehybrid-modelopt-w4a16", {"time_step_limit": [0.0, 0.9]}),
    ("granitemoehybrid-modelopt-w4a16", {"position_embedding_type": "rope"}),
    (
        "hunyuan_v1_moe-modelopt-w4a16",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 900.0}},
    ),
    ("exaone_moe-modelopt-w4a16", {"sliding_window": 7}),
    ("lfm2_moe-modelopt-w4a16", {"norm_eps": 1e-3}),
    ("kimi_linear-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("bailing_hybrid-modelopt-w4a16", {"kda_lower_bound": -5.1}),
    ("gemma4-modelopt-w4a16", {"sliding_window": 7}),
    ("gemma4-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("gemma4-modelopt-w4a16", {"final_logit_softcapping": 20.1}),
    (
        "gemma4-modelopt-w4a16",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 5000.0},
                "full_attention": {"rope_theta": 20000.0, "partial_rotary_factor": 0.25},
            }
        },
    ),
    ("minimax_m3-modelopt-w4a16", {"index_topk_blocks": 2}),
    ("minimax_m3-modelopt-w4a16", {"swiglu_alpha": 1.51}),
    ("step3p7-modelopt-w4a16", {"sliding_window": 7}),
    ("step3p7-modelopt-w4a16", {"swiglu_limits": [0.0, 0.0, 0.0]}),
    ("step3p7-modelopt-w4a16", {"swiglu_limits_shared": [0.3, 0.0, 0.0]}),
    ("step3p7-modelopt-w4a16", {"swiglu_limits_shared": [0.0, 0.0, 0.7]}),
    ("step3p7-modelopt-w4a16", {"query_pre_attn_scalar": 17}),
    ("afmoe-modelopt-w4a16", {"sliding_window": 7}),
    ("afmoe-modelopt-w4a16", {"mup_enabled": False}),
    ("afmoe-modelopt-w4a16", {"layer_types": ["sliding_attention"] * 2}),
    ("afmoe-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("hy_v3-modelopt-w4a16", {"rope_parameters": None}),
    ("hy_v3-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    (
        "solar_open-modelopt-w4a16",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    ("dots1-modelopt-w4a16", {"sliding_window": 7}),
    ("dots1-modelopt-w4a16", {"max_window_layers": 2, "layer_types": None}),
    (
        "glm4v_moe-modelopt-w4a16",
        {"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.75}},
    ),
    ("glm4v_moe-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("phimoe-modelopt-w4a16", {"sliding_window": 7}),
    ("phimoe-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("phimoe-modelopt-w4a16", {"rope_parameters": LONGROPE | {"short_mscale": 1.21}}),
    (
        "phimoe-modelopt-w4a16",
        {"rope_parameters": LONGROPE | {"short_factor": LONGROPE["long_factor"]}},
    ),
    ("qwen3_omni_moe-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("qwen3_omni_moe-modelopt-w4a16", {"rope_parameters": None}),
    ("laguna-modelopt-w4a16", {"sliding_window": 7}),
    ("laguna-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("laguna-modelopt-w4a16", {"layer_types": ["full_attention"] * 3}),
    ("cohere2_moe-modelopt-w4a16", {"sliding_window": 7}),
    ("cohere2_moe-modelopt-w4a16", {"logit_scale": 0.251}),
    ("cohere2_moe-modelopt-w4a16", {"layer_norm_eps": 1e-3}),
    ("cohere2_moe-modelopt-w4a16", {"rms_norm_eps": 1e-5}),
    ("cohere2_moe-modelopt-w4a16", {"shared_expert_combination_strategy": "sum"}),
    ("cohere2_moe-modelopt-w4a16", {"prefix_dense_sliding_window_pattern": 2}),
    ("qwen4_exp-modelopt-w4a16", {"indexer_budget": 9}),
    ("qwen4_exp-modelopt-w4a16", {"output_gate_type": "silu"}),
    ("qwen4_exp-modelopt-w4a16", {"seed": 1235}),
    ("qwen4_exp-modelopt-w4a16", {"eos_token_id": 6}),
    ("qwen4_exp-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("glm5_next-modelopt-w4a16", {"index_topk": 9}),
    ("glm5_next-modelopt-w4a16", {"linear_lower_bound": -4.1}),
    ("glm5_next-modelopt-w4a16", {"swiglu_limit": 1.1}),
    ("glm5_next-modelopt-w4a16", {"hc_sinkhorn_iters": 1}),
    ("glm5_next-modelopt-w4a16", {"rms_norm_eps": 1e-3}),
    ("mimo_v2_flash-modelopt-w4a16", {"sliding_window": 7}),
    ("mimo_v2_flash-modelopt-w4a16", {"attention_value_scale": 0.61}),
    ("deepseek_v4-modelopt-w4a16", {"sliding_window": 4}),
    ("deepseek_v4-modelopt-w4a16", {"hc_sinkhorn_iters": 1}),
    # In these folders, activations are rounded to FP4 or to FP8.
    ("deepseek_v3-modelopt-mixed-w4a16-kv8", {"rope_interleave": False}),
    ("gpt_oss-ct-w4a4", {"sliding_window": 7}),
    ("phi3-ct-mixed-dense", {"sliding_window": 9}),
    ("qwen3_moe-ct-mixed", {"norm_topk_prob": False}),
    ("qwen3_moe-ct-w4a4-kv8", {"rms_norm_eps": 1e-3}),
    ("qwen3moe-modelopt-w4a4", {"rms_norm_eps": 1e-3}),
]


@jax.jit
def run_block(moe, x, tokens):
    """Return what the routed experts took and gave, and the output of the whole block."""
    with capture(moe) as seen:
        y = moe(x, tokens)
    (routed,) = (one for calls in seen.values() for one in calls if isinstance(one, RoutedTokens))
    return routed, y


run_route = jax.jit(lambda moe, x: moe.route(x))
# The programs compute 8 tokens more than a row has, of the two rows that they are given.
run_packed = jax.jit(
    lambda model, ids, lengths: model(ids, lengths=lengths, num_tokens=ids.shape[1] + 8)
)
step = jax.jit(lambda model, ids, cache, lengths: model(ids, cache, lengths=lengths))


# Folders whose mixers run `generate` elsewhere: in test_long_text.py, where mixtral-window has the
# windows of the last one, and in test_generation.py.
GENERATED = (*LONG_TEXTS, "qwen3moe-modelopt-w4a16", "qwen3_moe-window-modelopt-w4a16")
each_mixer = pytest.mark.parametrize("case", EACH_MIXER, indirect=True, scope="module")
# The negative controls run programs that the tests of this folder have compiled.
one_mixer = pytest.mark.parametrize("case", EACH_MIXER[-1:], indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request):
    return load_case(request.param)


def blocks(folder):
    """Yield each layer of the checkpoint that has experts, with its reference tensors."""
    tensors = reference_tensors(CHECKPOINTS / folder)
    for layer in sorted({int(n.split(".")[1]) for n in tensors if n.endswith("moe.input")}):
        prefix = f"layers.{layer}.moe."
        given = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
        yield layer, given | {"tokens": tensors["input_ids"].astype(np.int32)}


def in_order(ids, values):
    """Sort `values` of each token by expert id, because tools list experts in any order."""
    return np.take_along_axis(values, np.argsort(ids, axis=-1), axis=-1)


@pytest.mark.parametrize("folder", WITH_EXPERTS)
def test_each_block_is_exact(folder):
    found = list(blocks(folder))
    assert found
    for layer, given in found:
        moe = load_moe(CHECKPOINTS / folder, layer, **EXACT)
        k = given["topk_indices"].shape[-1]
        there, their_weights = (given[n].reshape(-1, k) for n in ("topk_indices", "topk_weights"))
        routed, block = run_block(moe, given["input"], given["tokens"])
        routes = routed.expert_ids, routed.expert_weights
        ids, weights = (np.asarray(x).reshape(-1, k) for x in routes)
        np.testing.assert_array_equal(in_order(ids, ids), in_order(there, there))
        assert relative(in_order(ids, weights), in_order(there, their_weights)) < BLOCK_BOUND
        assert relative(routed.x, given["experts_input"]) < BLOCK_BOUND
        assert relative(routed.y, given["experts_output"]) < BLOCK_BOUND
        assert relative(block, given["output"]) < BLOCK_BOUND


def take(model, cache, ids, starts, counts):
    """Run `counts[row]` tokens from `starts[row]` on, padded to one of two widths."""
    width = 1 if max(counts) == 1 else ids.shape[1] - 3
    padded = np.zeros((len(ids), width), np.int32)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        padded[row, :count] = ids[row, start : start + count]
    return step(model, padded, cache, np.asarray(counts, np.int32))


@each_mixer
def test_a_cache_filled_in_uneven_pieces(case):
    model, ids, expected = case.model, case.ids, case.expected
    (b, t), pieces, start = ids.shape, [], 0
    cache = empty_cache(model, b, t)
    for count in (t // 2 - 1, 1, 1, t - t // 2 - 1):
        logits, cache = take(model, cache, ids, [start] * b, [count] * b)
        pieces.append(np.asarray(logits)[:, :count])
        start += count
    np.testing.assert_array_equal(cache.lengths, [t] * b)
    assert case.error(np.concatenate(pieces, axis=1), expected) <= 1


def real_tokens(rows, lengths):
    """Concatenate the tokens of all rows, without padding."""
    return np.concatenate([np.asarray(row)[:n] for row, n in zip(rows, lengths, strict=True)])


@each_mixer
def test_padding_without_a_cache(case):
    """Padding does not change real tokens, even where a window or a chunk leaves padding no key.

    All but 3 positions of padding are left out where tokens do not mix.
    """
    lengths = np.array([case.ids.shape[1], 5], np.int32)
    found = real_tokens(run_packed(case.model, case.ids, lengths), lengths)
    assert case.error(found, real_tokens(case.expected, lengths)) <= 1


@each_mixer
def test_prompts_of_different_lengths(case):
    """The shorter prompt is padded, then both rows decode. Each row is as if it were alone."""
    model, ids, expected = case.model, case.ids, case.expected
    t = ids.shape[1]
    lengths = np.array([t - 3, t // 2 - 2])
    logits, cache = take(model, empty_cache(model, 2, t), ids, [0, 0], lengths)
    assert case.error(real_tokens(logits, lengths), real_tokens(expected, lengths)) <= 1
    pieces = []
    for offset in range(3):
        logits, cache = take(model, cache, ids, lengths + offset, [1, 1])
        pieces.append(logits)
    there = np.stack([expected[row, n : n + 3] for row, n in enumerate(lengths)])
    assert case.error(np.concatenate(pieces, axis=1), there) <= 1


@one_mixer
def test_the_bound_of_caches_catches_a_token_that_is_left_out(case):
    """Negative control: there is one true token more than the program computes."""
    lengths = np.array([9, case.ids.shape[1]], np.int32)
    found = real_tokens(run_packed(case.model, case.ids, lengths), lengths)
    assert case.error(found, real_tokens(case.expected, lengths)) > 10


@one_mixer
def test_the_bound_of_caches_catches_padding_that_counts(case):
    """Negative control of the cache tests: one position of padding counts as a token."""
    model, ids, expected = case.model, case.ids, case.expected
    t = ids.shape[1]
    _, cache = take(model, empty_cache(model, 2, t), ids, [0, 0], [t - 4] * 2)
    cache = dataclasses.replace(cache, lengths=cache.lengths + 1)
    logits, _ = take(model, cache, ids, [t - 4] * 2, [1, 1])
    assert case.error(logits, expected[:, t - 4 : t - 3]) > 10


@pytest.mark.parametrize(
    "case", [name for name in EACH_MIXER if name not in GENERATED], indirect=True, scope="module"
)
def test_generate_takes_the_largest_logit(case):
    """Each new token has the largest logit after the whole text before it, except for ties.

    Other tests check this for `GENERATED`.
    """
    model, ids = case.model, case.ids
    t, new = ids.shape[1] // 2, 4
    tokens = generate(model, ids[:, :t], max_new_tokens=new, stop_ids=())
    assert tokens.shape == (len(ids), new)
    text = np.concatenate([ids[:, :t], tokens], axis=1)
    padded = np.pad(text, [(0, 0), (0, ids.shape[1] - t - new)])
    logits = np.asarray(run_packed(model, padded, np.full(len(ids), t + new, np.int32)))
    logits = logits[:, t - 1 : t + new - 1]
    chosen = np.take_along_axis(logits, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    gap = (logits.max(axis=-1) - chosen) / np.sqrt(np.mean(np.square(logits)))
    assert case.excess(gap) <= 1


def with_faults(folder, changes, tmp_path):
    """Return a copy of the checkpoint whose config has the changed values."""
    read = merge_text_config(json.loads((CHECKPOINTS / folder / "config.json").read_text()))
    assert any(read.get(name) != value for name, value in changes.items())
    return copy_with_config(CHECKPOINTS / folder, tmp_path / "m", **changes)


def of_each_expert(ids, weights):
    """Return the weight of each of 128 experts for each token, zero for those not chosen."""
    ids, weights = (np.asarray(x).reshape(-1, ids.shape[-1]) for x in (ids, weights))
    dense = np.zeros((len(ids), 128))
    np.put_along_axis(dense, ids, weights, axis=-1)
    return dense


@pytest.mark.parametrize(("folder", "changes"), ROUTER_FAULTS, ids=str)
def test_the_bound_of_blocks_catches_a_field_that_is_read_wrong(folder, changes, tmp_path):
    """A wrong value of a field changes the weights of experts by far more than the bound.

    `test_each_block_is_exact` shows that the right values meet the bound.
    """
    wrong = with_faults(folder, changes, tmp_path)
    layer, given = list(blocks(folder))[-1]
    expected = of_each_expert(given["topk_indices"], given["topk_weights"])
    found = of_each_expert(*run_route(load_moe(wrong, layer, **EXACT), given["input"]))
    assert relative(found, expected) > 100 * BLOCK_BOUND


def slow_beside_each_mixer(faults):
    """Mark all faults as slow except those of `EACH_MIXER`. Each compiles a model of its own."""
    return [
        pytest.param(folder, changes, marks=() if folder in EACH_MIXER else pytest.mark.slow)
        for folder, changes in faults
    ]


@pytest.mark.parametrize(("folder", "changes"), slow_beside_each_mixer(FAULTS), ids=str)
def test_the_bound_of_logits_catches_a_field_that_is_read_wrong(folder, changes, tmp_path):
    """A wrong value of a config field changes logits by far more than the bound.

    In each run, `test_logits` of test_default_dtype.py shows that the right values meet it.
    """
    case = load_case(folder, with_faults(folder, changes, tmp_path))
    assert case.error(run(case.model, case.ids)) > 100
