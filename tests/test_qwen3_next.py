"""Qwen3-Next and Qwen3.5-MoE against transformers on a real tool's weights; configs; padding."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from given import CHECKPOINTS, copy_with_config, reference_tensors

from jax_nvfp4_moe import CheckpointError, generate, load_model, load_moe
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.models import qwen3_5_moe, qwen3_next

NEXT = CHECKPOINTS / "qwen3_next-modelopt-w4a16"
# Three layers, one of them dense; yarn, biases, tied head, no renormalization, 3 value heads a key
# head, values wider than keys, a convolution of 3 taps, an epsilon of 1e-3.
OPTIONS = CHECKPOINTS / "qwen3_next-options-modelopt-w4a16"
QWEN35 = CHECKPOINTS / "qwen3_5_moe-modelopt-w4a16"
FOLDERS = {"next": NEXT, "options": OPTIONS, "3.5": QWEN35}
EXACT = {"scheme": "checkpoint", "dtype": jnp.float32, "backend": "reference"}
# A block by the README of the given checkpoints; logits in units of their root mean square, where
# float32 sums of two or three layers in another order differ in the sixth digit.
BLOCK_BOUND, LOGIT_BOUND = 1e-5, 3e-5
run = jax.jit(lambda model, ids: model(ids))
step = jax.jit(lambda model, ids, cache, lengths: model(ids, cache, lengths=lengths))


@pytest.fixture(scope="module", params=FOLDERS)
def case(request):
    """A model, a prompt twice, and its logits twice."""
    folder = FOLDERS[request.param]
    tensors = reference_tensors(folder)
    ids, logits = (np.concatenate([tensors[name]] * 2) for name in ("input_ids", "logits"))
    yield load_model(folder, **EXACT), jnp.asarray(ids, jnp.int32), logits
    jax.clear_caches()


def error(logits, expected):
    worst = np.abs(np.asarray(logits, np.float64) - expected).max()
    return worst / np.sqrt(np.mean(np.square(expected)))


@pytest.mark.parametrize("name", FOLDERS)
def test_each_block_is_exact(name):
    tensors = reference_tensors(FOLDERS[name])
    layers = sorted({int(n.split(".")[1]) for n in tensors if n.endswith("moe.input")})
    assert layers
    for layer in layers:
        prefix = f"layers.{layer}.moe."
        given = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
        moe = load_moe(FOLDERS[name], layer, **EXACT)
        ids, _ = moe.route(jnp.asarray(given["input"]).reshape(-1, given["input"].shape[-1]))
        chosen = given["topk_indices"].reshape(ids.shape)
        np.testing.assert_array_equal(np.sort(ids, axis=-1), np.sort(chosen, axis=-1))
        routed = moe.experts(
            jnp.asarray(given["experts_input"]).reshape(len(chosen), -1),
            jnp.asarray(chosen, jnp.int32),
            jnp.asarray(given["topk_weights"]).reshape(chosen.shape),
        )
        whole = moe(jnp.asarray(given["input"]))
        for got, want in ((routed, given["experts_output"]), (whole, given["output"])):
            difference = np.asarray(got, np.float64).reshape(want.shape) - want
            assert np.linalg.norm(difference) < BLOCK_BOUND * np.linalg.norm(want)


def test_logits_at_once_and_in_uneven_pieces(case):
    """Rows go on at their own pace: pieces of 40, 1 and 23, padded to what the longest takes."""
    model, ids, expected = case
    assert error(run(model, ids), expected) <= LOGIT_BOUND
    cache, at = model.init_cache(2, ids.shape[1]), np.zeros(2, np.int32)
    for counts in ((40, 23), (1, 1), (23, 40), (1, 1)):
        width = max(counts)
        piece = np.zeros((2, width), np.int32)
        for row, count in enumerate(counts):
            piece[row, :count] = ids[row, at[row] : at[row] + count]
        logits, cache = step(model, piece, cache, jnp.asarray(counts, jnp.int32))
        for row, count in enumerate(counts):
            want = expected[row, at[row] : at[row] + count]
            assert error(logits[row, :count], want) <= LOGIT_BOUND
        at += counts
    np.testing.assert_array_equal(cache.lengths, at)


def test_padding_leaves_states_as_they_are(case):
    model, ids, _ = case
    _, cache = step(model, ids[:, :9], model.init_cache(2, 16), jnp.array([9, 9], jnp.int32))
    _, after = step(model, ids[:, 9:12], cache, jnp.array([0, 1], jnp.int32))
    for before, now in zip(cache.layers, after.layers, strict=True):
        for name in before:
            np.testing.assert_array_equal(now[name][0], before[name][0])
            assert np.abs(now[name][1] - before[name][1]).max() > 0


def test_prompts_of_different_lengths_continue_as_if_alone(case):
    model, ids, _ = case
    prompts = np.stack([ids[0, :11], np.roll(ids[1], -20)[:11]])
    both = generate(model, prompts, max_new_tokens=6, lengths=jnp.array([11, 4], jnp.int32))
    for row, length in enumerate((11, 4)):
        alone = generate(model, prompts[row : row + 1, :length], max_new_tokens=6)
        np.testing.assert_array_equal(both[row], alone[0])


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        (NEXT, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        (NEXT, {"norm_topk_prob": False}),
        (NEXT, {"num_experts_per_tok": 3}),
        (OPTIONS, {"rms_norm_eps": 1e-6}),
        (OPTIONS, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        (QWEN35, {"rope_theta": 5e3, "rope_parameters": None}),
    ],
)
def test_the_bound_of_logits_catches_a_wrong_field(tmp_path, folder, change):
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        change = {"text_config": config["text_config"] | change}
    tensors = reference_tensors(folder)
    model = load_model(copy_with_config(folder, tmp_path / "m", **change), **EXACT)
    logits = run(model, jnp.asarray(tensors["input_ids"], jnp.int32))
    assert error(logits, tensors["logits"]) > 10 * LOGIT_BOUND


def config_of(folder, **changes):
    config = merge_text_config(json.loads((folder / "config.json").read_text())) | changes
    return {name: value for name, value in config.items() if value is not None}


def test_layers_that_attend():
    def attending(**changes):
        return qwen3_next.read_config(config_of(NEXT, **changes)).attention_layers

    assert attending() == {1}
    assert attending(layer_types=None, num_hidden_layers=9) == {3, 7}
    assert attending(layer_types=None, num_hidden_layers=9, full_attention_interval=3) == {2, 5, 8}
    assert attending(layer_types=["attention", "mamba"]) == {0}  # as older files call them
    assert attending(layer_types=["full_attention"] * 2) == {0, 1}


def test_dense_layers():
    config = config_of(NEXT, layer_types=None, num_hidden_layers=4, decoder_sparse_step=2)
    assert qwen3_next.read_config(config).dense_layers == {0, 2}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [3]}
    assert qwen3_next.read_config(config).dense_layers == {3}
    assert qwen3_5_moe.read_config(config).dense_layers == frozenset()
    config |= {"norm_topk_prob": False}
    assert not qwen3_next.read_config(config).router.renormalize
    assert qwen3_5_moe.read_config(config).router.renormalize


def test_spellings_of_one_rotation():
    """A quarter of the channels where nothing is said; sections of positions change nothing."""
    missing = {"partial_rotary_factor": None, "rope_parameters": None}
    theta = {"rope_theta": 10000.0}
    given = qwen3_next.read_config(config_of(NEXT)).rope
    assert len(given.frequencies) == 32 // 4 // 2
    for changes in (
        missing | theta,
        missing | theta | {"partial_rotary_factor": 0.25},
        missing | {"rope_parameters": theta},
        {"rope_parameters": theta | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
    ):
        assert qwen3_next.read_config(config_of(NEXT, **changes)).rope == given
        assert qwen3_5_moe.read_config(config_of(QWEN35, **changes)).rope == given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types: expected 2 names of .* got 1 of them"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected 2 names"),
        ({"layer_types": "full_attention"}, "layer_types: expected 2 names"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: 3 do not divide by 2 key heads"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate: False is not supported"),
        ({"layer_scale": True}, "layer_scale: True is not supported"),
        ({"num_key_value_heads": 3}, "4 heads do not divide by 3 key heads"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: 7 of 6 experts"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: 'longrope'"),
        ({"attention_bias": None, "linear_key_head_dim": 0}, "linear_key_head_dim"),
    ],
)
def test_configs_that_no_model_fits(changes, message):
    with pytest.raises(CheckpointError, match=message):
        qwen3_next.read_config(config_of(NEXT, **changes))


def test_load_moe_names_a_layer_without_experts():
    with pytest.raises(ValueError, match=r"layer: expected .* not of \[1\]; got 1"):
        load_moe(OPTIONS, 1)
