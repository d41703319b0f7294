"""Test post-training quantization: the tool's bytes, all architectures, formats."""

import json
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.files.checkpoint_edits import GIVEN, read_all
from support.files.drafted import in_bfloat16, stacked
from support.files.drafting_tensors import drafting_tensors
from support.files.hashed_weights import digest, hashed_weight
from support.files.unquantized import (
    ROUNDABLE,
    SMALL,
    dense_tensors,
    dequantize,
    dequantized,
    read_config,
    tokens,
    write_source,
)
from support.models.architecture import EXACT, KERNELS, run

from jax_nvfp4_moe import CheckpointError, load_model, load_moe, quantize_model
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.opening import open_checkpoint
from jax_nvfp4_moe.models.loading import find_unquantized
from jax_nvfp4_moe.numerics import nvfp4 as formats
from jax_nvfp4_moe.numerics.rounding import ALGORITHMS, quantize_weight
from jax_nvfp4_moe.quantization.calibration import calibrate

IDS = tokens().reshape(-1)
WINDOW = tokens().shape[1]
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Quantize `SMALL` in both formats, and return the folder and the reports."""
    folder = tmp_path_factory.mktemp("small")
    reports = {
        format: quantize_model(
            SMALL / "source", folder / format, token_ids=IDS, window=WINDOW, format=format
        )
        for format in ("modelopt", "compressed-tensors")
    }
    return folder, reports


def differing(ours, theirs):
    """Return the names of tensors whose dtype, shape or bytes differ."""
    return [
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours
        or name not in theirs
        or (ours[name].dtype, ours[name].shape) != (theirs[name].dtype, theirs[name].shape)
        or ours[name].tobytes() != theirs[name].tobytes()
    ]


def test_all_tensors_are_those_of_modelopt_to_the_byte(small):
    """Only input scales may differ slightly, because the forward passes sum in another order.

    The tool ran the model in float32 and wrote the dense tensors in float32. Their values are equal
    to ours.
    """
    ours, theirs = read_all(small[0] / "modelopt"), read_all(SMALL / "modelopt")
    for name, tensor in ours.items():
        if tensor.dtype == ml_dtypes.bfloat16:
            ours[name] = tensor.astype(np.float32)
    assert [name for name in differing(ours, theirs) if not name.endswith("input_scale")] == []
    scales = [name for name in theirs if name.endswith("input_scale")]
    assert len(scales) == 16
    for name in scales:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    # Negative control: a scale in the place of another one is found.
    values = np.unique([theirs[name] for name in scales])
    assert len(values) == 4  # of two layers with two products each
    assert (np.diff(values) > 1e-4 * values[1:]).all()


def test_the_source_has_blocks_that_tell_roundings_apart(small):
    """Negative control: `formats.quantize` gives other bytes."""
    weight = read_all(SMALL / "source")[f"{EXPERTS}.0.up_proj.weight"]
    theirs = read_all(SMALL / "modelopt")
    name = f"{EXPERTS}.0.up_proj"
    scale = theirs[f"{name}.weight_scale_2"]
    packed, block_scale, _ = map(np.asarray, formats.quantize(jnp.asarray(weight), scale))
    assert (block_scale != theirs[f"{name}.weight_scale"]).sum() >= 2
    assert (packed != theirs[f"{name}.weight"]).any()


def test_modules_left_out_are_those_of_modelopt(small):
    ours, theirs = read_config(small[0] / "modelopt"), read_config(SMALL / "modelopt")
    key = "quantization_config"
    for field in ("ignore", "quant_algo", "config_groups", "quant_method"):
        assert ours[key][field] == theirs[key][field]
    file = json.loads((small[0] / "modelopt" / "hf_quant_config.json").read_text())["quantization"]
    assert file["exclude_modules"] == theirs[key]["ignore"]
    assert {k: v for k, v in ours.items() if k != key} == read_config(SMALL / "source")


def test_the_report_counts(small):
    report = small[1]["modelopt"]
    assert report["quantized_matrices"] == 4 * 3 + 4
    assert (report["scheme"], report["tokens"]) == ("w4a4", IDS.size)
    for name, folder in (("bytes", small[0] / "modelopt"), ("source_bytes", SMALL / "source")):
        assert report[name] == sum(tensor.nbytes for tensor in read_all(folder).values())
    assert report["experts_without_tokens"] == {}


def test_compressed_tensors_has_the_same_codes_and_divides(small):
    ct, modelopt = read_all(small[0] / "compressed-tensors"), read_all(small[0] / "modelopt")
    for name, tensor in modelopt.items():
        if tensor.dtype == np.uint8:
            stem = name.removesuffix(".weight")
            np.testing.assert_array_equal(ct[f"{stem}.weight_packed"], tensor)
            scales = (tensors[f"{stem}.weight_scale"].view(np.uint8) for tensors in (ct, modelopt))
            np.testing.assert_array_equal(*scales)
            divisor, scale = ct[f"{stem}.weight_global_scale"], modelopt[f"{stem}.weight_scale_2"]
            assert divisor.shape == (1,)
            np.testing.assert_allclose(1 / divisor[0], scale, rtol=2e-7)


def test_compressed_tensors_declares_what_its_tool_declares(small):
    """Runtimes read from it that activations have a calibrated scale and scales of their blocks."""
    folders = small[0] / "compressed-tensors", GIVEN / "qwen3moe-ct-w4a4"
    ours, theirs = (
        read_config(folder)["quantization_config"]["config_groups"]["group_0"] for folder in folders
    )
    for part in ("weights", "input_activations"):
        fields = ours[part].keys() - {"scale_dtype"}  # of later versions
        assert fields >= {"num_bits", "type", "symmetric", "group_size", "strategy", "dynamic"}
        assert {key: ours[part][key] for key in fields} == {
            key: theirs[part][key] for key in fields
        }


def test_compressed_tensors_has_an_input_scale_for_the_second_product_of_each_expert(small):
    ct, modelopt = read_all(small[0] / "compressed-tensors"), read_all(small[0] / "modelopt")
    scales = {
        part: [1 / ct[f"{EXPERTS}.{e}.{part}_proj.input_global_scale"][0] for e in range(4)]
        for part in ("gate", "up", "down")
    }
    assert len(set(scales["gate"] + scales["up"])) == 1
    assert len(set(scales["down"])) == 4
    for part in scales:
        whole = modelopt[f"{EXPERTS}.0.{part}_proj.input_scale"]
        np.testing.assert_allclose(max(scales[part]), whole, rtol=2e-7)


def test_what_was_written_loads_and_comes_near_the_source(small):
    ids = IDS.reshape(-1, WINDOW)[:2]
    expected = np.asarray(run(load_model(SMALL / "source", dtype=jnp.float32), ids))
    for format, scheme, reached in (
        ("modelopt", "w4a4", 0.132),
        ("compressed-tensors", "w4a16", 0.091),
    ):
        asked = KERNELS | {"scheme": scheme}
        actual = np.asarray(run(load_model(small[0] / format, **asked), ids))
        error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
        # Rounding random weights to 4 bits causes this error. A tenth more or less is another
        # rounding.
        assert 0.9 * reached < error < 1.1 * reached


# Checkpoints that ModelOpt wrote for each architecture. Those with stacked experts are left out,
# because they have one scale per layer.
WRITTEN = (
    "mixtral-window-modelopt-w4a16",
    "deepseek_v3-direct-modelopt-w4a16",
    "glm4_moe-groups-modelopt-w4a16",
    "minimax_m2-modelopt-w4a16",
    "nemotron_h-latent-modelopt-w4a16",
    "qwen3_next-options-modelopt-w4a16",
    "qwen3_5_moe-modelopt-w4a16",
    "olmoe-bias-modelopt-w4a16",
    "qwen3_vl_moe-modelopt-w4a16",
    "qwen2_moe-modelopt-w4a16",
    "ernie4_5_moe-modelopt-w4a16",
    "mistral4-modelopt-w4a16",
    "deepseek_v32-modelopt-w4a16",
    "deepseek_v4-modelopt-w4a16",
    "glm_moe_dsa-modelopt-w4a16",
    "granitemoeshared-modelopt-w4a16",
    "granitemoehybrid-modelopt-w4a16",
    "hunyuan_v1_moe-modelopt-w4a16",
    "exaone_moe-modelopt-w4a16",
    "lfm2_moe-modelopt-w4a16",
    "kimi_linear-modelopt-w4a16",
    "bailing_hybrid-modelopt-w4a16",
    "gemma4-modelopt-w4a16",
    "minimax_m3-modelopt-w4a16",
    "step3p7-modelopt-w4a16",
    "qwen3_5-modelopt-w4a16",
    "gemma3-modelopt-w4a16",
    "gemma4_dense-modelopt-w4a16",
    "gemma4_edge-modelopt-w4a16",
    "nemotron_h_dense-modelopt-w4a16",
    "exaone4-modelopt-w4a16",
    "smollm3-modelopt-w4a16",
    "ministral3-modelopt-w4a16",
    "phi3-modelopt-w4a16",
    "granite-modelopt-w4a16",
    "granitehybrid-modelopt-w4a16",
    "olmo2-modelopt-w4a16",
    "olmo3-modelopt-w4a16",
    "seed_oss-modelopt-w4a16",
    "apertus-modelopt-w4a16",
    "afmoe-modelopt-w4a16",
    "hy_v3-modelopt-w4a16",
    "solar_open-modelopt-w4a16",
    "dots1-modelopt-w4a16",
    "glm4v_moe-modelopt-w4a16",
    "phimoe-modelopt-w4a16",
    "laguna-modelopt-w4a16",
    "cohere2_moe-modelopt-w4a16",
    "mimo_v2_flash-modelopt-w4a16",
    "glm5_next-modelopt-w4a16",
    "qwen4_exp-modelopt-w4a16",
)


NO_LINEARS = (
    *(".conv1d", ".conv.conv", ".A_log", ".embed_tokens"),
    *(".wo_a", ".ape", "_fn", ".hc_head*"),  # of DeepSeek-V4
    *("multi_modal_projector*", ".embed_tokens_per_layer"),  # of Gemma 3 and 4
    *("_hc*", "_compress_ape", "_compress_gate"),  # of GLM-5-Next
)


def without_marks(names):
    r"""Return sorted names without the marks that the tool appends to names of Nemotron-H.

    For Granite, Hy3 and Phi-3.5-MoE, the tool names the router as the model in memory does. Files
    have a `layer` below it, or call it `router.gate` or `gate`.
    """
    plain = (name.replace("block_sparse_moe.router*", "block_sparse_moe.router") for name in names)
    plain = (name.replace("mlp.router*", "mlp.gate") for name in plain)
    plain = (name.replace("block_sparse_moe.gate", "block_sparse_moe.router") for name in plain)
    return sorted(name.split("\0")[0].rstrip(".") for name in plain)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_dequantized_checkpoint_gets_its_bytes_back(tmp_path, name):
    """A block's largest magnitude is 6 times its scale, so quantization finds the scale again."""
    source = dequantized(name, tmp_path / "source", ROUNDABLE)
    report = quantize_model(source, tmp_path / "q")
    assert report["scheme"] == "w4a16"
    ours, theirs = read_all(tmp_path / "q"), read_all(GIVEN / name)
    changed = differing(ours, theirs)
    assert [n for n in changed if not n.endswith("weight_scale_2")] == []
    for scale in changed:  # the source rounded 2688 * scale
        np.testing.assert_array_max_ulp(ours[scale], theirs[scale], 1)
    key = "quantization_config"
    excluded, expected = (
        without_marks(read_config(folder)[key]["ignore"])
        for folder in (tmp_path / "q", GIVEN / name)
    )
    # Modules that are not linears may be listed or not: the tool itself lists some convolutions,
    # and the embedding of each family but Gemma 4.
    assert [n for n in excluded if n in expected or not n.endswith(NO_LINEARS)] == expected


DIGESTS = json.loads((GIVEN / "modelopt-digests.json").read_text())


@pytest.mark.parametrize("name", DIGESTS)
def test_the_bytes_of_each_family_are_those_of_modelopt(tmp_path, name):
    """The tool quantized the same weights, whose values do not come from its own scales."""
    tensors = dense_tensors(read_all(GIVEN / name))
    for module in DIGESTS[name]:
        weight = f"{module}.weight"
        tensors[weight] = hashed_weight(weight, tensors[weight].shape)
    quantize_model(write_source(tmp_path / "m", tensors, read_config(GIVEN / name)), tmp_path / "q")
    written = read_all(tmp_path / "q")
    found = {
        module: digest(
            {
                end: written[f"{module}.{end}"].tobytes()
                for end in ("weight", "weight_scale", "weight_scale_2")
            }
        )
        for module in DIGESTS[name]
    }
    assert found == DIGESTS[name]


def test_digests_tell_roundings_apart():
    """Negative control: `formats.quantize` has other scales for a block of zeros and a tiny one."""
    module = "model.layers.0.self_attn.o_proj"
    weight = jnp.asarray(hashed_weight(f"{module}.weight", (64, 64)))
    scale = np.float32(np.abs(weight).max()) / np.float32(2688)
    found = []
    for quantize in (quantize_weight, formats.quantize):
        parts = map(np.asarray, quantize(weight, scale))
        ends = ("weight", "weight_scale", "weight_scale_2")
        found.append(digest({end: a.tobytes() for end, a in zip(ends, parts, strict=True)}))
    given = DIGESTS["qwen2_moe-modelopt-w4a16"][module]
    assert found[0] == given
    assert found[1] != given


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss-modelopt-w4a16", "llama4_text-modelopt-w4a16"])
def test_stacked_experts_become_one_tensor_each(tmp_path, name):
    """Stacks ``[e, k, n]`` become one tensor per expert, with numbers close to the source's."""
    source = dequantized(name, tmp_path / "source")
    quantize_model(source, tmp_path / "q")
    ours, dense = read_all(tmp_path / "q"), read_all(source)
    assert not any(key in ours for key in dense if ".experts." in key)
    layers = {key.split(".experts.")[0] for key in dense if ".experts." in key}
    for prefix in layers:
        gate_up, down = (dense[f"{prefix}.experts.{p}_proj"] for p in ("gate_up", "down"))
        gate, up = np.split(gate_up, 2, -1)
        bias = dense.get(f"{prefix}.experts.gate_up_proj_bias")
        if name.startswith("gpt_oss"):
            gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
            np.testing.assert_array_equal(ours[f"{prefix}.experts.1.up_proj.bias"], bias[1, 1::2])
        for part, stack in (("gate", gate), ("up", up), ("down", down)):
            for expert in range(len(stack)):
                stem = f"{prefix}.experts.{expert}.{part}_proj"
                parts = (ours[f"{stem}.{p}"] for p in ("weight", "weight_scale", "weight_scale_2"))
                assert relative_error(dequantize(*parts), stack[expert].T) < 0.06
    ids = jnp.asarray(np.arange(24, dtype=np.int32)[None] % 60)
    models = (load_model(folder, **EXACT) for folder in (tmp_path / "q", source))
    ours, theirs = (np.asarray(run(model, ids)) for model in models)
    assert relative_error(ours, theirs) < 0.1


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def test_experts_stacked_by_rows(tmp_path):
    """Stacks ``[e, 2i, h]``, as in Qwen3.5's files, give the bytes of experts one by one."""
    dense = dense_tensors(read_all(GIVEN / "qwen3_5_moe-modelopt-w4a16"))
    config = read_config(GIVEN / "qwen3_5_moe-modelopt-w4a16")
    one_by_one = write_source(tmp_path / "each", dense, config)
    for prefix in {key.split(".experts.")[0] + ".experts" for key in dense if ".experts." in key}:
        each = {
            part: np.stack([dense.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(4)])
            for part in ("gate", "up", "down")
        }
        dense[f"{prefix}.gate_up_proj"] = np.concatenate([each["gate"], each["up"]], 1)
        dense[f"{prefix}.down_proj"] = each["down"]
    stacked = write_source(tmp_path / "stacked", dense, config)
    for name, source in (("a", one_by_one), ("b", stacked)):
        quantize_model(source, tmp_path / name)
    assert differing(read_all(tmp_path / "a"), read_all(tmp_path / "b")) == []


def test_shards_in_and_out(tmp_path):
    tensors, config = read_all(SMALL / "source"), read_config(SMALL / "source")
    source = write_source(tmp_path / "source", tensors, config, shard_bytes=30_000)
    assert len(list(source.glob("*.safetensors"))) > 2
    quantize_model(source, tmp_path / "shards", shard_bytes=15_000)
    quantize_model(SMALL / "source", tmp_path / "whole")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    written = read_all(tmp_path / "shards")
    assert index["weight_map"].keys() == written.keys()
    assert all(p.stat().st_size < 25_000 for p in (tmp_path / "shards").glob("*.safetensors"))
    assert differing(written, read_all(tmp_path / "whole")) == []


def test_a_value_beyond_float16_is_not_made_infinite(tmp_path):
    tensors, config = read_all(SMALL / "source"), read_config(SMALL / "source")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][3] = 1e6
    source = write_source(tmp_path / "source", tensors, config)
    with pytest.raises(CheckpointError, match=r"norm\.weight: a value is too large for float16"):
        quantize_model(source, tmp_path / "q", dtype="float16")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_float_sources(tmp_path, dtype):
    """Weights that are exact in the dtype have equal codes. Others keep their dtype or are cast."""
    tensors = {k: v.astype(dtype) for k, v in read_all(SMALL / "source").items()}
    exact = dtype is np.float32
    source = write_source(tmp_path / "source", tensors, read_config(SMALL / "source"))
    quantize_model(source, tmp_path / "kept")
    quantize_model(source, tmp_path / "cast", dtype="bfloat16")
    kept, cast = read_all(tmp_path / "kept"), read_all(tmp_path / "cast")
    assert kept["model.norm.weight"].dtype == dtype
    assert cast["model.norm.weight"].dtype == ml_dtypes.bfloat16
    assert read_config(tmp_path / "cast")["dtype"] == "bfloat16"
    if exact:
        theirs = {k: v for k, v in read_all(SMALL / "modelopt").items() if "input_scale" not in k}
        assert differing(kept, theirs) == []


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("glm4_moe-groups-modelopt-w4a16", "e_score_correction_bias"),
        ("lfm2_moe-modelopt-w4a16", "expert_bias"),
    ],
)
def test_the_correction_of_a_router_keeps_its_dtype(tmp_path, name, bias):
    """Families have other names for it. A bias in bfloat16 would choose other experts."""
    source = dequantized(name, tmp_path / "source")
    expected = {k: v for k, v in read_all(source).items() if k.endswith(f".{bias}")}
    assert expected
    quantize_model(source, tmp_path / "q", modules="experts", dtype="bfloat16")
    written = read_all(tmp_path / "q")
    for key, value in expected.items():
        assert value.dtype == np.float32
        assert written[key].dtype == np.float32
        np.testing.assert_array_equal(written[key], value)


def test_experts_alone(tmp_path):
    quantize_model(SMALL / "source", tmp_path / "q", modules="experts")
    written = read_all(tmp_path / "q")
    codes = [name for name, tensor in written.items() if tensor.dtype == np.uint8]
    assert len(codes) == 12
    assert all(".experts." in name for name in codes)
    ignore = read_config(tmp_path / "q")["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn*" in ignore
    load_model(tmp_path / "q")


def test_modules_can_be_excluded(tmp_path):
    patterns = ["*.self_attn", f"{EXPERTS}*"]
    quantize_model(SMALL / "source", tmp_path / "a", exclude=patterns[:1])
    assert read_all(tmp_path / "a")["model.layers.0.self_attn.q_proj.weight"].dtype != np.uint8
    quantize_model(
        SMALL / "source", tmp_path / "b", exclude=patterns[1:], format="compressed-tensors"
    )
    written = read_all(tmp_path / "b")
    assert "model.layers.0.self_attn.q_proj.weight_packed" in written
    assert written[f"{EXPERTS}.0.up_proj.weight"].dtype == ml_dtypes.bfloat16
    for name in "ab":
        load_model(tmp_path / name)


def test_a_wildcard_does_not_reach_layers_of_more_digits(tmp_path):
    """Only layer 1 is not quantized; "layers.1*" would leave out layer 10 as well."""
    config = read_config(SMALL / "source") | {"num_hidden_layers": 11}
    tensors = read_all(SMALL / "source")
    layer = {k: v for k, v in tensors.items() if ".layers.0." in k}
    for index in range(1, 11):
        tensors |= {k.replace(".layers.0.", f".layers.{index}."): v for k, v in layer.items()}
    source = write_source(tmp_path / "source", tensors, config)
    quantize_model(source, tmp_path / "q", exclude=["model.layers.1"])
    assert "model.layers.1.*" in read_config(tmp_path / "q")["quantization_config"]["ignore"]
    load_model(tmp_path / "q")


def test_files_that_go_with_the_weights_are_copied(tmp_path):
    source = write_source(
        tmp_path / "source", read_all(SMALL / "source"), read_config(SMALL / "source")
    )
    kept = ("tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json")
    for name in (*kept, "pytorch_model.bin", "model.safetensors.index.json.bak", "notes.md"):
        (source / name).write_text("{}")
    (source / "folder.json").mkdir()
    template = "additional_chat_templates/tool_use.jinja"
    for name in (template, "original/other.json"):
        (source / name).parent.mkdir()
        (source / name).write_text("{}")
    quantize_model(source, tmp_path / "q")
    files = [path for path in (tmp_path / "q").rglob("*") if path.is_file()]
    written = {path.relative_to(tmp_path / "q").as_posix() for path in files}
    assert written == {*kept, template, "config.json", "hf_quant_config.json", "model.safetensors"}


def test_what_is_excluded_is_not_reported_and_may_be_broken(tmp_path, caplog):
    """Experts that are not quantized need no calibration, and no finite inputs."""
    tensors, config = read_all(SMALL / "source"), read_config(SMALL / "source")
    tensors["model.layers.0.post_attention_layernorm.weight"][5] = float("inf")
    assert config["num_hidden_layers"] == 1
    source = write_source(tmp_path / "source", tensors, config)
    given = {"token_ids": np.full_like(IDS, 5), "window": WINDOW}
    report = quantize_model(source, tmp_path / "q", exclude=["*.experts"], **given)
    assert report["quantized_matrices"] == 4
    assert report["experts_without_tokens"] == {}
    assert "received no token" not in caplog.text


def test_the_dtype_of_a_multimodal_config_is_written_in_both_places(tmp_path):
    tensors, config = read_all(SMALL / "source"), read_config(SMALL / "source")
    names = ("architectures", "model_type")
    outer = {name: config[name] for name in names} | {"torch_dtype": "float32"}
    outer["text_config"] = config | {"dtype": "float32"}
    source = write_source(tmp_path / "source", tensors, outer)
    quantize_model(source, tmp_path / "q", modules="experts", dtype="float16")
    written = read_config(tmp_path / "q")
    assert written["torch_dtype"] == written["text_config"]["dtype"] == "float16"


def test_experts_without_tokens_are_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jax_nvfp4_moe"):
        report = quantize_model(
            SMALL / "source",
            tmp_path / "q",
            token_ids=np.full_like(IDS, 5),
            window=WINDOW,
            format="compressed-tensors",
        )
    (unseen,) = report["experts_without_tokens"].values()
    assert len(unseen) == 2  # two of four experts are chosen for the one token
    assert f"{EXPERTS}: 2 of 4 experts received no token" in caplog.text
    written = read_all(tmp_path / "q")
    scales = [written[f"{EXPERTS}.{e}.down_proj.input_global_scale"][0] for e in range(4)]
    # This scale divides, so the smallest one belongs to the layer's largest input.
    largest = min(scale for e, scale in enumerate(scales) if e not in unseen)
    assert largest != 1
    assert [scales[e] for e in unseen] == [largest] * len(unseen)


global_scale_of = jax.jit(formats.global_scale_of)


@examples(30)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.floats(-6, 4),
)
def test_rounding_by_the_maximum_has_the_values_of_the_definition(seed, dtype, power):
    """Values are equal where block scales are normal numbers and no block scale is zero."""
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.uniform(-2, 2, (4, 2, 1)))
    x = (rng.standard_normal((4, 2, 16)) * spread * 2.0**power).reshape(4, 32)
    x = jnp.asarray(x.astype(np.float32).astype(jnp.dtype(dtype)))
    scale = np.asarray(global_scale_of(x))
    packed, block_scale, _ = map(np.asarray, quantize_weight(x, scale, algorithm="max"))
    expected = [np.asarray(part) for part in formats.quantize(x, scale)]
    np.testing.assert_array_equal(block_scale.view(np.uint8), expected[1].view(np.uint8))
    np.testing.assert_array_equal(dequantize(packed, block_scale, scale), dequantize(*expected))


def test_zeros_and_subnormal_scales():
    """ModelOpt gives a block of zeros the scale 1, and no block a scale below 2^-9."""
    x = np.zeros((2, 32), np.float32)
    x[0, 0], x[1, 16] = 2688.0, 1e-4
    packed, block_scale, _ = map(np.asarray, quantize_weight(x, np.float32(1.0)))
    assert block_scale.astype(np.float32).tolist() == [[448.0, 1.0], [1.0, 2.0**-9]]
    assert packed[0, 0] == 7
    assert np.count_nonzero(packed) == 1


def test_an_expert_of_zeros(tmp_path):
    tensors = read_all(SMALL / "source")
    for part in ("gate", "up", "down"):
        tensors[f"{EXPERTS}.2.{part}_proj.weight"] *= 0
    source = write_source(tmp_path / "source", tensors, read_config(SMALL / "source"))
    for format in ("modelopt", "compressed-tensors"):
        quantize_model(source, tmp_path / format, format=format)
        params = load_moe(tmp_path / format, 0, **EXACT).experts.params.get_value()
        for weight in (params.gate_up, params.down):
            assert not np.asarray(weight.dequantize())[2].any()


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "max"])
def test_other_algorithms_write_the_same_format(small, tmp_path, algorithm):
    """The same reader finds weights that are nearer to the source's than those of "max".

    Programs of other algorithms take long to compile. So linears are quantized too only if that
    needs the importance of their inputs.
    """
    truth = np.asarray(load_moe(SMALL / "source", 0, **EXACT).experts.params.get_value().down)
    ids, modules = (IDS, "all") if ALGORITHMS[algorithm].needs_importance else (None, "experts")
    options = {"algorithm": algorithm, "token_ids": ids, "window": WINDOW, "modules": modules}
    quantize_model(SMALL / "source", tmp_path / "q", scheme="w4a16", **options)
    errors = []
    for folder in (tmp_path / "q", small[0] / "modelopt"):
        down = load_moe(folder, 0, **EXACT).experts.params.get_value().down
        errors.append(np.linalg.norm(np.asarray(down.dequantize()) - truth))
    assert errors[0] < 0.99 * errors[1]


def test_each_matrix_is_weighted_by_its_own_inputs(tmp_path):
    algorithm = "weighted_search"
    given = {"algorithm": algorithm, "token_ids": IDS, "window": WINDOW, "scheme": "w4a16"}
    quantize_model(SMALL / "source", tmp_path / "q", modules="experts", **given)
    with open_checkpoint(SMALL / "source") as checkpoint:
        seen = calibrate(find_unquantized(checkpoint), tokens(), squares=True)
    source, written = read_all(SMALL / "source"), read_all(tmp_path / "q")

    def scales(expert, part, importance):
        name = f"{EXPERTS}.{expert}.{part}_proj.weight"
        scale, found = written[f"{name}_scale_2"], {"importance": importance}
        return np.asarray(quantize_weight(source[name], scale, algorithm=algorithm, **found)[1])

    for part, inputs in zip(("up", "down"), seen.experts[EXPERTS], strict=True):
        importance = inputs.importance()
        own = [written[f"{EXPERTS}.{expert}.{part}_proj.weight_scale"] for expert in range(4)]
        for expert in range(4):
            np.testing.assert_array_equal(scales(expert, part, importance[expert]), own[expert])
            assert (scales(expert, part, importance[expert - 1]) != own[expert]).any()


@pytest.mark.parametrize(
    ("name", "file", "format"),
    [
        ("qwen3_next-modelopt-w4a16", "model", "modelopt"),
        ("glm4_moe-groups-modelopt-w4a16", "mtp", "compressed-tensors"),
    ],
)
def test_drafting_layers_are_carried_over_to_the_byte(name, file, format, tmp_path):
    """Also those in a file of their own."""
    drafting = (stacked if file == "model" else in_bfloat16)(drafting_tensors(GIVEN / name))
    source = dequantized(name, tmp_path / "source")
    files = {"model": read_all(source)}
    files[file] = files.get(file, {}) | drafting
    for stem, tensors in files.items():
        write_safetensors(source / f"{stem}.safetensors", tensors)
    quantize_model(source, tmp_path / "quantized", format=format)
    written = read_all(tmp_path / "quantized")
    assert not differing({name: written.get(name) for name in drafting}, drafting)
    model = load_model(tmp_path / "quantized", draft="mtp", **EXACT)
    dense = load_model(source, draft="mtp", **EXACT)
    for found, expected in zip(
        jax.tree.leaves(model.drafter), jax.tree.leaves(dense.drafter), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
