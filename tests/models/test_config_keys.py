"""Test that no key of a config that changes the function is passed over."""

import functools
import json
import logging

import pytest
from support.files.given import CHECKPOINTS, MODELS, copy_with_config

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.checkpoint.folder import merge_text_config, read_config
from jax_nvfp4_moe.models.config_keys import HARMLESS, NEUTRAL, NOT_APPLIED, refuse_unread_keys
from jax_nvfp4_moe.models.loading import find_architecture

QWEN, DEEPSEEK = "qwen3moe-modelopt-w4a16", "deepseekv3-modelopt-w4a4"
PUBLISHED = json.loads((CHECKPOINTS / "published_configurations.json").read_text())


@functools.cache
def given_config(name):
    return merge_text_config(read_config(CHECKPOINTS / name))


def check(config):
    row = find_architecture(config)
    refuse_unread_keys(config, row.read_config(config), row.read_config)


def is_read(config, key):
    """Return whether the reader takes the key: another value changes sizes, or is refused."""
    row = find_architecture(config)
    sizes = row.read_config(config)
    for other in (None, "\0"):
        try:
            if row.read_config({**config, key: other}) != sizes:
                return True
        except Exception:
            return True
    return False


def configs():
    """Return the configs of all given folders, and the published ones of their families."""
    found = {name: given_config(name) for name in MODELS}
    for name, config in PUBLISHED.items():
        given = next(config for one, config in found.items() if one.startswith(f"{name}-modelopt"))
        names = ("architectures", "model_type")
        found[f"published {name}"] = {one: given.get(one) for one in names} | config
    return found


CONFIGS = configs()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_read_or_listed(name):
    config = CONFIGS[name]
    check(config)
    left = [key for key in config if key not in HARMLESS and key not in NEUTRAL]
    assert [key for key in left if not is_read(config, key)] == []


def test_no_key_is_listed_twice():
    assert not set(HARMLESS) & set(NEUTRAL)
    assert all(HARMLESS.values())


# Values that change the function, by the key's values that do not.
CHANGES = {
    "norm_topk_prob": False,
    "scoring_func": "tanh",
    "position_embedding_type": "alibi",
    "no_rope_layers": [1, 0],
    "layer_types": ["sliding_attention", "full_attention"],
}
# The readers of these folders take these keys, and have their own messages.
READ = {
    QWEN: {"norm_topk_prob"},
    DEEPSEEK: {"norm_topk_prob", "scoring_func", "n_group", "routed_scaling_factor"}
    | {"rope_interleave"},
}


@pytest.mark.parametrize("name", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("key", NEUTRAL)
def test_a_key_of_another_architecture_is_refused(name, key):
    config = given_config(name)
    check({**config, key: next(iter(NEUTRAL[key]))} if key not in READ[name] else config)
    if key in READ[name]:
        assert is_read(config, key)
        return
    changed = {**config, key: CHANGES.get(key, 2.5)}
    if key == "sliding_window":
        changed |= {key: 16, "use_sliding_window": None}
        if name == QWEN:
            check(changed)  # off by default
            return
    if key == "rope_interleaved" and name == DEEPSEEK:
        check(changed)  # which it is
        return
    with pytest.raises(CheckpointError, match=f"config.json: {key}: .* is not supported for this"):
        check(changed)


def test_all_keys_are_told_at_once_before_weights_are_read(tmp_path):
    changes = {"attn_logit_softcapping": 30.0, "logits_scaling": 2.0}
    folder = copy_with_config(CHECKPOINTS / QWEN, tmp_path / "m", **changes)
    for call in (load_model, lambda path: load_moe(path, 1)):
        with pytest.raises(CheckpointError, match="2 problems") as caught:
            call(folder)
        for name in changes:
            assert f"config.json: {name}" in str(caught.value)


def test_windows_that_have_no_effect_are_read():
    config = given_config(DEEPSEEK)
    check({**config, "sliding_window": 4096, "use_sliding_window": False})
    check({**config, "sliding_window": config["max_position_embeddings"]})


def test_values_that_an_architecture_has_anyway_are_read():
    check({**given_config("minimax_m3-modelopt-w4a16"), "scoring_func": "sigmoid"})
    check({**given_config("bailing_hybrid-modelopt-w4a16"), "rope_interleave": True})
    check({**given_config("gemma4-modelopt-w4a16"), "query_pre_attn_scalar": 256})
    check({**given_config(QWEN), "layer_types": ["full_attention"] * 2})


@pytest.mark.parametrize("key", NOT_APPLIED)
def test_settings_of_generation_that_are_not_applied_are_told(tmp_path, caplog, key):
    from jax_nvfp4_moe.models.config_keys import warn_of_generation_keys

    for value in NOT_APPLIED[key]:
        (tmp_path / "generation_config.json").write_text(json.dumps({key: value, "top_k": 5}))
        warn_of_generation_keys(tmp_path)
    assert not caplog.records
    (tmp_path / "generation_config.json").write_text(json.dumps({key: 3}))
    warn_of_generation_keys(tmp_path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{key} 3" in record.getMessage()


def test_a_load_tells_of_generation_settings(tmp_path, caplog):
    folder = copy_with_config(CHECKPOINTS / QWEN, tmp_path / "m")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    load_model(folder)
    assert "generation_config.json: not applied" in caplog.text
