"""Test tensor-name prefixes of multimodal and hybrid models, and that ambiguous names fail."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.checkpoint_edits import CT, GIVEN, W4A4, edited, read_all
from support.files.given import CHECKPOINTS, copy_with_config

from jax_nvfp4_moe import CheckpointError, load_model, load_moe
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping, canonical_names, find_key_mapping
from jax_nvfp4_moe.checkpoint.names import PROJECTIONS, SPELLINGS
from jax_nvfp4_moe.checkpoint.opening import open_checkpoint

LAYER = "layers.0.mlp.gate.weight"


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("language_model.", "language_model.lm_head."),
        ("backbone.", "lm_head."),
        ("language_model.backbone.", "language_model.lm_head."),
        ("model.language_model.language_model.", "lm_head."),
        ("model.language_model.language_model.", "model.language_model.language_model.lm_head."),
        ("model.language_model.model.", "model.language_model.lm_head."),
        ("model.model.", "lm_head."),
        ("model.model.", "model.lm_head."),
        ("language_model.model.model.", "language_model.lm_head."),
        ("base_model.model.model.", "base_model.model.lm_head."),
        ("module.model.", "module.lm_head."),
        ("_orig_mod.model.", "_orig_mod.lm_head."),
        ("thinker.model.", "thinker.lm_head."),
    ],
)
def test_a_prefix_is_found_from_the_names(prefix, head):
    names = [f"{prefix}{LAYER}", f"{prefix}norm.weight", f"{head}weight", "visual.norm.weight"]
    problems = []
    assert find_key_mapping(names, problems) == KeyMapping(prefix, head)
    assert list(canonical_names(names, find_key_mapping(names, problems), problems).values()) == [
        f"model.{LAYER}",
        "model.norm.weight",
        "lm_head.weight",
        "visual.norm.weight",
    ]
    assert problems == []


def test_the_number_of_an_expert_hides_no_other_name():
    """Names that differ in such a number alone are looked at once."""
    alike = [f"model.layers.0.mlp.experts.{x}.up_proj.weight" for x in range(3)]
    others = ["model.layers.0.mlp.experts.x.w1.weight", "model.layers.0.mlp.experts.3.w1.weight"]
    others += ["model.experts.0.experts.1.w1.weight", "head.weight"]
    problems = []
    assert find_key_mapping([*alike, *others], problems).projections == SPELLINGS[1]
    assert find_key_mapping(alike, problems).projections == PROJECTIONS
    assert find_key_mapping([*alike, others[2]], problems).projections == SPELLINGS[1]
    assert list(canonical_names(alike, KeyMapping(), problems).values()) == alike
    names = [*alike, "model.layers.0.mlp.experts.1.embed.weight", "model.embed.weight"]
    renamed = canonical_names(names, KeyMapping(), problems)
    assert list(renamed.values()) == [*names[:-1], "model.embed_tokens.weight"]
    assert problems == []


def test_names_of_nemotron():
    for name in ("embedding", "embeddings"):
        names = [
            f"backbone.{name}.weight",
            "backbone.norm_f.weight",
            "backbone.layers.0.norm.weight",
        ]
        assert list(canonical_names(names, find_key_mapping(names, []), []).values()) == [
            "model.embed_tokens.weight",
            "model.norm.weight",
            "model.layers.0.norm.weight",
        ]


def test_vision_beside_the_language_model_keeps_its_names():
    names = [f"model.language_model.{LAYER}", "model.visual.blocks.0.norm.weight"]
    assert canonical_names(names, find_key_mapping(names, []), [])[names[1]] == names[1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"model.{LAYER}", f"backbone.{LAYER}"], f"'model.{LAYER}' and 'backbone.{LAYER}'"),
        (["lm_head.weight", "language_model.lm_head.weight"], "may both belong"),
        (
            ["backbone.embedding.weight", "backbone.embeddings.weight"],
            "mean 'model.embed_tokens.weight'",
        ),
    ],
)
def test_ambiguous_names_are_refused(names, expected):
    problems = []
    canonical_names(names, find_key_mapping(names, problems), problems)
    assert len(problems) == 1
    assert problems[0].startswith("ambiguous: ")
    assert expected in problems[0]


def respelled(tmp_path, prefix, head):
    """Write a given checkpoint with the tensor names and the config of a multimodal model."""

    def edit(tensors):
        for name in list(tensors):
            old, _, rest = name.partition(".")
            tensors[{"model": prefix, "lm_head": head}[old] + rest] = tensors.pop(name)
        tensors["model.image_newline"] = np.zeros(2, np.float32)
        tensors["model.visual.blocks.0.attn.weight"] = np.zeros((2, 2), np.float32)
        tensors["mtp.layers.0.mlp.gate.weight"] = np.zeros((2, 2), np.float32)

    folder = edited(tmp_path, W4A4, edit)
    config = json.loads((folder / "config.json").read_text())
    kept = {name: config.pop(name) for name in ("architectures", "quantization_config")}
    config["architectures"] = None
    written = {**kept, "model_type": "other", "vision_config": {}, "text_config": config}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.language_model.", "lm_head."),
    ],
)
def test_a_multimodal_checkpoint_loads_as_its_language_model(tmp_path, prefix, head):
    folder = respelled(tmp_path, prefix, head)
    ids = jnp.arange(8)[None, :]
    for asked in (None, "checkpoint"):
        np.testing.assert_array_equal(
            load_model(folder, scheme=asked)(ids), load_model(GIVEN / W4A4, scheme=asked)(ids)
        )
    block, given = load_moe(folder, 1), load_moe(GIVEN / W4A4, 1)
    jax.tree.map(
        np.testing.assert_array_equal,
        block.experts.params.get_value(),
        given.experts.params.get_value(),
    )


def test_problems_name_tensors_as_the_file_does(tmp_path):
    folder = respelled(tmp_path, "model.language_model.", "lm_head.")
    tensors = read_all(folder)
    tensors["model.language_model.layers.1.mlp.surplus"] = np.zeros(2, np.float32)
    tensors["model.language_model.norm.weight"] = np.zeros(2, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert "'model.language_model.layers.1.mlp.surplus'" in str(caught.value)
    assert "'model.language_model.norm.weight'" in str(caught.value)


@pytest.mark.parametrize(
    "prefix",
    ["model.language_model.language_model.", "language_model.model.model.", "model.model.",
     "base_model.model.model.", "model.language_model.model."],
)  # fmt: skip
def test_a_quantization_config_may_have_the_prefix_of_its_file(tmp_path, prefix):
    """Names and patterns with such a prefix mean the modules that they mean without it."""

    def respell(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    escaped = prefix.replace(".", r"\.")
    for plain, given in (
        (["lm_head", "re:.*gate$"], ["lm_head", "re:.*gate$"]),
        (["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
         ["lm_head", f"{prefix}layers.0.mlp.gate", f"{prefix}layers.1.mlp.gate"]),
        (["lm_head", r"re:model\.layers.*gate$"], ["lm_head", f"re:{escaped}layers.*gate$"]),
    ):  # fmt: skip
        with open_checkpoint(edited(tmp_path, CT, lambda tensors: None, ignore=plain)) as one:
            expected = [one.quant.checkpoint_scheme(module) for module in MODULES]
        with open_checkpoint(edited(tmp_path, CT, respell, ignore=given)) as other:
            assert set(MODULES) <= {n.rpartition(".")[0] for n in other.tensors.names()}
            assert [other.quant.checkpoint_scheme(module) for module in MODULES] == expected
        assert len(set(expected)) == 2


MODULES = (
    "model.layers.0.mlp.gate",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.experts.3.up_proj",
    "lm_head",
)


@pytest.mark.parametrize("prefix", ["talker.model.", "transformer.", "x.y.", "model.decoder."])
def test_an_unknown_prefix_is_one_sentence(tmp_path, prefix):
    """Without it, every tensor of the model would be reported as missing."""

    def respell(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    with pytest.raises(CheckpointError) as caught:
        load_model(edited(tmp_path, W4A4, respell))
    (problem,) = caught.value.problems
    assert f"the file has '{prefix}layers.'" in problem
    assert "expected 'model.layers.'" in problem


def test_a_file_without_layers_has_no_prefix_to_name():
    problems = []
    find_key_mapping(["x.weight", "visual.blocks.0.norm.weight"], problems)
    assert problems == []


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_projections_of_experts_have_one_name(spelled):
    """The names of a dense MLP, such as w1 in LFM2, are those of its own family."""
    block, dense = "model.layers.0.mlp.experts.7", "model.layers.1.feed_forward.w1.weight"
    names = [f"{block}.{name}.weight" for name in spelled]
    mapping = find_key_mapping([*names, dense], [])
    found = list(canonical_names([*names, dense], mapping, []).values())
    assert found == [*(f"{block}.{name}.weight" for name in PROJECTIONS), dense]
    assert list(map(mapping.spell, found)) == [*names, dense]
    assert mapping.spell(f"{block}.0.{PROJECTIONS[0]}") == f"{block}.0.{PROJECTIONS[0]}"


def test_a_missing_expert_is_named_as_the_file_spells_it(tmp_path):
    """Mixtral's file has w2, and nothing called down_proj."""
    source = CHECKPOINTS / "mixtral-window-modelopt-w4a16"
    folder, tensors = copy_with_config(source, tmp_path / "m"), read_all(source)
    missing = next(name for name in tensors if name.endswith("experts.3.w2.weight"))
    del tensors[missing]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{missing!r} is missing: expected U8 [")
