"""Test which rotation of LongRoPE a call takes, and its frequencies."""

import functools
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS, copy_with_config, reference_tensors
from support.models.architecture import KERNELS, LOGIT_BOUND, logit_error

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.models import phi3
from jax_nvfp4_moe.testing import assert_as_accurate_as

PHI3 = CHECKPOINTS / "phi3-modelopt-w4a16"
IDS = jnp.asarray(reference_tensors(PHI3)["input_ids"], jnp.int32)
ORIGINAL = "original_max_position_embeddings"
CONFIG = json.loads((PHI3 / "config.json").read_text())


def read(**changes):
    return phi3.read_config({**CONFIG, **changes})


def test_frequencies_and_factor():
    """The formulas of transformers, with a base of 5000 and half of 16 channels."""
    plain = 5000.0 ** (-np.arange(0, 8, 2) / 8)
    given = CONFIG["rope_parameters"]
    attention = read().attention
    length, long = attention.long_rope
    assert length == 8
    for rope, factors in ((attention.rope, "short_factor"), (long, "long_factor")):
        truth = plain / given[factors]
        rounded = plain.astype(np.float32) / np.float32(given[factors])
        assert_as_accurate_as(np.float32(rope.frequencies), rounded, truth)
        assert rope.scale == pytest.approx(math.sqrt(1 + math.log(512 / 8) / math.log(8)))
    assert read(**{ORIGINAL: 512}).attention.rope.scale == 1.0
    assert read(rope_parameters=given | {"factor": 4.0}).attention.rope.scale == pytest.approx(
        math.sqrt(1 + math.log(4) / math.log(8))
    )
    scaled = read(rope_parameters=given | {"attention_factor": 0.9}).attention
    assert scaled.rope.scale == scaled.long_rope[1].scale == 0.9


@pytest.mark.parametrize("older", ["su", "yarn"])
def test_older_names(older):
    given = CONFIG["rope_parameters"]
    rope = {name: given[name] for name in ("short_factor", "long_factor")} | {"type": older}
    config = {name: value for name, value in CONFIG.items() if name != "rope_parameters"}
    config |= {"rope_scaling": rope, "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    assert phi3.read_config(config) == read()


def test_positions_are_not_lengthened_again():
    given = CONFIG["rope_parameters"] | {"factor": 4.0}
    assert read(rope_parameters=given).max_positions == 512


@functools.cache
def models(folder):
    """Return models that have both rotations, only the short one, and only the long one."""
    rope = CONFIG["rope_parameters"] | {"attention_factor": 1.2}
    long = rope | {"short_factor": rope["long_factor"]}
    changes = (
        {"rope_parameters": rope},
        {"rope_parameters": rope, ORIGINAL: 512},
        {"rope_parameters": long, ORIGINAL: 512},
    )
    return [
        load_model(copy_with_config(PHI3, folder / str(index), **one), **KERNELS)
        for index, one in enumerate(changes)
    ]


def test_the_length_of_a_text_decides_and_with_a_cache_its_room(tmp_path):
    """The original context has 8 positions."""
    both, short, long = models(tmp_path)

    def differ(one, other, tokens, room):
        ids = IDS[:, :tokens]
        caches = [model.init_cache(len(ids), room) if room else None for model in (one, other)]
        found = [model(ids, cache) for model, cache in zip((one, other), caches, strict=True)]
        first, second = (logits if room is None else logits[0] for logits in found)
        return logit_error(first, np.asarray(second))

    for tokens, room, same, other in (
        (8, None, short, long),
        (9, None, long, short),
        (5, 8, short, long),
        (5, 9, long, short),
    ):
        assert differ(both, same, tokens, room) < LOGIT_BOUND
        assert differ(both, other, tokens, room) > 100 * LOGIT_BOUND
