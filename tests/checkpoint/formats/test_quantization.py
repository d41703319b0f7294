"""Test quantization configs: each format, which modules they exclude, and what is refused."""

import json

import pytest
from support.files.checkpoint_edits import DEEPSEEK, QWEN
from support.files.given import CHECKPOINTS

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.folder import read_config
from jax_nvfp4_moe.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from jax_nvfp4_moe.checkpoint.formats.modelopt import MODELOPT, declaration
from jax_nvfp4_moe.checkpoint.formats.quantization import read_quant_config
from jax_nvfp4_moe.checkpoint.formats.rules import equivalent_names
from jax_nvfp4_moe.checkpoint.names import PREFIXES
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme

GATE = "model.layers.0.mlp.gate"
EXPERT = "model.layers.0.mlp.experts.3.gate_proj"


def modelopt_file(algorithm="NVFP4", exclude=(), version="0.47.0", **fields):
    section = {"quant_algo": algorithm, "exclude_modules": list(exclude), **fields}
    return {"producer": {"name": "modelopt", "version": version}, "quantization": section}


def modelopt_section(algorithm="NVFP4", ignore=(), **fields):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(ignore), **fields}


def nvfp4(**fields):
    return {"type": "float", "num_bits": 4, "group_size": 16, **fields}


def tensors_section(inputs=None, ignore=(), targets=("Linear",), **fields):
    group = {"targets": list(targets), "weights": nvfp4(), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        **fields,
    }


def read(folder, section=None, file=None):
    if file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(file))
    config = {} if section is None else {"quantization_config": section}
    return read_quant_config(folder, config)


def refused(folder, section=None, file=None):
    with pytest.raises(CheckpointError) as caught:
        read(folder, section, file)
    return str(caught.value)


@pytest.mark.parametrize("name", [*QWEN, DEEPSEEK])
def test_real_configs(name):
    quant = read_quant_config(CHECKPOINTS / name, read_config(CHECKPOINTS / name))
    layer = "model.layers.1.mlp"
    assert quant.format is (COMPRESSED_TENSORS if "-ct-" in name else MODELOPT)
    assert quant.checkpoint_scheme(f"{layer}.gate") is None
    assert quant.checkpoint_scheme("lm_head") is None
    assert quant.checkpoint_scheme(f"{layer}.experts.3.gate_proj") == name.rpartition("-")[2]


def test_modelopt_in_either_file(tmp_path):
    for arguments in (
        {"file": modelopt_file(exclude=[GATE], group_size="16")},
        {"section": modelopt_section(ignore=[GATE])},
    ):
        folder = tmp_path / next(iter(arguments))
        folder.mkdir()
        quant = read(folder, **arguments)
        assert quant.checkpoint_scheme(EXPERT) == "w4a4"
        assert quant.checkpoint_scheme(GATE) is None


def test_a_section_of_the_text_config(tmp_path):
    config = {"text_config": {"quantization_config": modelopt_section("W4A16_NVFP4")}}
    assert read_quant_config(tmp_path, config).checkpoint_scheme(EXPERT) == "w4a16"


def test_unquantized_checkpoints(tmp_path):
    assert read(tmp_path).checkpoint_scheme(EXPERT) is None
    assert read(tmp_path, file=modelopt_file(None)).checkpoint_scheme(EXPERT) is None


def test_the_two_files_must_agree(tmp_path):
    message = refused(tmp_path, modelopt_section("W4A16_NVFP4"), modelopt_file("NVFP4"))
    assert "hf_quant_config.json: quantization says ModelOpt NVFP4" in message
    assert "config.json: quantization_config says ModelOpt W4A16_NVFP4" in message
    assert "disagree" in refused(tmp_path, tensors_section(), modelopt_file())
    assert "disagree" in refused(tmp_path, modelopt_section(), modelopt_file(None))
    quant = read(tmp_path, modelopt_section(ignore=["lm_head"]), modelopt_file())
    assert quant.checkpoint_scheme(EXPERT) == "w4a4"
    with pytest.raises(CheckpointError, match=r"'lm_head'.* says w4a4; .* says dense"):
        quant.checkpoint_scheme("lm_head")


@pytest.mark.parametrize(
    ("pattern", "excluded", "kept"),
    [
        (GATE, [GATE], ["model.layers.0.mlp.gate_proj", "model.layers.10.mlp.gate"]),
        ("model.layers.1", ["model.layers.1.mlp.gate"], ["model.layers.10.mlp.gate"]),
        ("model.layers.1.*", ["model.layers.1.mlp.gate"], ["model.layers.10.mlp.gate", "lm_head"]),
        ("*.self_attn*", ["model.layers.0.self_attn.q_proj"], [EXPERT]),
        ("model.layers.[02].mlp.gate", [GATE], ["model.layers.1.mlp.gate"]),
        ("a.qkv_proj", ["a.q_proj", "a.k_proj", "a.v_proj"], ["a.o_proj"]),
        ("a.gate_up_proj", ["a.gate_proj", "a.up_proj"], ["a.down_proj"]),
        ("lm_head", ["lm_head", "language_model.lm_head"], ["model.lm_head_norm"]),
        ("model.language_model.a", ["language_model.model.a", "model.language_model.a"], ["b"]),
        ("unrelated", ["model.visual.blocks.0.attn"], ["model.visualize"]),
    ],
)
def test_modelopt_exclusions(tmp_path, pattern, excluded, kept):
    quant = read(tmp_path, file=modelopt_file(exclude=[pattern]))
    assert [m for m in excluded if quant.checkpoint_scheme(m) is not None] == []
    assert [m for m in kept if quant.checkpoint_scheme(m) is None] == []


def test_old_exporters_name_parts(tmp_path):
    module = "model.layers.7.block_sparse_moe.gate"
    for version, scheme in (("0.37.1", None), ("0.39.0", "w4a4"), ("1.2", "w4a4")):
        file = modelopt_file(exclude=["block_sparse_moe.gate"], version=version)
        quant = read(tmp_path, file=file)
        assert quant.checkpoint_scheme(module) == scheme
        assert quant.checkpoint_scheme(module + "_proj") == "w4a4"


@pytest.mark.parametrize("algorithm", ["NVFP4_SVD", "W8A8", "", 7])
def test_unknown_algorithms_are_named(tmp_path, algorithm):
    message = refused(tmp_path, file=modelopt_file(algorithm))
    assert "hf_quant_config.json: quantization" in message
    assert repr(algorithm) in message
    assert (
        "supported: NVFP4, W4A16_NVFP4, NVFP4_AWQ, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, "
        "MXFP8, MXFP4, MIXED_PRECISION" in message
    )


def test_lower_case_algorithms_are_accepted(tmp_path):
    assert read(tmp_path, file=modelopt_file("w4a16_nvfp4")).checkpoint_scheme(EXPERT) == "w4a16"


@pytest.mark.parametrize("size", [64, "8", 16.0, 32.0, True, [16]])
def test_other_group_sizes_are_refused(tmp_path, size):
    message = refused(tmp_path, file=modelopt_file(group_size=size))
    assert "group_size: expected 16, the block size of NVFP4, or 32; got" in message
    groups = {"group_0": {"weights": nvfp4(group_size=size)}}
    assert "group_0" in refused(tmp_path, modelopt_section(config_groups=groups))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported: its weights"),
        ({}, "quant_method None is not supported; supported: modelopt, compressed"),
        ([], "quantization_config: expected an object"),
        ({"quant_method": "modelopt"}, "quant_algo: missing"),
        (modelopt_section(ignore={}) | {"ignore": "x"}, "ignore: expected a list of names"),
        (modelopt_section(ignore=[1]), "ignore: expected a list of names"),
        (modelopt_section("MIXED_PRECISION"), "needs quantized_layers"),
        (tensors_section(config_groups={}), "expected at least one group"),
        (tensors_section(config_groups={"a": 1}), "a: expected an object, got 1"),
        (tensors_section(format="pack-quantized"), "format 'pack-quantized' is not supported"),
        (
            tensors_section(nvfp4(num_bits=8)),
            "input_activations: expected type 'float' with 4 bits",
        ),
        (tensors_section(nvfp4(group_size=64)), "the block size of NVFP4, or 32; got 64"),
        (tensors_section(ignore=["re:("]), "is no regular expression"),
        (tensors_section(ignore=["re:(?<=a)b"]), "'(?<=a)b' has a look-behind, which is not"),
    ],
)
def test_sections_that_make_no_sense(tmp_path, section, expected):
    message = refused(tmp_path, section)
    assert expected in message
    assert "config.json: quantization_config" in message


def test_problems_of_both_files_come_together(tmp_path):
    message = refused(tmp_path, {"quant_method": "gptq"}, modelopt_file("NVFP4_SVD"))
    assert "gptq" in message
    assert "NVFP4_SVD" in message


def test_compressed_tensors_schemes(tmp_path):
    assert read(tmp_path, tensors_section()).checkpoint_scheme(EXPERT) == "w4a16"
    local = nvfp4(dynamic="local", strategy="tensor_group")
    assert read(tmp_path, tensors_section(local)).checkpoint_scheme(EXPERT) == "w4a4"
    old = {"compression_config": tensors_section(local)}
    assert read_quant_config(tmp_path, old).checkpoint_scheme(EXPERT) == "w4a4"


def test_compressed_tensors_names_and_patterns(tmp_path):
    ignore = ["lm_head", r"re:.*\.mlp\.gate$", "re:.*q_proj.*|.*k_proj.*|.*v_proj.*", "re:visual"]
    quant = read(tmp_path, tensors_section(ignore=ignore))
    for module in ("lm_head", GATE, "a.k_proj", "visual.blocks.0"):
        assert quant.checkpoint_scheme(module) is None
    for module in (EXPERT, "model.layers.0.mlp.gate_proj", "a.o_proj", "model.visual"):
        assert quant.checkpoint_scheme(module) == "w4a16"


def fp8(**fields):
    return {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel", **fields}


def test_compressed_tensors_groups(tmp_path):
    groups = {
        "all": {"targets": ["Linear"], "weights": nvfp4(), "format": "nvfp4-pack-quantized"},
        "experts": {
            "targets": [r"re:.*\.experts\..*"],
            "weights": nvfp4(),
            "input_activations": nvfp4(),
            "format": "nvfp4-pack-quantized",
        },
        "eight": {
            "targets": ["a.o_proj", "re:b"],
            "weights": fp8(),
            "input_activations": fp8(dynamic=True, strategy="token"),
            "format": "float-quantized",
        },
    }
    quant = read(tmp_path, tensors_section(format="mixed-precision", config_groups=groups))
    assert quant.checkpoint_scheme(EXPERT) == "w4a4"
    assert quant.checkpoint_scheme("a.q_proj") == "w4a16"
    assert quant.checkpoint_scheme("a.o_proj") is FP8ActivationScaling.TOKEN
    # The group that comes first in the file.
    assert quant.checkpoint_scheme("b.experts.0.up_proj") is Scheme.W4A4
    assert "'eight': targets 'a.o_proj'" in quant.decide("a.o_proj").source
    only = tensors_section(targets=["a.o_proj"])
    assert read(tmp_path, only).checkpoint_scheme("a.q_proj") is None


@pytest.mark.parametrize(
    ("inputs", "scheme"),
    [
        (None, FP8ActivationScaling.WEIGHTS),
        (fp8(dynamic=True, strategy="token"), FP8ActivationScaling.TOKEN),
        (fp8(dynamic=True, strategy="tensor"), FP8ActivationScaling.TENSOR),
        (fp8(dynamic=False, strategy="tensor"), FP8ActivationScaling.STATIC),
        (fp8(dynamic=False, strategy="token"), "input_activations: strategy 'token', dynamic Fal"),
        ({**fp8(), "type": "int"}, "input_activations: type 'int' of 8 bits is not supported"),
    ],
)
def test_compressed_tensors_fp8(tmp_path, inputs, scheme):
    group = {"targets": ["Linear"], "weights": fp8(), "input_activations": inputs}
    section = tensors_section(format="float-quantized", config_groups={"group_0": group})
    if isinstance(scheme, FP8ActivationScaling):
        assert read(tmp_path, section).checkpoint_scheme(EXPERT) is scheme
    else:
        assert scheme in refused(tmp_path, section)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weights": fp8(strategy="block")}, "weights: block_structure None is not supported"),
        ({"weights": fp8(symmetric=False)}, "symmetric false"),
        ({"weights": None, "input_activations": fp8()}, "weights: missing"),
        ({"output_activations": fp8()}, "output_activations are not supported"),
        ({"format": "int-quantized"}, "format 'int-quantized' is not supported for weights of"),
        ({"format": "mxfp8-quantized"}, "format 'mxfp8-quantized' is not supported for weights"),
    ],
)
def test_other_groups_are_refused(tmp_path, change, expected):
    group = {"targets": ["Linear"], "weights": fp8(), **change}
    section = tensors_section(format="float-quantized", config_groups={"group_0": group})
    assert expected in refused(tmp_path, section)


def test_digits_in_patterns_are_free(tmp_path):
    pattern = r"re:.*layers\.\d+\..*mlp\.experts\.[0-9]+\.(gate|up|down)_proj.*"
    assert read(tmp_path, tensors_section(targets=[pattern])).checkpoint_scheme(EXPERT) == "w4a16"


def group(targets, *, eight=False, inputs=None, **fields):
    weights = fp8() if eight else nvfp4()
    stored = "float-quantized" if eight else "nvfp4-pack-quantized"
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "format": stored,
        **fields,
    }


def choices(folder, module, ignore=(), **groups):
    section = tensors_section(format="mixed-precision", config_groups=groups, ignore=ignore)
    return [choice.scheme for choice in read(folder, section).choices(module)]


LOCAL = nvfp4(dynamic="local", strategy="tensor_group")
EIGHT = FP8ActivationScaling.WEIGHTS


def test_the_first_group_in_the_file_comes_first(tmp_path):
    ours, others = group(["re:.*layers.*"], inputs=LOCAL), group(["re:.*experts.*"])
    assert choices(tmp_path, EXPERT, z=ours, a=others) == ["w4a4", "w4a16"]
    assert choices(tmp_path, EXPERT, z=others, a=ours) == ["w4a16", "w4a4"]
    # A whole name is a match by name like a pattern.
    assert choices(tmp_path, EXPERT, z=ours, a=group([EXPERT])) == ["w4a4", "w4a16"]


def test_a_match_by_name_comes_before_one_by_class(tmp_path):
    for linear in ("Linear", "LinearBase", "QKVParallelLinear", "re:Linear", "re:.*Base"):
        first, second = group([linear], eight=True), group(["re:.*experts.*"])
        assert choices(tmp_path, EXPERT, a=first, b=second) == ["w4a16", EIGHT]
        assert choices(tmp_path, "a.q_proj", a=first, b=second) == [EIGHT]
    for experts in ("FusedMoE", "Qwen3MoeSparseMoeBlock", "Llama4TextExperts", "re:Fused"):
        groups = {"a": group([experts]), "b": group(["Linear"], eight=True)}
        assert choices(tmp_path, EXPERT, **groups)[0] == "w4a16"
        assert choices(tmp_path, "model.layers.0.mlp.shared_expert.up_proj", **groups) == [EIGHT]
    block = "model.layers.0.mlp.experts"
    for target in (block, r"re:.*\.mlp\.experts$"):
        assert choices(tmp_path, EXPERT, a=group([target])) == ["w4a16"]
        assert choices(tmp_path, f"{block}.gate_up_proj", a=group([target])) == ["w4a16"]


def test_what_is_ignored_comes_first(tmp_path):
    groups = {"a": group([EXPERT]), "b": group(["Linear"])}
    assert choices(tmp_path, EXPERT, ["re:.*experts.*"], **groups) == [None]
    assert choices(tmp_path, EXPERT, ["Linear"], **groups) == [None]


def test_a_group_that_is_not_supported_is_refused_where_no_other_fits(tmp_path):
    integers = group(["re:.*experts.*"], weights={"type": "int", "num_bits": 4, "group_size": 128})
    assert choices(tmp_path, EXPERT, a=integers, b=group(["Linear"])) == ["w4a16"]
    with pytest.raises(CheckpointError, match="expected type 'float' with 4 bits"):
        choices(tmp_path, EXPERT, a=integers, b=group(["a.q_proj"]))


def test_cache_of_keys_and_values(tmp_path):
    file = modelopt_file(kv_cache_quant_algo="FP8")
    section = modelopt_section(kv_cache_scheme={"type": "float", "num_bits": 8, "dynamic": False})
    for arguments in ({"file": file}, {"section": section}, {"file": file, "section": section}):
        folder = tmp_path / "-".join(arguments)
        folder.mkdir()
        found = read(folder, **arguments).kv_cache
        assert (found.algorithm, found.multiply_by_reciprocal) == ("FP8", True)
    assert read(tmp_path, modelopt_section()).kv_cache is None
    found = read(tmp_path, tensors_section(kv_cache_scheme=fp8(strategy="tensor"))).kv_cache
    assert (found.algorithm, found.multiply_by_reciprocal) == ("FP8", False)
    other = read(tmp_path, tensors_section(kv_cache_scheme={"type": "int", "num_bits": 8}))
    assert "'int' of 8 bits" in other.kv_cache.algorithm


def test_names_end_at_a_null_character(tmp_path):
    garbage = [f"{GATE}\0\0\u1234garbage", "lm_head\0", "\0"]
    garbage += ["backbone.layers.1.\0backbone.pt_name_sentinel*"]
    quant = read(tmp_path, file=modelopt_file(exclude=garbage))
    assert quant.checkpoint_scheme(GATE) is None
    assert quant.checkpoint_scheme("model.layers.1.mixer.in_proj") is None
    assert quant.checkpoint_scheme("model.layers.10.mixer.in_proj") == "w4a4"
    assert quant.checkpoint_scheme("lm_head") is None
    assert quant.checkpoint_scheme(EXPERT) == "w4a4"
    layers = {f"{EXPERT}.\0backbone.pt_name_sentinel": {"quant_algo": "NVFP4", "group_size": "16"}}
    quant = read(tmp_path, file=modelopt_file("MIXED_PRECISION", quantized_layers=layers))
    assert quant.checkpoint_scheme(EXPERT) == "w4a4"


def test_missing_lists(tmp_path):
    file = modelopt_file()
    del file["quantization"]["exclude_modules"]
    assert read(tmp_path, file=file).checkpoint_scheme(EXPERT) == "w4a4"


def test_every_decision_says_where_it_comes_from(tmp_path):
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}}
    mixed = read(tmp_path, file=modelopt_file("MIXED_PRECISION", quantized_layers=layers))
    said = mixed.decide(EXPERT).source
    assert said == (
        "hf_quant_config.json: quantization: quantized_layers: 'model.layers.0.mlp.experts' NVFP4"
    )
    assert (
        mixed.decide("a.q_proj").source
        == "hf_quant_config.json: quantization: not listed in quantized_layers"
    )
    quant = read(tmp_path, file=modelopt_file(exclude=["model.language_model.layers.0.mlp.gate*"]))
    assert quant.decide(GATE).source.endswith(
        "exclude_modules 'model.language_model.layers.0.mlp.gate*'"
    )
    assert quant.decide("a.q_proj").source.endswith("quant_algo NVFP4")


def test_modelopt_mixed_precision(tmp_path):
    layers = {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts.0.gate_proj": {"quant_algo": "W4A16_NVFP4"},
        "model.layers.1.mlp.experts.1.gate_proj": {"quant_algo": "W4A16_NVFP4"},
        "a.qkv_proj": {"quant_algo": "NVFP4"},
        "a.o_proj": {"quant_algo": "FP8"},
        "a.mx": {"quant_algo": "MXFP8", "group_size": 32},
        "a.awq": {"quant_algo": "NVFP4_AWQ", "group_size": 16},
        "a.svd": {"quant_algo": "NVFP4_SVD", "group_size": 16},
        "b": {"quant_algo": "NVFP4", "group_size": 64},
        "c": 7,
        "d.experts.0.up_proj": {"quant_algo": "NVFP4"},
        "d.experts.1.up_proj": {"quant_algo": "W4A16_NVFP4"},
    }
    quant = read(tmp_path, file=modelopt_file("MIXED_PRECISION", quantized_layers=layers))
    assert quant.checkpoint_scheme(EXPERT) == "w4a4"
    assert quant.checkpoint_scheme("model.layers.1.mlp.experts.gate_up_proj") == "w4a16"
    assert quant.checkpoint_scheme("a.k_proj") == "w4a4"
    assert quant.checkpoint_scheme("a.o_proj") == FP8ActivationScaling.STATIC
    assert quant.checkpoint_scheme("a.mx") is BlockFP8.MX
    assert quant.checkpoint_scheme("a.awq") == "w4a4"
    assert quant.checkpoint_scheme("lm_head") is None
    for module, expected in (
        ("a.svd", "'a.svd': quant_algo 'NVFP4_SVD' is not supported: it adds a low-rank product"),
        ("b", "the block size of NVFP4, or 32; got 64"),
        ("c", "expected an object, got 7"),
        (
            "d.experts.down_proj",
            "expected one algorithm for everything inside 'd.experts.down_proj'",
        ),
    ):
        with pytest.raises(CheckpointError, match=expected):
            quant.checkpoint_scheme(module)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_our_own_declaration_is_understood(tmp_path, algorithm):
    file, section = declaration(algorithm, ["lm_head"], "1.0")
    quant = read(tmp_path, section, file)
    assert quant.checkpoint_scheme(EXPERT) == {"NVFP4": "w4a4", "W4A16_NVFP4": "w4a16"}[algorithm]
    assert quant.checkpoint_scheme("lm_head") is None


def test_spellings_of_a_module():
    names = equivalent_names("language_model.model.layers.0.q_proj")
    assert names[:2] == (
        "language_model.model.layers.0.q_proj",
        "language_model.model.layers.0.qkv_proj",
    )
    assert set(names) == {
        f"{prefix}layers.0.{name}" for prefix in (*PREFIXES, "") for name in ("q_proj", "qkv_proj")
    }
    assert "visual" not in equivalent_names("model.visual")
    assert set(equivalent_names("lm_head")) == {
        "lm_head",
        *(f"{prefix}lm_head" for prefix in PREFIXES),
    }
    assert equivalent_names("mtp.fc") == ("mtp.fc",)
    assert "model.layers.0.mlp.experts.3.gate_proj" in equivalent_names(
        "model.layers.0.block_sparse_moe.experts.3.w1"
    )


NO_INPUTS = {"group_0": {"weights": nvfp4(), "input_activations": None, "targets": ["Linear"]}}


@pytest.mark.parametrize("groups", [NO_INPUTS, {"g": {"weights": nvfp4()}}])
@pytest.mark.parametrize("file", [None, modelopt_file(), modelopt_file("W4A16_NVFP4")])
def test_weights_alone_under_the_label_nvfp4(tmp_path, groups, file):
    quant = read(tmp_path, modelopt_section(config_groups=groups), file)
    assert quant.checkpoint_scheme(EXPERT) == "w4a16"
    said = quant.decide(EXPERT).source
    assert "no input_activations" in said or "W4A16_NVFP4" in said


def test_groups_that_quantize_activations_are_no_label(tmp_path):
    groups = {"g": {"weights": nvfp4(), "input_activations": nvfp4(), "targets": ["Linear"]}}
    quant = read(tmp_path, modelopt_section(config_groups=groups), modelopt_file())
    assert quant.decide(EXPERT)[::2] == ("w4a4", False)
    assert read(tmp_path, modelopt_section(), modelopt_file()).decide(EXPERT).labelled


def test_weights_alone_in_one_group_of_several(tmp_path):
    both = {
        "a": {"weights": nvfp4(), "targets": ["model.layers.0.mlp.experts"]},
        "b": {"weights": nvfp4(), "input_activations": nvfp4(), "targets": ["re:.*layers.*"]},
    }
    for algorithm, layers in (
        ("NVFP4", {}),
        ("MIXED_PRECISION", {"model.layers": {"quant_algo": "NVFP4"}}),
    ):
        section = modelopt_section(algorithm, config_groups=both, quantized_layers=layers)
        quant = read(tmp_path, section)
        assert quant.checkpoint_scheme(EXPERT) == "w4a16"
        assert quant.checkpoint_scheme("model.layers.1.mlp.experts.0.up_proj") == "w4a4"
        assert not quant.decide("model.layers.1.self_attn.q_proj").labelled
    eight = {"g": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}}
    quant = read(tmp_path, modelopt_section("FP8", config_groups=eight))
    assert quant.checkpoint_scheme("a.q_proj") is FP8ActivationScaling.WEIGHTS


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", "ModelOpt", None])
def test_the_file_of_modelopt_inside_of_config_json(tmp_path, method):
    section = modelopt_file(exclude=[GATE], kv_cache_quant_algo="FP8", group_size="16")
    section |= {} if method is None else {"quant_method": method}
    quant = read(tmp_path, section, modelopt_file(exclude=[GATE]))
    assert quant.checkpoint_scheme(EXPERT) == "w4a4"
    assert quant.checkpoint_scheme(GATE) is None
    assert quant.kv_cache.algorithm == "FP8"
    inner = {"text_config": {"quantization_config": section}}
    assert read_quant_config(tmp_path, inner).checkpoint_scheme(GATE) is None


def test_groups_without_a_method_are_those_of_compressed_tensors(tmp_path):
    section = tensors_section()
    del section["quant_method"]
    assert read(tmp_path, section).format is COMPRESSED_TENSORS
    assert read(tmp_path, section).checkpoint_scheme(EXPERT) == "w4a16"


def test_two_levels_of_one_config_must_agree(tmp_path):
    section = modelopt_file() | {"quant_method": "modelopt", "quant_algo": "FP8"}
    message = refused(tmp_path, section)
    assert "quant_algo 'FP8', but quantization: quant_algo 'NVFP4'" in message
    outer, inner = modelopt_section(), modelopt_section("W4A16_NVFP4")
    config = {"quantization_config": outer, "text_config": {"quantization_config": inner}}
    with pytest.raises(CheckpointError, match="disagree"):
        read_quant_config(tmp_path, config)
    config["text_config"] = {"quantization_config": dict(outer)}
    assert read_quant_config(tmp_path, config).checkpoint_scheme(EXPERT) == "w4a4"


@pytest.mark.parametrize("value", [None, "NONE", "none", "", "auto", "AUTO", "Null", "bfloat16"])
def test_names_of_a_cache_that_is_not_quantized(tmp_path, value):
    assert read(tmp_path, file=modelopt_file(kv_cache_quant_algo=value)).kv_cache is None
    assert read(tmp_path, modelopt_section(kv_cache_scheme=value)).kv_cache is None


@pytest.mark.parametrize(
    ("value", "algorithm"),
    [
        *((name, "FP8") for name in ("FP8", "fp8", "fp8_e4m3", "FP8_E4M3")),
        *((name, "NVFP4") for name in ("NVFP4", "nvfp4", "NVFP4_AFFINE")),
        *((name, name) for name in ("INT8", "FP8_E5M2")),
        (
            {"type": "float", "num_bits": 8, "dynamic": True},
            "'float' of 8 bits, strategy None, dyn",
        ),
        (
            {"type": "float", "num_bits": 8, "symmetric": False},
            "'float' of 8 bits, strategy None, ",
        ),
        ({"type": "float", "num_bits": 4}, "NVFP4"),
        ({"type": "int", "num_bits": 4}, "'int' of 4 bits"),
    ],
)
def test_names_of_a_cache_that_is_quantized(tmp_path, value, algorithm):
    for quant in (
        read(tmp_path, modelopt_section(kv_cache_scheme=value)),
        read(tmp_path, modelopt_section(kv_cache_quant_algo=value)),
        read(tmp_path, tensors_section(kv_cache_scheme=value)),
        read(tmp_path, {"quant_method": "mxfp4", "kv_cache_scheme": value}),
    ):
        assert quant.kv_cache.algorithm.startswith(algorithm)


def rotation(*locations, **fields):
    entries = [{"targets": ["re:.*"], "location": location} for location in locations]
    return {"config_groups": {"R": {"type": "hadamard", "apply": entries, **fields}}}


EACH_FORMAT = [
    tensors_section(),
    modelopt_section(),
    {"quant_method": "mxfp4"},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
]


@pytest.mark.parametrize("section", EACH_FORMAT, ids=lambda section: section["quant_method"])
@pytest.mark.parametrize("location", ["input", "output", "k_cache", "q_attn", "new", None, 3])
def test_rotations_at_run_time_are_refused(tmp_path, section, location):
    message = refused(tmp_path, section | {"transform_config": rotation("weight_input", location)})
    assert f"transform_config: 'R': location {location!r} is not supported" in message


@pytest.mark.parametrize("section", EACH_FORMAT, ids=lambda section: section["quant_method"])
@pytest.mark.parametrize(
    "transforms",
    [None, {}, {"config_groups": {}}, rotation(), rotation("weight_input", "weight_output")],
)
def test_rotations_of_stored_weights_are_part_of_them(tmp_path, section, transforms):
    read(tmp_path, section | {"transform_config": transforms}).decide(EXPERT)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ([], "transform_config: expected an object, got []"),
        ({"config_groups": {"R": 1}}, "R: expected an object, got 1"),
        ({"config_groups": {"R": {"apply": 1}}}, "'R': apply: expected a list of objects"),
        ({"other": [1]}, "transform_config: 'other' is not supported"),
    ],
)
def test_transforms_that_make_no_sense(tmp_path, transforms, expected):
    assert expected in refused(tmp_path, tensors_section(transform_config=transforms))


@pytest.mark.parametrize("section", EACH_FORMAT, ids=lambda section: section["quant_method"])
def test_sparse_weights(tmp_path, section):
    dense = {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "0:0"}
    for sparsity in (None, {}, {"format": None}, dense):
        read(tmp_path, section | {"sparsity_config": sparsity}).decide(EXPERT)
    for name in ("sparse-24-bitmask", "sparse-bitmask", "new", None):
        sparsity = {"format": name, "sparsity_structure": "2:4"}
        message = refused(tmp_path, section | {"sparsity_config": sparsity})
        assert f"sparsity_config: format {name!r} is not supported" in message


@pytest.mark.parametrize("section", EACH_FORMAT, ids=lambda section: section["quant_method"])
def test_keys_that_are_not_known(tmp_path, section, caplog):
    for empty in (None, False, 0, "", [], {}):
        read(tmp_path, section | {"new_option": empty})
    assert caplog.text == ""
    read(tmp_path, section | {"new_option": 0.5})
    assert "quantization_config: 'new_option' is not known and has no effect here" in caplog.text
    for value in ({"a": 1}, [1]):
        message = refused(tmp_path, section | {"new_section": value})
        assert "quantization_config: 'new_section' is not supported" in message


def test_keys_of_inner_objects_that_are_not_known(tmp_path, caplog):
    new = {"new": {"a": 1}}
    for arguments in (
        {"section": tensors_section(config_groups={"g": group(["Linear"], **new)})},
        {"section": tensors_section(config_groups={"g": group(["Linear"], weights=nvfp4(**new))})},
        {"section": modelopt_section(config_groups={"g": {"weights": nvfp4(), **new}})},
        {"section": modelopt_section(config_groups={"g": {"weights": nvfp4(**new)}})},
        {"file": modelopt_file(**new)},
        {"file": modelopt_file() | new},
    ):
        assert "'new' is not supported" in refused(tmp_path, **arguments)
        (tmp_path / "hf_quant_config.json").unlink(missing_ok=True)
    layers = {"a.q_proj": {"quant_algo": "NVFP4", **new}}
    section = modelopt_section("MIXED_PRECISION", quantized_layers=layers)
    with pytest.raises(CheckpointError, match="'new' is not supported"):
        read(tmp_path, section).decide("a.q_proj")


def test_every_key_that_the_tools_write_is_known(tmp_path, caplog):
    arguments = {
        **nvfp4(strategy="tensor_group", symmetric=True, scale_dtype="torch.float8_e4m3fn"),
        **{"actorder": "weight", "block_structure": None, "zp_dtype": "torch.float8_e4m3fn"},
        **{"observer": "minmax", "observer_kwargs": {"averaging_constant": 0.5}},
    }
    groups = {"g": group(["Linear"], weights=arguments, inputs=arguments | {"dynamic": "local"})}
    written = tensors_section(config_groups=groups, version="0.12", quantization_status="frozen")
    written |= {"global_compression_ratio": 1.5, "run_compressed": True, "sparsity_config": {}}
    assert read(tmp_path, written).checkpoint_scheme(EXPERT) == "w4a4"
    options = {"has_zero_point": False, "pre_quant_scale": True, "smoothquant_val": 0.5}
    read(tmp_path, file=modelopt_file("NVFP4_AWQ", group_size=16, **options, clamp_val=None))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"strategy": "group"}, "weights: strategy 'group' is not supported for NVFP4; supported"),
        ({"strategy": "channel"}, "weights: strategy 'channel'"),
        ({"symmetric": False}, "weights: symmetric false is not supported"),
        ({"dynamic": True}, "weights: dynamic True is not supported for NVFP4; supported: False"),
        ({"actorder": "group"}, "weights: actorder 'group' is not supported: it permutes columns"),
        ({"actorder": "dynamic"}, "weights: actorder 'dynamic'"),
        ({"actorder": True}, "weights: actorder True"),
        ({"scale_dtype": "torch.uint8"}, "weights: scale_dtype 'torch.uint8' is not supported"),
        ({"block_structure": [1, 16]}, "weights: block_structure [1, 16] is not supported"),
    ],
)
def test_arguments_of_nvfp4_that_no_kernel_has(tmp_path, change, expected):
    groups = {"g": group(["Linear"], weights=nvfp4(**change))}
    assert expected in refused(tmp_path, tensors_section(config_groups=groups))


@pytest.mark.parametrize("dynamic", ["local", False, None])
def test_activations_with_a_stored_global_scale(tmp_path, dynamic):
    section = tensors_section(nvfp4(dynamic=dynamic))
    assert read(tmp_path, section).checkpoint_scheme(EXPERT) == "w4a4"


def test_activations_without_a_stored_global_scale_are_refused(tmp_path):
    message = refused(tmp_path, tensors_section(nvfp4(dynamic=True)))
    assert "input_activations: dynamic True is not supported for NVFP4; supported: False, 'lo" in (
        message
    )
    assert "symmetric false" in refused(tmp_path, tensors_section(nvfp4(symmetric=False)))


@pytest.mark.parametrize(
    "change",
    [{"has_zero_point": True}, {"lora_rank": 32}, {"clamp_val": [1]}, {"use_meta_recipe": 1}],
)
def test_options_of_modelopt_that_change_the_function(tmp_path, change):
    (name,) = change
    assert f"{name} {change[name]!r} is not supported: " in refused(
        tmp_path, modelopt_section(**change)
    )


def test_all_problems_of_a_config_come_together(tmp_path):
    groups = {
        "a": group(["Linear"], weights=nvfp4(symmetric=False, actorder="group")),
        "b": group(["re:(?<=a)"], output_activations=nvfp4()),
    }
    section = tensors_section(config_groups=groups, transform_config=rotation("input"), new=[1])
    message = refused(tmp_path, section)
    for expected in (
        "symmetric false",
        "actorder",
        "output_activations",
        "transform_config",
        "new",
    ):
        assert expected in message


def test_five_stars_in_a_pattern(tmp_path):
    section = tensors_section(ignore=["re:.*layers.*0.*mlp.*experts.*gate.*"])
    quant = read(tmp_path, section)
    assert quant.checkpoint_scheme(EXPERT) is None
    assert quant.checkpoint_scheme("model.layers.1.mlp.experts.3.up_proj") == "w4a16"
