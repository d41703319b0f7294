"""Test loading: arrays equal the tools' own bit for bit, and all problems are reported at once."""

import logging
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from support.files.checkpoint_edits import (
    CT,
    DEEPSEEK,
    EXPERTS,
    GIVEN,
    MOE,
    QWEN,
    TINY,
    W4A4,
    W4A16,
    build_model,
    build_moe,
    check,
    edited,
    load,
    load_moe,
    problems_of,
    read_all,
    remove_experts,
    tool_weight,
)

from jax_nvfp4_moe.checkpoint import CheckpointError, LoadOptions, open_checkpoint
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, read_header
from jax_nvfp4_moe.scheme import Scheme


@pytest.mark.parametrize("name", QWEN)
def test_weights_equal_the_tools_own(name):
    tensors, divides = read_all(GIVEN / name), name == CT
    with open_checkpoint(GIVEN / name) as checkpoint:
        model = load(checkpoint, build_model)
    params, checkpoint_scheme = model[-1]
    assert checkpoint_scheme == name.rpartition("-")[2]
    gate_up, down = (np.asarray(w.dequantize()) for w in (params.gate_up, params.down))
    for e in range(16):
        gate, up, out = (
            tool_weight(tensors, f"{EXPERTS}.{e}.{p}_proj", divides) for p in ("gate", "up", "down")
        )
        np.testing.assert_array_equal(gate_up[e], np.concatenate([gate, up]))
        np.testing.assert_array_equal(down[e], out)
    q_proj = model[3]
    module = "model.layers.0.self_attn.q_proj"
    np.testing.assert_array_equal(q_proj.weight.dequantize(), tool_weight(tensors, module, divides))
    np.testing.assert_array_equal(model[0], tensors["model.embed_tokens.weight"])
    assert model[1].checkpoint_scheme is None
    assert (q_proj.input_scale is None) == (checkpoint_scheme == "w4a16")


@pytest.mark.parametrize("name", QWEN)
def test_scales_multiply(name):
    tensors = read_all(GIVEN / name)
    params, _ = load_moe(GIVEN / name)
    for e in range(16):
        for part, projection in enumerate(("gate_proj", "up_proj")):
            module = f"{EXPERTS}.{e}.{projection}"
            if name == CT:
                stored = tensors[f"{module}.weight_global_scale"][0]
                assert params.gate_up.global_divisor[e, part] == stored
                assert params.gate_up.global_scale[e, part] == np.float32(1) / stored
            else:
                assert params.gate_up.global_divisor is None
                stored = tensors[f"{module}.weight_scale_2"]
                assert params.gate_up.global_scale[e, part] == stored
    if name == W4A16:
        assert params.gate_up_input_scale is None
    else:
        stored = tensors[f"{EXPERTS}.5.down_proj.input{'_global' * (name == CT)}_scale"].reshape(())
        expected = np.float32(1) / stored if name == CT else stored
        assert params.down_input_scale[5] == expected


def fake_quantize(x, g):
    """Round activations to NVFP4 and back, as the README of ModelOpt's export defines it."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    amax = np.abs(blocks).max(-1, keepdims=True)
    s8 = np.minimum(amax / (np.float32(6) * g), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    s = s8.astype(np.float32) * g
    codes = np.divide(blocks, s, out=np.zeros_like(blocks), where=s != 0)
    return (codes.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * s).reshape(
        x.shape
    )


@pytest.mark.parametrize(
    ("folder", "reference", "intermediate"),
    [
        *((GIVEN / name, GIVEN / name, 128) for name in QWEN),
        (GIVEN / DEEPSEEK, GIVEN / DEEPSEEK, 96),
        (TINY, GIVEN / "tiny-python-moe-reference", 192),
    ],
    ids=lambda value: value.name if isinstance(value, pathlib.Path) else "",
)
def test_experts_reproduce_the_reference(folder, reference, intermediate):
    scheme = "w4a4." if folder == TINY else ""
    with open_tensors_file(reference / "reference.safetensors") as tensors:
        x, ids, weights, expected = (
            tensors.read(f"{scheme}layers.1.moe.{name}")
            for name in ("experts_input", "topk_indices", "topk_weights", "experts_output")
        )
    x, expected = x.reshape(-1, 256), expected.reshape(-1, 256)
    ids, weights = ids.reshape(len(x), -1), weights.reshape(len(x), -1)
    with open_checkpoint(folder) as checkpoint:
        params, checkpoint_scheme = load(
            checkpoint,
            lambda w: w.experts(EXPERTS, 16, 256, intermediate),
            LoadOptions(only=EXPERTS),
        )
    gate_up, down = (np.asarray(w.dequantize()) for w in (params.gate_up, params.down))
    i = intermediate

    def rounded(x, scales, e):
        return x if checkpoint_scheme == "w4a16" else fake_quantize(x, np.asarray(scales)[e])

    y = np.zeros_like(x)
    for e in range(16):
        rows, slots = np.nonzero(ids == e)
        u = rounded(x[rows], params.gate_up_input_scale, e) @ gate_up[e].T
        a = u[:, :i] / (1 + np.exp(-u[:, :i])) * u[:, i:]
        d = rounded(a, params.down_input_scale, e) @ down[e].T
        np.add.at(y, rows, weights[rows, slots, None] * d)
    # The bound is from the README of the given checkpoints; swapped nibbles give an error of 1.5.
    assert np.linalg.norm(y - expected) <= 1e-5 * np.linalg.norm(expected)


def open_tensors_file(path):
    problems = []
    header = read_header(path, path.name, problems)
    assert not problems
    return Tensors({path.name: path}, header)


def test_a_table_reads_nothing_and_gives_shapes():
    seen = []
    with open_checkpoint(GIVEN / CT) as checkpoint:
        checkpoint.tensors.close()
        nbytes = check(checkpoint, lambda w: seen.extend(build_model(w)))
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), seen[-1].value)
    with open_checkpoint(GIVEN / CT) as checkpoint:
        params = load(checkpoint, build_model)[-1].params
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), params)
    assert nbytes == sum(a.nbytes for a in read_all(GIVEN / CT).values())


def test_arrays_are_not_copied_on_a_cpu():
    array = load_moe(GIVEN / W4A4).params.down.packed
    assert isinstance(array, jax.Array)
    assert array.unsafe_buffer_pointer() % 64 == 0


def test_dense_arrays_take_the_dtype_asked_for():
    def build(w):
        norm = w.array("model.norm.weight", (256,))
        router = w.linear("model.layers.0.mlp.gate", 16, 256, dtype=np.float32)
        return norm, router

    options = LoadOptions(dtype=np.float16, only="model.norm")
    with open_checkpoint(GIVEN / W4A4) as checkpoint:
        norm, router = load(checkpoint, build, options)
    assert (norm.dtype, router.weight.dtype) == (np.float16, np.float32)


def test_a_progress_bar_is_drawn_on_standard_error_when_asked(capfd):
    load_moe(GIVEN / W4A4, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading" in err
    load_moe(GIVEN / W4A4)
    assert capfd.readouterr() == ("", "")


def test_missing_misshapen_and_surplus_tensors_come_at_once(tmp_path):
    def edit(tensors):
        del tensors["model.norm.weight"]
        del tensors[f"{EXPERTS}.3.up_proj.weight"]
        del tensors[f"{EXPERTS}.4.down_proj.weight_scale_2"]
        name = f"{EXPERTS}.5.gate_proj.weight_scale"
        tensors[name] = tensors[name].view(np.uint8)
        name = f"{EXPERTS}.6.down_proj.weight"
        tensors[name] = tensors[name][:, :32]
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].astype(np.float32)
        for name in (f"{EXPERTS}.16.up_proj.weight", f"{EXPERTS}.0.up_proj.bias", "model.extra"):
            tensors[name] = np.zeros(3, np.float32)
        tensors["model.layers.0.self_attn.sinks"] = np.zeros(3, np.float32)

    folder = edited(tmp_path, W4A4, edit)
    file = "('model.safetensors')"
    assert sorted(problems_of(folder)) == sorted([
        "'model.norm.weight' is missing: expected BF16 or F16 or F32 or F64 [256]",
        f"'{EXPERTS}.3.up_proj.weight' is missing: expected U8 [128, 128]",
        f"'{EXPERTS}.4.down_proj.weight_scale_2' is missing: expected F32 [] or [1]",
        f"'{EXPERTS}.5.gate_proj.weight_scale' {file}: expected F8_E4M3 [128, 16], "
        "got U8 [128, 16]",
        f"'{EXPERTS}.6.down_proj.weight' {file}: expected U8 [256, 64], got U8 [256, 32]",
        f"'model.layers.0.self_attn.q_proj.weight' {file}: expected U8 [256, 128], "
        "got F32 [256, 128]",
        f"'{EXPERTS}.16.up_proj.weight' {file}: F32 [3] is not part of the model",
        f"'{EXPERTS}.0.up_proj.bias' {file}: F32 [3] is not part of the model",
        f"'model.extra' {file}: F32 [3] is not part of the model",
        f"'model.layers.0.self_attn.sinks' {file}: F32 [3] is not part of the model",
    ])  # fmt: skip
    # Only one layer is loaded, so problems in other modules are not reported.
    assert len(problems_of(folder, build_moe, MOE)) == 6


def test_known_extras_are_noted_and_left_out(tmp_path, caplog):
    names = (
        "mtp.layers.0.mlp.gate.weight",
        "model.visual.blocks.0.attn.weight",
        "model.vision_tower.x.weight",
        "model.layers.2.mlp.gate.weight",
        "model.layers.61.eh_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
        "audio_tower.weight",
        "duration_head.weight",
        "lm_head.input_scale",
    )
    folder = edited(
        tmp_path, W4A4, lambda t: t.update(dict.fromkeys(names, np.zeros(1, np.float32)))
    )
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    with open_checkpoint(folder) as checkpoint:
        check(checkpoint, build_model)
    for expected in (
        "multi-token prediction (1)",
        "vision tower (2)",
        "KV-cache scales (2)",
        "'model.layers.2.mlp.gate.weight' is left out: it belongs to the layers beyond the 2 that "
        "the config declares, and to none of the 0 drafting layers (num_nextn_predict_layers), and "
        "so for 1 other modules",
        "modules outside of the language model (1)",
        "input scales of dense modules are ignored (1)",
    ):
        assert expected in caplog.text
    with open_checkpoint(folder) as checkpoint:
        options = LoadOptions(num_layers=62)
        with pytest.raises(CheckpointError, match="2 problems"):
            check(checkpoint, build_model, options)


def test_a_model_may_leave_tensors_out_knowingly(tmp_path):
    folder = edited(tmp_path, W4A4, lambda t: t.update({"model.head.x": np.zeros(3, np.float32)}))

    def build(w):
        w.ignore("model.head.", "embeddings are tied")
        build_model(w)

    with open_checkpoint(folder) as checkpoint:
        check(checkpoint, build)


def test_experts_of_another_type_than_declared(tmp_path):
    def edit(tensors):
        remove_experts(tensors)
        for e in range(16):
            for p in ("gate_proj", "up_proj", "down_proj"):
                shape = (256, 128) if p == "down_proj" else (128, 256)
                tensors[f"{EXPERTS}.{e}.{p}.weight"] = np.zeros(shape, ml_dtypes.bfloat16)

    for name in (W4A4, CT):
        folder = edited(tmp_path, name, edit)
        params, checkpoint_scheme = load_moe(folder)
        assert checkpoint_scheme is None
        assert params.gate_up.dtype == ml_dtypes.bfloat16


def test_experts_that_are_excluded_or_absent(tmp_path, caplog):
    folder = edited(
        tmp_path, W4A16, lambda t: None, ignore=["*.experts*"], exclude_modules=["*.experts*"]
    )
    assert load_moe(folder).checkpoint_scheme == "w4a16"
    assert f"'{EXPERTS}.0.gate_proj' holds NVFP4 codes but is declared dense" in caplog.text
    assert "exclude_modules '*.experts*'" in caplog.text
    assert "and so for 47 other modules" in caplog.text
    (problem,) = problems_of(folder, lambda w: w.experts("model.none", 16, 256, 128), MOE)[:1]
    assert problem.startswith(
        "'model.none': the file has no experts there; expected tensors such as model.none.0.down"
    )


def test_experts_without_the_scales_of_their_codes(tmp_path):
    def edit(tensors):
        for name in [n for n in tensors if EXPERTS in n and n.endswith("weight_scale")]:
            del tensors[name]

    excluded = ["*.experts*"]
    folder = edited(tmp_path, W4A16, edit, ignore=excluded, exclude_modules=excluded)
    (problem,) = problems_of(folder, build_moe, MOE)[:1]
    assert problem.startswith(f"'{EXPERTS}': experts are declared dense")
    assert "stored as U8, without the scales" in problem


def test_one_expert_that_is_declared_dense(tmp_path, caplog):
    one = [f"{EXPERTS}.3.up_proj"]
    folder = edited(tmp_path, W4A16, lambda t: None, ignore=one, exclude_modules=one)
    given, found = load_moe(GIVEN / W4A16), load_moe(folder)
    np.testing.assert_array_equal(found.params.gate_up.packed, given.params.gate_up.packed)
    assert f"'{one[0]}' holds NVFP4 codes but is declared dense" in caplog.text


def test_experts_that_differ_in_scheme(tmp_path):
    layers = {f"{EXPERTS}.{e}": {"quant_algo": "W4A16_NVFP4"} for e in range(16)}
    layers[f"{EXPERTS}.3"] = {"quant_algo": "NVFP4"}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "config_groups": {}}
    problems = problems_of(edited(tmp_path, W4A4, lambda t: None, **mixed), build_moe, MOE)
    assert (
        f"'{EXPERTS}': all experts of a layer must have one scheme, but they differ: "
        in problems[-1]
    )
    assert f"'{EXPERTS}.3.gate_proj' w4a4" in problems[-1]


def test_a_linear_declared_nvfp4_but_stored_dense_stays_dense(tmp_path):
    module = "model.layers.0.self_attn.q_proj"

    def edit(tensors):
        weight = tool_weight(tensors, module, False).astype(ml_dtypes.bfloat16)
        for name in [name for name in tensors if name.startswith(module)]:
            del tensors[name]
        tensors[f"{module}.weight"] = weight

    with open_checkpoint(edited(tmp_path, W4A4, edit)) as checkpoint:
        linear = load(checkpoint, build_model)[3]
    assert linear.checkpoint_scheme is None
    assert linear.weight.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("name", "scheme"), [(W4A4, Scheme.W4A4), (W4A16, Scheme.W4A16), (CT, Scheme.W4A4)]
)
def test_a_linear_declared_dense_but_stored_nvfp4_is_nvfp4(tmp_path, caplog, name, scheme):
    one = ["model.layers.0.self_attn.q_proj"]
    lists = {"ignore": one} if name == CT else {"ignore": one, "exclude_modules": one}
    with open_checkpoint(edited(tmp_path, name, lambda t: None, **lists)) as checkpoint:
        linear = load(checkpoint, build_model)[3]
    assert linear.checkpoint_scheme is scheme
    assert f"'{one[0]}' holds NVFP4 codes but is declared dense (" in caplog.text
    assert f"it is read as {scheme}" in caplog.text


def test_stored_codes_win_over_a_declaration_of_fp8(tmp_path, caplog):
    one = "model.layers.0.self_attn.q_proj"
    layers = {one: {"quant_algo": "FP8"}, f"{EXPERTS}": {"quant_algo": "NVFP4"}}
    layers |= {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with open_checkpoint(edited(tmp_path, W4A4, lambda t: None, **mixed)) as checkpoint:
        linear = load(checkpoint, build_model)[3]
    assert linear.checkpoint_scheme is Scheme.W4A4
    assert f"'{one}' holds NVFP4 codes but is declared fp8 (" in caplog.text
    assert "'model.layers.0.self_attn.o_proj' holds NVFP4 codes but is declared" in caplog.text


def test_sizes_that_blocks_do_not_divide():
    def build(w):
        w.experts(EXPERTS, 16, 250, 120)
        w.linear("model.layers.0.self_attn.q_proj", 256, 255)

    problems = problems_of(GIVEN / W4A4, build)
    for expected in (
        f"'{EXPERTS}': hidden = 250 is not a multiple of 16",
        f"'{EXPERTS}': intermediate = 120 is not a multiple of 16",
        "'model.layers.0.self_attn.q_proj': k = 255 is not a multiple of 16",
    ):
        assert expected in problems
