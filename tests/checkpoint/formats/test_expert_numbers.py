"""Test that a config is searched once for all experts of a layer, unless it tells them apart."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.examples import examples

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.formats.expert_numbers import (
    tells_experts_apart,
    without_expert_number,
)
from jax_nvfp4_moe.checkpoint.formats.quantization import read_quant_config

ALIKE = (
    *("lm_head", "model.layers.1.mlp.gate", "model.layers.12.mlp.experts", "*mlp.gate*"),
    *("*.experts.*.w1", "model.layers.1*", "re:.*mlp.gate$", r"re:^model\.layers\.\d+\.mlp\.gate"),
    *("re:.*(q_proj|down_proj)$", r"re:.*layers\.1\..*", "*.w2", "re:.*experts.*?proj"),
    *(r"re:.*\.experts\.\d+\..*_proj$", r"re:.*layers\.[0-9]+\.mlp\.experts\.[0-9]+\.(gate|w1)"),
    *(r"re:.*\.(self_attn|mlp)\.\w*proj\w*$", r"re:.*\.\d+\.w1", "model.layers.[0-9]*"),
)
APART = (
    *("model.layers.1.mlp.experts.1", "layers.1.mlp.experts.12.down_proj", "12", "1.down_proj"),
    *("*1*", "*.?.down_proj", "*experts.[12].*", "model.layers.1.mlp.experts.1*", "*.1?.w1"),
    *(r"re:.*\.\d\.", "re:.*experts...down", "re:.*1", r"re:.*experts\.\d+.", "re:.*s..d"),
    *(
        "re:.*(1|2).*",
        "re:.*experts.(?!1)",
        "re:.*e.+j",
        "module.re:.*experts...d",
        r"re:.*\.(a|.)\.",
    ),
)
MODULES = [
    f"model.layers.{layer}.mlp.experts.{expert}.{name}"
    for layer in (1, 2)
    for expert in (1, 2, 12, 21)
    for name in ("down_proj", "w1", "gate_proj")
]


@pytest.mark.parametrize("entry", ALIKE)
def test_entries_that_hold_for_all_experts_of_a_layer(entry):
    assert not tells_experts_apart({"ignore": [entry], "producer": {"version": "0.29.0"}})


@pytest.mark.parametrize("entry", APART)
def test_entries_that_may_tell_experts_apart(entry):
    assert tells_experts_apart({"ignore": [entry]})
    assert tells_experts_apart({"config_groups": {"group_0": {"targets": [entry]}}})
    assert tells_experts_apart({"quantized_layers": {entry: {}}})


def test_only_the_number_of_an_expert_is_left_out():
    assert without_expert_number("a.1.experts.12.w1") == "a.1.experts.*.w1"
    for module in ("a.1.experts.12", "a.experts.w1", "a.experts.1.2", "a.experts", "lm_head"):
        assert without_expert_number(module) == module


def config(kind, entries):
    group = {"weights": {"type": "float", "num_bits": 4, "group_size": 16}}
    old = {"producer": {"name": "modelopt", "version": "0.29.0"}}
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return {
        "wildcards": {**modelopt, "ignore": entries},
        "parts": {**modelopt, **old, "ignore": entries},
        "targets": {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"g": {**group, "targets": [*entries, "Linear"]}},
            "ignore": entries[:1],
        },
        "table": {
            **modelopt,
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {entry: {"quant_algo": "NVFP4"} for entry in entries},
        },
    }[kind]


def choices(quant, module):
    try:
        return quant.choices(module)
    except CheckpointError as error:
        return error.problems


STARTS = ("", "*", "*experts.", "model.layers.1.mlp.experts.", "re:", "re:.*", "re:.*experts.")
PIECES = ("1", "2", "12", ".", "*", "?", "[12]", "experts", "layers", "down_proj", "w1", "mlp")
PIECES += (
    r"\w*",
    r"\w+",
    r"\.\d+\.",
    r"\d+.",
    "[0-9]+",
    "e",
    "s",
    ".*",
    r"\.",
    r"\d",
    r"\d+",
    "(",
    ")",
    "|",
    "^",
    "$",
    "_",
)
ENTRIES = st.sampled_from((*ALIKE, *APART)) | st.tuples(
    st.sampled_from(STARTS), st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
).map("".join)


@examples(500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(("wildcards", "parts", "targets", "table")),
    entries=st.lists(ENTRIES, min_size=1, max_size=2, unique=True),
)
def test_one_search_for_all_experts_finds_what_one_for_each_does(tmp_path, kind, entries):
    section = json.loads(json.dumps(config(kind, entries)))
    try:
        quant = read_quant_config(tmp_path, {"quantization_config": section})
    except CheckpointError:
        return  # an expression is not valid
    each = dataclasses.replace(quant, tells_experts_apart=True, _known={})
    for module in MODULES:
        assert choices(quant, module) == choices(each, module)
