"""Test experts under other public names and in other forms, which are read with equal values."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from support.files.checkpoint_edits import (
    CT,
    EXPERTS,
    GIVEN,
    MOE,
    W4A4,
    W4A16,
    edited,
    load,
    problems_of,
    read_all,
    store_codes_as_f4,
)
from support.files.given import CHECKPOINTS, copy_with_config
from support.files.unquantized import SMALL

from jax_nvfp4_moe import CheckpointError, load_model, load_moe, quantize_model
from jax_nvfp4_moe.checkpoint import open_checkpoint
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.safetensors import open_tensors

E, GATE, UP, DOWN = 16, "gate_proj", "up_proj", "down_proj"
FILES = (W4A4, W4A16, CT)


def parts(tensors, name):
    """Return the names of one projection's tensors, such as "weight_scale"."""
    start = f"{EXPERTS}.0.{name}."
    return [one.removeprefix(start) for one in tensors if one.startswith(start)]


def take(tensors, name):
    """Take one projection of all experts out, as part -> ``[e, ...]``."""
    return {
        part: np.stack([tensors.pop(f"{EXPERTS}.{e}.{name}.{part}") for e in range(E)])
        for part in parts(tensors, name)
    }


def take_products(tensors):
    """Take all projections out: gate rows before up rows, and down."""
    gate, up, down = (take(tensors, name) for name in (GATE, UP, DOWN))
    gate_up = {}
    for part in gate:
        pair = [gate[part], up[part]]
        if gate[part].ndim == 3:
            gate_up[part] = np.concatenate(pair, axis=1)
        else:  # one number for each of both
            gate_up[part] = np.stack([one.reshape(E) for one in pair], axis=1)
    return gate_up, {part: one if one.ndim == 3 else one.reshape(E) for part, one in down.items()}


def as_single(tensors):
    """Leave one tensor for each projection of each expert."""


def as_vllm(tensors):
    for stem, found in zip(("w13", "w2"), take_products(tensors), strict=True):
        for part, values in found.items():
            tensors[f"{EXPERTS}.{stem}_{part}"] = values


def flat(values):
    """Return ``[e * rows, columns]``."""
    return values.reshape(-1, values.shape[-1]) if values.ndim == 3 else values


def as_flat_stacks(tensors):
    for stem, found in zip(("gate_up_proj", "down_proj"), take_products(tensors), strict=True):
        for part, values in found.items():
            name = stem if part == "weight" else f"{stem}_{part}"
            tensors[f"{EXPERTS}.{name}"] = flat(values)


def as_flat_vllm(tensors):
    as_vllm(tensors)
    for name in [name for name in tensors if f"{EXPERTS}.w" in name]:
        tensors[name] = flat(tensors[name])


def as_stacked_linears(tensors):
    for stem, found in zip(("gate_up_proj", "down_proj"), take_products(tensors), strict=True):
        for part, values in found.items():
            tensors[f"{EXPERTS}.{stem}.{part}"] = flat(values)


def as_packed(tensors):
    for stem, found in zip(("gate_up_proj", "down_proj"), take_products(tensors), strict=True):
        for part, values in found.items():
            tensors[f"{EXPERTS}.{stem}_{part.removeprefix('weight_')}"] = values


def as_stacks_apart(names, join):
    def edit(tensors):
        for stem, name in zip(names, (GATE, UP, DOWN), strict=True):
            for part, values in take(tensors, name).items():
                tensors[f"{EXPERTS}.{stem}{join}{part}"] = values

    return edit


def as_fused_experts(tensors):
    for e in range(E):
        for part in parts(tensors, GATE):
            gate, up = (tensors.pop(f"{EXPERTS}.{e}.{name}.{part}") for name in (GATE, UP))
            both = np.concatenate([gate, up]) if gate.ndim else np.stack([gate, up])
            tensors[f"{EXPERTS}.{e}.gate_up_proj.{part}"] = both


def apart(names, join):
    return pytest.param(as_stacks_apart(names, join), id=f"{names[0]}{join}")


FORMS = [
    as_vllm,
    as_flat_stacks,
    as_flat_vllm,
    as_stacked_linears,
    as_fused_experts,
    apart(("w1", "w3", "w2"), "."),
    apart(("w1", "w3", "w2"), "_"),
    apart((GATE, UP, DOWN), "."),
]


def build_experts(w, *sizes):
    w.linear("model.layers.1.mlp.gate", 16, 256)
    return w.experts(EXPERTS, *sizes)


def params(folder):
    # The order of the layers' names may change, but no value does.
    return load_moe(folder, 1, scheme="checkpoint").experts.params.get_value()


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_values_of_single_experts(tmp_path, form, name):
    assert_equal(params(edited(tmp_path, name, form)), params(GIVEN / name))


@pytest.mark.parametrize("name", [W4A4, CT])
@pytest.mark.parametrize("form", [as_single, as_vllm, as_flat_stacks, as_fused_experts])
def test_codes_of_four_bits_have_the_values_of_bytes(tmp_path, form, name):
    folder = store_codes_as_f4(edited(tmp_path, name, form))
    with open_tensors(folder) as tensors:
        dtypes = {tensors.info(one).dtype for one in tensors.names()}
    assert "F4" in dtypes
    assert "U8" not in dtypes
    assert_equal(params(folder), params(GIVEN / name))


def test_codes_of_four_bits_do_not_follow_scales_of_another_order(tmp_path):
    """Two codes of a byte are neighbors in k, also where the bytes of a matrix are square."""

    def edit(tensors):
        as_flat_stacks(tensors)
        for name, n, k in (("gate_up_proj", 256, 512), ("down_proj", 512, 128)):
            stem = f"{EXPERTS}.{name}"
            tensors[stem] = np.zeros((2, n, k // 2), np.uint8)
            tensors[f"{stem}_weight_scale"] = np.ones((2, k // 16, n), ml_dtypes.float8_e4m3fn)
            tensors[f"{stem}_weight_scale_2"] = np.ones(2, np.float32)
            tensors.pop(f"{stem}_input_scale", None)

    folder = store_codes_as_f4(edited(tmp_path, W4A16, edit))
    problems = problems_of(folder, lambda w: build_experts(w, 2, 512, 128), MOE)
    assert [problem.partition("expected")[2] for problem in problems] == [
        " F8_E4M3 [2, 256, 32], got F8_E4M3 [2, 32, 256]",
        " F8_E4M3 [2, 512, 8], got F8_E4M3 [2, 8, 512]",
    ]


def store_fp8(tensors):
    """Store the experts in FP8. Gate and up of an expert share a scale, but no input scale."""
    random = np.random.default_rng(0)
    for name in [name for name in tensors if name.startswith(EXPERTS)]:
        del tensors[name]
    for e in range(E):
        for part, (name, n, k) in enumerate(((GATE, 64, 256), (UP, 64, 256), (DOWN, 256, 64))):
            stem = f"{EXPERTS}.{e}.{name}"
            drawn = random.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{stem}.weight"] = drawn
            tensors[f"{stem}.weight_scale"] = np.float32(0.5 + e)
            # Of each second expert, the scale of up is the larger one.
            tensors[f"{stem}.input_scale"] = np.float32(1 + e + part * (0.25, -0.25)[e % 2])


@pytest.mark.parametrize("form", [as_vllm, as_flat_stacks, as_stacked_linears])
def test_input_scales_of_gate_and_up_of_a_stack_in_fp8(tmp_path, form):
    """A stack has an input scale of gate and one of up: the larger one of both is used."""

    def stack(tensors):
        store_fp8(tensors)
        form(tensors)
        for name in [name for name in tensors if "gate_up_proj" in name]:
            if name.endswith("weight_scale"):
                tensors[name] = tensors[name][:, 0]
            if name.endswith("input_scale"):
                assert tensors[name].shape == (E, 2)

    def read(edit):
        with open_checkpoint(edited(tmp_path, W4A4, edit)) as checkpoint:
            return load(checkpoint, lambda w: build_experts(w, E, 256, 64), MOE).params

    expected = read(store_fp8)
    larger = [1 + e + (0.25 if e % 2 == 0 else 0) for e in range(E)]
    np.testing.assert_array_equal(expected.gate_up_input_scale, np.asarray(larger, np.float32))
    assert_equal(read(stack), expected)


def test_packed_stacks_of_compressed_tensors(tmp_path):
    assert_equal(params(edited(tmp_path, CT, as_packed)), params(GIVEN / CT))

    def as_flat_packed(tensors):
        as_packed(tensors)
        for name in [name for name in tensors if f"{EXPERTS}.gate_up" in name]:
            tensors[name] = flat(tensors[name])

    assert_equal(params(edited(tmp_path, CT, as_flat_packed)), params(GIVEN / CT))


def test_packed_stacks_of_another_format_are_not_guessed(tmp_path):
    """Whether their global scales divide is certain in compressed-tensors alone."""

    def edit(tensors):
        for stem, found in zip(("gate_up_proj", "down_proj"), take_products(tensors), strict=True):
            for part, new in (("weight", "packed"), ("weight_scale", "scale")):
                tensors[f"{EXPERTS}.{stem}_{new}"] = found[part]
            tensors[f"{EXPERTS}.{stem}_global_scale"] = found["weight_scale_2"]

    with pytest.raises(CheckpointError) as caught:
        load_moe(edited(tmp_path, W4A16, edit), 1)
    (problem,) = caught.value.problems
    assert "the names 'down_proj_global_scale', 'down_proj_packed'" in problem


def test_layers_without_any_experts_are_one_sentence(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if ".mlp.experts." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError) as caught:
        load_model(edited(tmp_path, W4A4, edit))
    (problem,) = caught.value.problems
    assert "and the experts of 1 more layers: the file has no experts there" in problem


def test_one_global_scale_for_a_flat_stack(tmp_path):
    """Files of llm-compressor have one for all experts of a layer."""

    def edit(tensors):
        for name in [name for name in tensors if name.startswith(EXPERTS)]:
            if name.endswith("weight_global_scale"):
                tensors[name] = np.full(1, 2048, np.float32)

    def form(tensors):
        edit(tensors)
        as_packed(tensors)
        for name in [name for name in tensors if name.startswith(EXPERTS)]:
            tensors[name] = flat(tensors[name])
            if name.endswith("_proj_global_scale"):
                tensors[name] = np.full(1, 2048, np.float32)

    expected = params(edited(tmp_path, CT, edit))
    assert_equal(params(edited(tmp_path, CT, form)), expected)


def test_other_names_of_experts_without_a_gate(tmp_path):
    """Nemotron-H has no gate. vLLM still calls its first product w13."""
    source = CHECKPOINTS / "nemotron_h-modelopt-w4a16"
    tensors = read_all(source)
    (layer, *_) = sorted({n.split(".")[2] for n in tensors if ".experts.0.up_proj" in n})
    prefix = f"backbone.layers.{layer}.mixer.experts"
    count = len({n.split(".")[5] for n in tensors if n.startswith(f"{prefix}.")})
    for stem, name in (("w13", UP), ("w2", DOWN)):
        for part in ("weight", "weight_scale", "weight_scale_2"):
            found = [tensors.pop(f"{prefix}.{e}.{name}.{part}") for e in range(count)]
            tensors[f"{prefix}.{stem}_{part}"] = np.stack(found)
    folder = copy_with_config(source, tmp_path / "m")
    write_safetensors(folder / "model.safetensors", tensors)
    found, expected = (load_moe(one, int(layer)).experts for one in (folder, source))
    assert_equal(found.params.get_value(), expected.params.get_value())


@pytest.mark.parametrize("form", [as_vllm, as_fused_experts, apart(("w1", "w3", "w2"), ".")])
def test_quantize_reads_other_forms(tmp_path, form):
    """An unquantized source in such a form becomes the same checkpoint."""
    source = SMALL / "source"
    config = json.loads((source / "config.json").read_text())
    with open_tensors(source) as opened:
        tensors = {name: opened.read(name).copy() for name in opened.names()}
    edit = with_sizes(form, config["num_local_experts"], range(config["num_hidden_layers"]))
    edit(tensors)
    folder = copy_with_config(source, tmp_path / "source")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    for one, out in ((folder, "out"), (source, "expected")):
        quantize_model(one, tmp_path / out, modules="experts", progress=False)
    last = config["num_hidden_layers"] - 1
    found, expected = (load_moe(tmp_path / out, last) for out in ("out", "expected"))
    assert_equal(found.experts.params.get_value(), expected.experts.params.get_value())


def with_sizes(form, experts, layers):
    """Return an edit that gives the experts of several layers this form."""

    def edit(tensors):
        for layer in layers:
            own = {
                name.replace(f"layers.{layer}.", "layers.1."): tensors.pop(name)
                for name in list(tensors)
                if f".layers.{layer}.mlp.experts." in name
            }
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(f"{__name__}.E", experts)
                form(own)
            tensors |= {n.replace("layers.1.", f"layers.{layer}."): v for n, v in own.items()}

    return edit


def rename(old, new):
    def edit(tensors):
        for name in [name for name in tensors if ".mlp.experts." in name and old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("_proj", "_projection", "'E.down_projection.input_scale'"),
        ("gate_proj", "linear_fc1", "'E.linear_fc1.input_scale'"),
        (".down_proj", ".fc2", "'E.fc2.input_scale'"),
        ("experts.", "experts.local_", "'local_0.down_proj.input_scale'"),
        (".mlp.experts.", ".mlp.moe.", "in their place it has 'model.layers.*.mlp.moe.*.down_pro"),
    ],
)
def test_unknown_names_are_one_sentence(tmp_path, old, new, words):
    """One sentence for the experts of all layers, and no line for each missing tensor."""
    folder = edited(tmp_path, W4A4, rename(old, new))
    for call in (load_model, lambda path: load_moe(path, 1)):
        with pytest.raises(CheckpointError) as caught:
            call(folder)
        (problem,) = caught.value.problems
        assert words in problem
        assert "E.gate_proj, E.up_proj, E.down_proj" in problem or "down_proj.weight or" in problem
    with pytest.raises(CheckpointError, match="and the experts of 1 more layers"):
        load_model(folder)


def test_rows_that_alternate_are_not_guessed(tmp_path):
    """In gpt-oss, nothing says whether rows under other names alternate, too."""
    source = CHECKPOINTS / "gpt_oss-mxfp4"
    folder = copy_with_config(source, tmp_path / "m")
    tensors = read_all(source)
    for name in [name for name in tensors if ".experts." in name]:
        new = name.replace("gate_up_proj", "w13").replace("down_proj", "w2")
        tensors[new] = tensors.pop(name)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"the names 'w13_bias', .* are not known"):
        load_model(folder)


def test_a_matrix_that_does_not_divide_is_a_problem(tmp_path):
    def cut(tensors):
        as_flat_stacks(tensors)
        tensors[f"{EXPERTS}.down_proj"] = tensors[f"{EXPERTS}.down_proj"][:-1]

    with pytest.raises(CheckpointError, match=r"experts.down_proj.*expected U8 \[16, 256, 64\]"):
        load_moe(edited(tmp_path, W4A4, cut), 1)


def test_experts_in_a_float_dtype_under_the_names_of_vllm(tmp_path):
    def dense(tensors):
        for name in [name for name in tensors if name.startswith(EXPERTS)]:
            del tensors[name]
        random = np.random.default_rng(0)
        for x in range(E):
            for name, shape in ((GATE, (128, 256)), (UP, (128, 256)), (DOWN, (256, 128))):
                drawn = random.standard_normal(shape).astype(ml_dtypes.bfloat16)
                tensors[f"{EXPERTS}.{x}.{name}.weight"] = drawn

    def other(tensors):
        dense(tensors)
        as_vllm(tensors)

    expected = params(edited(tmp_path, W4A4, dense))
    assert_equal(params(edited(tmp_path, W4A4, other)), expected)
