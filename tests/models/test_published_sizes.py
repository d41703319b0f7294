"""Test families at the sizes that their configuration classes document.

``published_configurations.json`` holds the defaults of each class of transformers 5.23.0. The
defaults of Gemma 4 have no experts: its entry holds the values of google/gemma-4-26B-A4B-it. Those
of Step-3.7 have no windows and no limits: its entry holds the values of stepfun-ai/Step-3.7-Flash,
as transformers writes them. Those of Nemotron-H have widths that 16 does not divide: its entry has
the values of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B, whose architecture Nemotron-3.5 Lightning has.
"""

import json

import jax
import numpy as np
import pytest
from given import CHECKPOINTS
from resized import write_resized

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.checkpoint.folder import merge_text_config, read_config
from jax_nvfp4_moe.models.loading import find_architecture

CONFIGURATIONS = json.loads((CHECKPOINTS / "published_configurations.json").read_text())
# Fields that order the layers. The small checkpoints decide them.
OF_LAYERS = (
    "num_hidden_layers",
    "layer_types",
    "hybrid_override_pattern",
    "indexer_types",
    "mlp_layer_types",
    "mlp_only_layers",
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_end_index",
    "swiglu_limits",
    "swiglu_limits_shared",
    "model_type",
)
# Smaller sizes. The numbers of experts suffice for the routers' groups and top-k.
FEWER = {
    "num_experts": 32,
    "num_local_experts": 4,
    "moe_num_experts": 8,
    "n_routed_experts": 16,
    "vocab_size": 256,
}


def given(name):
    return CHECKPOINTS / f"{name}-modelopt-w4a16"


def small_config(name):
    return merge_text_config(read_config(given(name)))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_documented_configuration_is_read(name):
    """The reader of the family's files reads all layers and experts of the configuration."""
    published = CONFIGURATIONS[name]
    row = find_architecture(small_config(name))
    config = row.read_config(published)
    assert config.num_layers == published["num_hidden_layers"]
    assert config.hidden == published["hidden_size"]
    assert config.vocab_size == published["vocab_size"]
    names = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
    experts = config.experts.count if name == "nemotron_h" else config.num_experts
    assert experts == next(published[n] for n in names if n in published)
    assert config.tied == published["tie_word_embeddings"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_model_of_the_documented_widths_runs(name, tmp_path):
    """A default model with these widths, heads and top-k runs, with few layers and experts."""
    published = {n: v for n, v in CONFIGURATIONS[name].items() if n not in OF_LAYERS}
    fewer = {n: min(v, published[n]) for n, v in FEWER.items() if n in published}
    write_resized(given(name), tmp_path / "m", **published | fewer)
    model = load_model(tmp_path / "m")
    assert model.config.hidden == published["hidden_size"]
    ids = np.arange(12, dtype=np.int32)[None] * 7 % 256
    logits = jax.jit(lambda model, ids: model(ids))(model, ids)
    assert logits.shape == (1, 12, 256)
    assert np.isfinite(logits).all()
    assert np.asarray(logits).std() > 0
