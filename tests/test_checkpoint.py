"""Loading: arrays equal to the tools' own to the bit, and every problem told at once."""

import json
import logging
import math
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_nvfp4_moe
from jax_nvfp4_moe.checkpoint import (
    CheckpointError,
    LoadOptions,
    check,
    load,
    open_checkpoint,
)
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, open_tensors, read_header
from jax_nvfp4_moe.checkpoint.synthetic import SyntheticSizes, write_synthetic

GIVEN = pathlib.Path(__file__).parent / "checkpoints"
QWEN = ("qwen3moe-modelopt-w4a4", "qwen3moe-modelopt-w4a16", "qwen3moe-ct-w4a4")
W4A4, W4A16, CT = QWEN
DEEPSEEK = "deepseekv3-modelopt-w4a4"
TINY = pathlib.Path(jax_nvfp4_moe.__file__).parent / "examples" / "tiny-python-moe"
EXPERTS = "model.layers.1.mlp.experts"
MOE = LoadOptions(only="model.layers.1.mlp")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


def read_all(folder):
    with open_tensors(folder) as tensors:
        return {name: tensors.read(name).copy() for name in tensors.names()}


def edited(tmp_path, name, edit, **config):
    """Copy a given checkpoint with tensors changed by `edit` and quantization fields replaced."""
    tensors = read_all(GIVEN / name)
    edit(tensors)
    folder = tmp_path / "edited"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    for file in ("config.json", "hf_quant_config.json"):
        if (GIVEN / name / file).exists():
            shutil.copy(GIVEN / name / file, folder)
    for file, key in (
        ("config.json", "quantization_config"),
        ("hf_quant_config.json", "quantization"),
    ):
        if config and (folder / file).exists():
            contents = json.loads((folder / file).read_text())
            contents[key] |= config
            (folder / file).write_text(json.dumps(contents))
    return folder


def build_model(w):
    """All weights of the small Qwen3 checkpoints."""
    linear = {
        "q_proj": (256, 256),
        "k_proj": (128, 256),
        "v_proj": (128, 256),
        "o_proj": (256, 256),
    }
    built = [w.array("model.embed_tokens.weight", (512, 256)), w.linear("lm_head", 512, 256)]
    built.append(w.array("model.norm.weight", (256,)))
    for prefix in ("model.layers.0", "model.layers.1"):
        built += [w.linear(f"{prefix}.self_attn.{name}", *nk) for name, nk in linear.items()]
        built += [w.array(f"{prefix}.self_attn.{x}_norm.weight", (64,)) for x in "qk"]
        built += [
            w.array(f"{prefix}.{name}.weight", (256,))
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        built += build_moe(w, prefix + ".mlp")
    return built


def build_moe(w, prefix="model.layers.1.mlp"):
    return w.linear(f"{prefix}.gate", 16, 256), w.experts(f"{prefix}.experts", 16, 256, 128)


def load_moe(folder, **options):
    with open_checkpoint(folder) as checkpoint:
        return load(checkpoint, build_moe, LoadOptions(only="model.layers.1.mlp", **options))[1]


def problems_of(folder, build=build_model, options=None, run=check):
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError) as caught:
        run(checkpoint, build, options)
    assert str(folder) in str(caught.value)
    return caught.value.problems


def tool_weight(tensors, module, divides):
    """The weight as the tool that wrote the file dequantizes it."""
    packed = tensors[f"{module}.weight{'_packed' if divides else ''}"]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    scale = tensors[f"{module}.weight_scale"].astype(np.float32)
    if divides:
        scale = scale / tensors[f"{module}.weight_global_scale"]
    else:
        scale = scale * tensors[f"{module}.weight_scale_2"]
    return E2M1[codes] * np.repeat(scale, 16, axis=-1)


@pytest.mark.parametrize("name", QWEN)
def test_weights_equal_the_tools_own(name):
    tensors, divides = read_all(GIVEN / name), name == CT
    with open_checkpoint(GIVEN / name) as checkpoint:
        model = load(checkpoint, build_model)
    params, declared = model[-1]
    assert declared == name.rpartition("-")[2]
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
    assert model[1].declared is None
    assert (q_proj.input_scale is None) == (declared == "w4a16")


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
    """NVFP4 rounding of activations, as `README.md` of ModelOpt's export defines it."""
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
        params, declared = load(
            checkpoint,
            lambda w: w.experts(EXPERTS, 16, 256, intermediate),
            LoadOptions(only=EXPERTS),
        )
    gate_up, down = (np.asarray(w.dequantize()) for w in (params.gate_up, params.down))
    i = intermediate

    def rounded(x, scales, e):
        return x if declared == "w4a16" else fake_quantize(x, np.asarray(scales)[e])

    y = np.zeros_like(x)
    for e in range(16):
        rows, slots = np.nonzero(ids == e)
        u = rounded(x[rows], params.gate_up_input_scale, e) @ gate_up[e].T
        a = u[:, :i] / (1 + np.exp(-u[:, :i])) * u[:, i:]
        d = rounded(a, params.down_input_scale, e) @ down[e].T
        np.add.at(y, rows, weights[rows, slots, None] * d)
    # The bound of the given checkpoints' own README; swapped nibbles give an error of 1.5.
    assert np.linalg.norm(y - expected) <= 1e-5 * np.linalg.norm(expected)


def open_tensors_file(path):
    problems = []
    header = read_header(path, path.name, problems)
    assert not problems
    return Tensors({path.name: path}, header)


def test_first_pass_reads_nothing_and_gives_shapes():
    seen = []
    with open_checkpoint(GIVEN / CT) as checkpoint:
        checkpoint.tensors.close()
        nbytes = check(checkpoint, lambda w: seen.extend(build_model(w)))
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), seen[-1].params)
    with open_checkpoint(GIVEN / CT) as checkpoint:
        params = load(checkpoint, build_model)[-1].params
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), params)
    assert nbytes == sum(a.nbytes for a in read_all(GIVEN / CT).values())


def test_values_are_placed_one_module_at_a_time():
    placed = []

    def place(name, value, declared):
        placed.append((name, declared, all(map(aligned, jax.tree.leaves(value)))))
        return value

    with open_checkpoint(GIVEN / W4A4) as checkpoint:
        load(checkpoint, build_moe, LoadOptions(only="model.layers.1.mlp", place=place))
    assert placed == [("model.layers.1.mlp.gate", None, True), (EXPERTS, "w4a4", True)]


def aligned(array):
    return isinstance(array, np.ndarray) and (array.ctypes.data % 64 == 0 or array.nbytes <= 256)


def test_the_default_place_does_not_copy_on_a_cpu():
    array = load_moe(GIVEN / W4A4).params.down.packed
    assert isinstance(array, jax.Array)
    assert array.unsafe_buffer_pointer() % 64 == 0


def test_dense_arrays_take_the_dtype_asked_for():
    def build(w):
        norm = w.array("model.norm.weight", (256,))
        router = w.linear("model.layers.0.mlp.gate", 16, 256, dtype=np.float32).weight
        return norm.dtype, router.dtype

    options = LoadOptions(dtype=np.float16, only="model.norm")
    with open_checkpoint(GIVEN / W4A4) as checkpoint:
        assert load(checkpoint, build, options) == (np.float16, np.float32)


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
    # One layer is loaded: what is wrong elsewhere does not matter.
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
    for expected in ("multi-token prediction (1)", "vision tower (2)", "KV-cache scales (2)",
                     "layers after the 2 of the config (2)", "modules that are not loaded (1)",
                     "input scales of dense modules (1)"):  # fmt: skip
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


def test_errors_of_the_model_itself_pass_through():
    def build(w):
        raise KeyError("rope")

    with open_checkpoint(GIVEN / W4A4) as checkpoint, pytest.raises(KeyError, match="rope"):
        check(checkpoint, build)


def test_a_model_that_trips_over_a_placeholder_still_gets_the_problems(tmp_path):
    def build(w):
        w.array("model.missing", (3,))
        raise TypeError

    assert problems_of(GIVEN / W4A4, build) == (
        "'model.missing' is missing: expected BF16 or F16 or F32 or F64 [3]",
    )


def test_dense_experts_are_refused_in_one_sentence(tmp_path):
    def edit(tensors):
        remove_experts(tensors)
        for e in range(16):
            for p in ("gate_proj", "up_proj", "down_proj"):
                shape = (256, 128) if p == "down_proj" else (128, 256)
                tensors[f"{EXPERTS}.{e}.{p}.weight"] = np.zeros(shape, ml_dtypes.bfloat16)

    for name in (W4A4, CT):
        (problem,) = problems_of(edited(tmp_path, name, edit), build_moe, MOE)
        assert problem.startswith(f"'{EXPERTS}': experts are not NVFP4")
        assert "BF16 [256, 128]): quantize the checkpoint first" in problem


def test_experts_that_are_excluded_or_absent(tmp_path):
    folder = edited(
        tmp_path, W4A16, lambda t: None, ignore=["*.experts*"], exclude_modules=["*.experts*"]
    )
    (problem,) = problems_of(folder, build_moe, MOE)[:1]
    assert problem.startswith(f"'{EXPERTS}': experts are declared dense")
    (problem,) = problems_of(folder, lambda w: w.experts("model.none", 16, 256, 128), MOE)[:1]
    assert problem.startswith(
        "'model.none': no experts; expected tensors such as model.none.0.down"
    )


def test_experts_that_differ_in_scheme(tmp_path):
    one = [f"{EXPERTS}.3.up_proj"]
    folder = edited(tmp_path, W4A16, lambda t: None, ignore=one, exclude_modules=one)
    problems = problems_of(folder, build_moe, MOE)
    assert f"'{EXPERTS}': experts of one layer differ: " in problems[-1]
    assert f"'{EXPERTS}.3.up_proj' dense" in problems[-1]


def test_a_linear_declared_nvfp4_but_stored_dense_stays_dense(tmp_path):
    module = "model.layers.0.self_attn.q_proj"

    def edit(tensors):
        weight = tool_weight(tensors, module, False).astype(ml_dtypes.bfloat16)
        for name in [name for name in tensors if name.startswith(module)]:
            del tensors[name]
        tensors[f"{module}.weight"] = weight

    with open_checkpoint(edited(tmp_path, W4A4, edit)) as checkpoint:
        linear = load(checkpoint, build_model)[3]
    assert linear.declared is None
    assert linear.weight.dtype == ml_dtypes.bfloat16


def test_a_linear_declared_dense_but_stored_nvfp4_is_refused(tmp_path):
    one = ["model.layers.0.self_attn.q_proj"]
    folder = edited(tmp_path, W4A4, lambda t: None, ignore=one, exclude_modules=one)
    (problem,) = problems_of(folder)
    assert problem.startswith(
        f"'{one[0]}' holds NVFP4 codes but is declared dense (hf_quant_config"
    )


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


def test_a_relabelled_file_is_weight_only(tmp_path, caplog):
    folder = edited(tmp_path, W4A4, lambda t: None, quant_algo="W4A16_NVFP4")
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    with open_checkpoint(folder) as checkpoint:
        params, declared = load(checkpoint, build_model)[-1]
    assert declared == "w4a16"
    assert params.gate_up_input_scale is None
    assert "input scales are ignored: the checkpoint declares weights only (104)" in caplog.text


@pytest.mark.parametrize("name", [W4A4, CT])
def test_scales_that_are_not_finite_are_all_reported(tmp_path, name):
    word = "weight_global_scale" if name == CT else "weight_scale_2"

    def edit(tensors):
        tensors[f"{EXPERTS}.2.up_proj.weight_scale"].view(np.uint8)[3, 4] = 0x7F
        tensors[f"{EXPERTS}.2.down_proj.weight_scale"].view(np.uint8)[[0, 1], 0] = 0xFF
        tensors[f"{EXPERTS}.7.gate_proj.{word}"][...] = np.inf
        tensors[f"{EXPERTS}.8.down_proj.{word}"][...] = np.nan

    folder = edited(tmp_path, name, edit)
    file = "('model.safetensors')"
    assert sorted(problems_of(folder, build_moe, MOE, load)) == sorted([
        f"'{EXPERTS}.2.up_proj.weight_scale' {file}: 1 of 2048 block scales are NaN",
        f"'{EXPERTS}.2.down_proj.weight_scale' {file}: 2 of 2048 block scales are NaN",
        f"'{EXPERTS}.7.gate_proj.{word}' {file}: global scale inf is not usable",
        f"'{EXPERTS}.8.down_proj.{word}' {file}: global scale nan is not usable",
    ])  # fmt: skip


def test_a_divisor_of_zero_is_refused(tmp_path):
    def edit(tensors):
        tensors[f"{EXPERTS}.7.gate_proj.weight_global_scale"][...] = 0

    (problem,) = problems_of(edited(tmp_path, CT, edit), build_moe, MOE, load)
    assert problem.endswith("global scale 0.0 is not usable")


def test_zero_and_negative_block_scales_are_kept(tmp_path):
    name = f"{EXPERTS}.2.up_proj.weight_scale"

    def edit(tensors):
        tensors[name].view(np.uint8)[0, :4] = [0x00, 0x80, 0xC0, 0x81]
        tensors[f"{EXPERTS}.2.up_proj.weight_scale_2"][...] = 0

    params, _ = load_moe(edited(tmp_path, W4A4, edit))
    scales = np.asarray(params.gate_up.block_scale).view(np.uint8)[2, 128, :4]
    assert scales.tolist() == [0x00, 0x80, 0xC0, 0x81]
    assert params.gate_up.global_scale[2, 1] == 0


def test_gate_and_up_keep_their_own_global_scales(tmp_path):
    def edit(tensors):
        tensors[f"{EXPERTS}.2.up_proj.weight_scale_2"][...] *= 10

    params, _ = load_moe(edited(tmp_path, W4A4, edit))
    plain, _ = load_moe(GIVEN / W4A4)
    before, after = (np.asarray(p.gate_up.dequantize())[2] for p in (plain, params))
    np.testing.assert_array_equal(before[:128], after[:128])
    assert params.gate_up.global_scale[2, 1] == plain.gate_up.global_scale[2, 1] * np.float32(10)
    assert np.count_nonzero(after[128:] != before[128:]) > 0


def set_input_scales(values, removed=()):
    def edit(tensors):
        for e in range(16):
            for p in ("gate_proj", "up_proj", "down_proj"):
                name = f"{EXPERTS}.{e}.{p}.input_scale"
                tensors[name] = np.float32(values.get((e, p), 0.5)) * np.ones((), np.float32)
                if (e, p) in removed:
                    del tensors[name]

    return edit


def test_bad_input_scales_take_the_largest_of_the_layer(tmp_path, caplog):
    values = {(0, "gate_proj"): 0.0, (1, "gate_proj"): np.nan, (2, "up_proj"): np.inf}
    values |= {(3, "gate_proj"): 2.0, (5, "down_proj"): -1.0, (6, "down_proj"): 3.0}
    folder = edited(tmp_path, W4A4, set_input_scales(values, {(4, "up_proj"), (7, "down_proj")}))
    params, _ = load_moe(folder)
    expected = np.full(16, 0.5)
    expected[[0, 1, 2, 3, 4]] = 2
    np.testing.assert_array_equal(params.gate_up_input_scale, expected)
    expected = np.full(16, 0.5)
    expected[[5, 6, 7]] = 3
    np.testing.assert_array_equal(params.down_input_scale, expected)
    assert "4 of 32 input scales are missing, zero or not finite" in caplog.text
    assert "2 of 16 input scales" in caplog.text


def test_different_input_scales_of_gate_and_up(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    values = {(3, "gate_proj"): 0.25, (4, "up_proj"): 0.75}
    params, _ = load_moe(edited(tmp_path, W4A4, set_input_scales(values)))
    assert params.gate_up_input_scale[3] == 0.5
    assert params.gate_up_input_scale[4] == 0.75
    assert "2 experts' input scales differ" in caplog.text


def test_no_input_scales_at_all(tmp_path):
    down = {(e, "down_proj") for e in range(16)}
    folder = edited(tmp_path, W4A4, set_input_scales({}, down))
    (problem,) = problems_of(folder, build_moe, MOE)
    assert problem == f"'{EXPERTS} down': declared w4a4 but has no input scales (input_scale)"
    assert load_moe(folder, input_scales="optional").params.down_input_scale is None
    assert load_moe(folder, input_scales="ignored").params.gate_up_input_scale is None
    folder = edited(tmp_path, W4A4, set_input_scales(dict.fromkeys(down, 0.0)))
    (problem,) = problems_of(folder, build_moe, MOE, load)
    assert problem == f"'{EXPERTS} down': none of 16 input scales is a positive finite number"
    assert load_moe(folder, input_scales="optional").params.down_input_scale is None


def test_a_linear_needs_its_input_scale(tmp_path):
    name = "model.layers.0.self_attn.q_proj"

    def build(w):
        return w.linear(name, 256, 256)

    def edit(tensors):
        tensors[f"{name}.input_scale"][...] = 0

    only = LoadOptions(only=name)
    (problem,) = problems_of(edited(tmp_path, W4A4, edit), build, only, load)
    assert problem == f"'{name}': none of 1 input scales is a positive finite number"
    folder = edited(tmp_path, W4A4, lambda t: t.pop(f"{name}.input_scale"))
    (problem,) = problems_of(folder, build, only)
    assert "has no input scales" in problem


def test_other_namings_of_experts(tmp_path):
    def mixtral(tensors):
        for name in [name for name in tensors if EXPERTS in name]:
            new = (
                name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")
            )
            tensors[new] = tensors.pop(name)

    def nemotron(tensors):
        for name in [name for name in tensors if "gate_proj" in name]:
            del tensors[name]

    plain, _ = load_moe(GIVEN / W4A4)
    renamed, _ = load_moe(edited(tmp_path, W4A4, mixtral))
    jax.tree.map(np.testing.assert_array_equal, renamed, plain)
    with open_checkpoint(edited(tmp_path, W4A4, nemotron)) as checkpoint:
        params, _ = load(
            checkpoint,
            lambda w: w.experts(EXPERTS, 16, 256, 128, gated=False),
            LoadOptions(only=EXPERTS),
        )
    np.testing.assert_array_equal(params.gate_up.packed, plain.gate_up.packed[:, 128:])
    np.testing.assert_array_equal(params.gate_up.global_scale, plain.gate_up.global_scale[:, 1])


UNDERSCORED = ("", "_weight_scale", "_weight_scale_2", "_input_scale", "_bias")
DOTTED = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale", ".bias")


def fuse(swap, globals_shape, suffixes=UNDERSCORED):
    """Turn the experts of one layer into one tensor a projection."""

    def rows(tensors, projections, word):
        each = [
            np.concatenate([tensors[f"{EXPERTS}.{e}.{p}.{word}"] for p in projections])
            for e in range(16)
        ]
        return np.swapaxes(each, 1, 2) if swap else np.stack(each)

    def scalars(tensors, projections, word):
        each = np.array(
            [[tensors[f"{EXPERTS}.{e}.{p}.{word}"] for p in projections] for e in range(16)]
        )
        if globals_shape == "parts":
            return each
        return each[: math.prod(globals_shape), 0].reshape(globals_shape)

    def edit(tensors):
        fused = {}
        for stem, projections, n in (
            ("gate_up_proj", ["gate_proj", "up_proj"], 256),
            ("down_proj", ["down_proj"], 256),
        ):
            arrays = (
                rows(tensors, projections, "weight"),
                rows(tensors, projections, "weight_scale"),
                scalars(tensors, projections, "weight_scale_2"),
                scalars(tensors, projections, "input_scale"),
                np.ones((16, n), np.float32),
            )
            for suffix, array in zip(suffixes, arrays, strict=True):
                fused[f"{EXPERTS}.{stem}{suffix}"] = array
        remove_experts(tensors)
        tensors.update(fused)

    return edit


def remove_experts(tensors):
    for name in [name for name in tensors if EXPERTS in name]:
        del tensors[name]


def build_fused(w):
    w.linear("model.layers.1.mlp.gate", 16, 256)
    return w.experts(EXPERTS, 16, 256, 128, bias=True)


@pytest.mark.parametrize("swap", [False, True], ids=["row-major", "k-major"])
@pytest.mark.parametrize("globals_shape", [(16,), (16, 1), (16, 1, 1), "parts"], ids=str)
def test_all_experts_in_one_tensor(tmp_path, swap, globals_shape):
    plain, _ = load_moe(GIVEN / W4A4)
    folder = edited(tmp_path, W4A4, fuse(swap, globals_shape))
    with open_checkpoint(folder) as checkpoint:
        params, declared = load(checkpoint, build_fused, MOE)
    assert declared == "w4a4"
    assert params.gate_up_bias.shape == (16, 256)
    np.testing.assert_array_equal(params.gate_up.packed, plain.gate_up.packed)
    np.testing.assert_array_equal(params.down.packed, plain.down.packed)
    for leaf in ("gate_up_input_scale", "down_input_scale"):
        np.testing.assert_array_equal(getattr(params, leaf), getattr(plain, leaf))
    for weight, expected in ((params.gate_up, plain.gate_up), (params.down, plain.down)):
        np.testing.assert_array_equal(weight.block_scale, expected.block_scale)
        np.testing.assert_array_equal(weight.global_scale, expected.global_scale)


def test_fused_experts_share_one_scalar_or_use_dotted_names(tmp_path):
    for shape, suffixes in (((), UNDERSCORED), ((1,), DOTTED)):
        folder = edited(tmp_path, W4A4, fuse(False, shape, suffixes))
        with open_checkpoint(folder) as checkpoint:
            params, _ = load(checkpoint, build_fused, MOE)
        assert np.unique(params.gate_up.global_scale).size == 1
        assert params.down.global_scale.shape == (16,)


def test_fused_experts_of_the_wrong_shape_and_dense_ones(tmp_path):
    folder = edited(tmp_path, W4A4, fuse(True, (16,)))

    def build(w):
        w.linear("model.layers.1.mlp.gate", 16, 256)
        w.experts(EXPERTS, 16, 256, 64, bias=True)

    assert len(problems_of(folder, build, MOE)) == 5

    def dense(tensors):
        fuse(True, (16,))(tensors)
        remove_experts(tensors)
        tensors[f"{EXPERTS}.gate_up_proj"] = np.zeros((16, 256, 256), ml_dtypes.bfloat16)
        tensors[f"{EXPERTS}.down_proj"] = np.zeros((16, 128, 256), ml_dtypes.bfloat16)

    (problem,) = problems_of(edited(tmp_path, W4A4, dense), build_fused, MOE)
    assert "experts are not NVFP4" in problem


def test_codes_that_fit_both_ways_follow_their_scales_or_are_refused(tmp_path):
    def square(tensors, scales):
        """256 rows of 512 codes: [2, 256, 256] bytes either way."""
        remove_experts(tensors)
        for stem, n, k in (("gate_up_proj", 256, 512), ("down_proj", 512, 128)):
            rng = np.random.default_rng(0)
            tensors[f"{EXPERTS}.{stem}"] = rng.integers(0, 256, (2, k // 2, n), np.uint8)
            scale = np.ones((2, k // 16, n), ml_dtypes.float8_e4m3fn)
            if scales or stem == "down_proj":
                tensors[f"{EXPERTS}.{stem}_weight_scale"] = scale
            tensors[f"{EXPERTS}.{stem}_weight_scale_2"] = np.ones(2, np.float32)

    def build(w):
        w.linear("model.layers.1.mlp.gate", 16, 256)
        return w.experts(EXPERTS, 2, 512, 128)

    folder = edited(tmp_path, W4A16, lambda t: square(t, True))
    with open_checkpoint(folder) as checkpoint:
        params, _ = load(checkpoint, build, MOE)
    stored = read_all(folder)[f"{EXPERTS}.gate_up_proj"]
    np.testing.assert_array_equal(params.gate_up.packed, np.swapaxes(stored, 1, 2))
    folder = edited(tmp_path, W4A16, lambda t: square(t, False))
    assert any("ambiguous without" in problem for problem in problems_of(folder, build, MOE))


def test_dense_experts_for_the_quantizer(tmp_path):
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((3, 64, 48)).astype(ml_dtypes.bfloat16)
    down = rng.standard_normal((3, 48, 32)).astype(ml_dtypes.bfloat16)
    bias = np.ones((3, 64), ml_dtypes.bfloat16), np.ones((3, 48), ml_dtypes.bfloat16)
    each = {}
    for e in range(3):
        parts = (gate_up[e, :32], gate_up[e, 32:], down[e])
        for name, part in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            each[f"x.{e}.{name}.weight"] = part
            each[f"x.{e}.{name}.bias"] = np.ones(len(part), ml_dtypes.bfloat16)
    fused = {"x.gate_up_proj": gate_up, "x.down_proj": down}
    swapped = {name: np.swapaxes(array, 1, 2) for name, array in fused.items()}
    biases = {"x.gate_up_proj_bias": bias[0], "x.down_proj_bias": bias[1]}
    (tmp_path / "config.json").write_text("{}")
    for tensors in (each, fused | biases, swapped | biases):
        write_safetensors(tmp_path / "model.safetensors", tensors)
        with open_checkpoint(tmp_path) as checkpoint:
            experts = load(checkpoint, lambda w: w.dense_experts("x", 3, 48, 32, bias=True))
        np.testing.assert_array_equal(experts.gate_up, gate_up)
        np.testing.assert_array_equal(experts.down, down)
        np.testing.assert_array_equal(experts.gate_up_bias, bias[0])
        np.testing.assert_array_equal(experts.down_bias, bias[1])
        assert experts.down.dtype == ml_dtypes.bfloat16
    square = {"x.gate_up_proj": gate_up[:, :48], "x.down_proj": down}
    write_safetensors(tmp_path / "model.safetensors", square)
    (problem, *_) = problems_of(tmp_path, lambda w: w.dense_experts("x", 3, 48, 24))
    assert "may be [e, n, k] or [e, k, n] with n = 48 and k = 48: ambiguous" in problem


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_synthetic_checkpoints_load_from_their_shards(tmp_path, algorithm):
    sizes = SyntheticSizes(
        layers=2,
        num_experts=16,
        top_k=4,
        hidden=256,
        intermediate=128,
        vocab=512,
        heads=4,
        kv_heads=2,
        head_dim=64,
    )
    write_synthetic(tmp_path, sizes, algorithm=algorithm, shard_bytes=1_000_000)
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    with open_checkpoint(tmp_path) as checkpoint:
        params, declared = load(checkpoint, build_model)[-1]
    assert declared == {"NVFP4": "w4a4", "W4A16_NVFP4": "w4a16"}[algorithm]
    assert np.unique(params.down.packed).size == 256
    assert np.isfinite(params.down.dequantize()).all()


def test_opening_lists_the_problems_of_config_and_tensors(tmp_path):
    folder = edited(tmp_path, W4A4, lambda t: None, quant_algo="W3A3")
    (folder / "model.safetensors").write_bytes(b"nonsense" * 3)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert len(caught.value.problems) == 3
    assert "W3A3" in str(caught.value)
    assert "'model.safetensors'" in str(caught.value)
