"""Test that what a file stores decides, and that a difference from its config is told."""

import json
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from support.devices.host_devices import make_mesh
from support.files.checkpoint_edits import GIVEN, W4A4, W4A16, edited
from support.files.given import CHECKPOINTS, copy_with_config
from support.files.unquantized import SMALL

from jax_nvfp4_moe import CheckpointError, load_model, quantize_model, restore, save
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.reading.same_tensor import same_tensor
from jax_nvfp4_moe.checkpoint.safetensors import open_tensors
from jax_nvfp4_moe.models.loading import abstract_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = jnp.arange(12, dtype=jnp.int32)[None]
NONE, EQUAL, OTHER = "no head", "an equal head", "another head"


def logits(folder, **options):
    return np.asarray(load_model(folder, dtype=jnp.float32, **options)(IDS))


def set_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    return folder


def with_head(tmp_path, kind, tied, name=W4A4):
    """Write a checkpoint that stores this kind of a head, and whose config says `tied`."""

    def edit(tensors):
        if kind == NONE:
            del tensors[HEAD]
        elif kind == EQUAL:
            tensors[HEAD] = tensors[EMBEDDING]

    return set_config(edited(tmp_path, name, edit), tie_word_embeddings=tied)


def warnings(caplog):
    """Return the warnings, except those about how a module is quantized."""
    found = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    return [one for one in found if "but declared" not in one]


@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize("kind", [NONE, EQUAL, OTHER])
def test_a_stored_head_decides(tmp_path, caplog, kind, tied):
    folder = with_head(tmp_path, kind, tied)
    model = load_model(folder, dtype=jnp.float32)
    told = [one for one in warnings(caplog) if "tie_word_embeddings" in one]
    shares = model.head is None
    assert shares == (kind == NONE or (kind == EQUAL and tied is True))
    assert len(told) == ((kind == NONE and not tied) or (kind == OTHER and bool(tied)))
    found = np.asarray(model(IDS))
    plain = logits(GIVEN / W4A4)
    if kind == OTHER:
        np.testing.assert_array_equal(found, plain)
    else:
        np.testing.assert_array_equal(found, logits(with_head(tmp_path, EQUAL, False)))
        assert np.abs(found - plain).max() > 0.1


@pytest.mark.parametrize("inner", [True, False, None])
@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("model.", "model.lm_head."),
    ],
)
def test_a_stored_head_decides_in_a_multimodal_file(tmp_path, caplog, prefix, head, outer, inner):
    def edit(tensors):
        for name in list(tensors):
            old, _, rest = name.partition(".")
            tensors[{"model": prefix, "lm_head": head}[old] + rest] = tensors.pop(name)

    folder = edited(tmp_path, W4A16, edit)
    text = json.loads((folder / "config.json").read_text())
    text.pop("tie_word_embeddings")
    text |= {} if inner is None else {"tie_word_embeddings": inner}
    config = {name: text.pop(name) for name in ("architectures", "quantization_config")}
    config |= {"text_config": text} | ({} if outer is None else {"tie_word_embeddings": outer})
    (folder / "config.json").write_text(json.dumps(config))
    unread = abstract_model(folder)
    assert unread.model.head is not None
    tied = inner if outer is None else outer
    assert len(warnings(caplog)) == bool(tied)


def test_a_quantized_head_is_not_the_embedding(tmp_path, caplog):
    """A head in NVFP4 is used, too, where the config says that it is tied."""
    source = CHECKPOINTS / "llama4-ct-w4a4"
    folder = copy_with_config(source, tmp_path / "tied", tie_word_embeddings=True)
    set_config(folder, tie_word_embeddings=True)
    plain, tied = (load_model(one, scheme="w4a16").head for one in (source, folder))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(tied), nnx.state(plain))
    assert "stores 'language_model.lm_head." in caplog.text
    assert "differs from the embedding" in caplog.text


FAMILIES = (
    "granitemoeshared-modelopt-w4a16",
    "gemma4-modelopt-w4a16",
    "lfm2_moe-modelopt-w4a16",
    "ernie4_5_moe-modelopt-w4a16",
    "deepseek_v4-modelopt-w4a16",
    "llama4-ct-w4a4",
    "step3p7-modelopt-w4a16",
    "gpt_oss-modelopt-w4a16",
    "nemotron_h-modelopt-w4a16",
    "minimax_m3-modelopt-w4a16",
    "qwen3_next-modelopt-w4a16",
    "kimi_linear-modelopt-w4a16",
)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_families_take_the_head_that_is_stored(tmp_path, caplog, name, tied):
    """A model is found in the headers, with a head and without one."""
    folder = copy_with_config(CHECKPOINTS / name, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    texts = [one for one in (config, config.get("text_config")) if one is not None]
    for text in texts:
        text["tie_word_embeddings"] = tied
    set_config(folder, **config)
    with open_tensors(folder) as tensors:
        stored = {one: tensors.read(one).copy() for one in tensors.names()}
    own = [one for one in stored if "lm_head." in one or one == "head.weight"]
    embedding = next(one for one in stored if ".embed" in one or one.startswith("embed"))
    for one in own:
        del stored[one]
    write_safetensors(folder / "model.safetensors", stored)
    assert abstract_model(folder).model.head is None
    assert len(warnings(caplog)) == (not tied)
    head = f"{own[0].rpartition('.')[0]}.weight" if own else HEAD
    stored[head] = -stored[embedding]
    write_safetensors(folder / "model.safetensors", stored)
    caplog.clear()
    assert abstract_model(folder).model.head is not None
    assert len(warnings(caplog)) == tied


@pytest.mark.eight_devices
def test_a_stored_head_on_a_mesh(tmp_path):
    model = load_model(with_head(tmp_path, OTHER, True), mesh=make_mesh((1, 2)), scheme="w4a16")
    plain = load_model(GIVEN / W4A4, scheme="w4a16")
    weights = [np.asarray(one.head.weight.get_value(), np.float32) for one in (model, plain)]
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("kind", [NONE, OTHER])
def test_a_model_is_restored_with_the_head_that_it_had(tmp_path, kind):
    """The configuration says the opposite of what is stored."""
    folder = with_head(tmp_path, kind, kind == OTHER)
    model = load_model(folder, dtype=jnp.float32)
    save(tmp_path / "saved", model)
    restored = restore(tmp_path / "saved", load_model(folder, dtype=jnp.float32))
    assert (restored.head is None) == (kind == NONE)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(restored), nnx.state(model))


def test_a_head_under_an_unknown_name_is_refused(tmp_path):
    def rename(tensors):
        tensors["output.weight"] = tensors.pop(HEAD)

    for tied in (True, False):
        folder = set_config(edited(tmp_path, W4A4, rename), tie_word_embeddings=tied)
        with pytest.raises(CheckpointError, match=r"'output.weight'.*expected lm_head.weight"):
            load_model(folder)


def test_a_head_that_is_cut_is_missing(tmp_path):
    """Only a head without any tensor is tied."""

    def cut(tensors):
        tensors["lm_head.weight_scale"] = np.ones(3, np.float32)
        del tensors[HEAD]

    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing"):
        load_model(edited(tmp_path, W4A4, cut))


def test_tensors_are_compared_in_chunks(tmp_path):
    """A difference in the last byte of several chunks counts, and so do dtype and shape."""
    whole = np.arange(3 << 20, dtype=np.uint32).view(np.uint8).reshape(-1, 16)
    last = whole.copy()
    last[-1, -1] ^= 1
    others = {"last": last, "flat": whole.reshape(-1), "words": whole.view(np.uint16)}
    write_safetensors(tmp_path / "model.safetensors", {"a": whole, "b": whole.copy(), **others})
    with open_tensors(tmp_path) as tensors:
        assert same_tensor(tensors, "a", "b")
        assert same_tensor(tensors, "a", "a")
        for name in others:
            assert not same_tensor(tensors, "a", name)


def test_quantize_keeps_a_head_that_differs(tmp_path):
    """A source whose config says tied keeps its own head, and what is written loads with it."""
    source = copy_with_config(SMALL / "source", tmp_path / "source", tie_word_embeddings=True)
    quantize_model(source, tmp_path / "out", modules="experts", progress=False)
    with open_tensors(SMALL / "source") as tensors:
        expected = tensors.read(HEAD).astype(np.float32)
        assert not np.array_equal(expected, tensors.read(EMBEDDING).astype(np.float32))
    model = load_model(tmp_path / "out", dtype=jnp.float32)
    np.testing.assert_array_equal(np.asarray(model.head.weight.get_value()), expected)


@pytest.mark.parametrize(
    ("dtype", "factor", "told"),
    [
        (np.float32, 1, False),
        (ml_dtypes.bfloat16, 1, False),
        (np.float16, 1, False),
        (np.float32, 1.01, True),
        (ml_dtypes.bfloat16, 1.05, True),
    ],
)
def test_stored_rotary_frequencies_are_compared(tmp_path, caplog, dtype, factor, told):
    def edit(tensors):
        exact = (1e4 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
            tensors[name] = (exact * factor).astype(dtype)

    folder = edited(tmp_path, W4A4, edit)
    abstract_model(folder)
    assert [
        "2 tensors such as 'model.layers.0.self_attn.rotary_emb.inv_freq' differ" in one
        for one in warnings(caplog)
    ] == [True] * told


@pytest.mark.parametrize(("declared", "told"), [(None, True), (1, True), (2, False)])
def test_layers_that_the_config_does_not_declare_are_told(tmp_path, caplog, declared, told):
    def edit(tensors):
        for layer in (2, 3):
            tensors[f"model.layers.{layer}.input_layernorm.weight"] = np.zeros(256, np.float32)

    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    folder = set_config(edited(tmp_path, W4A4, edit), num_nextn_predict_layers=declared)
    abstract_model(folder)
    assert ["layers beyond the 2 that the config declares" in one for one in warnings(caplog)] == [
        True
    ] * told
    assert "layers beyond the 2 that the config declares" in caplog.text


@pytest.mark.parametrize(
    "name",
    ["mlp.visual.weight", "mtp.weight", "mlp.experts.0.up_proj.bias", "mlp.gate.bias", "scalar"],
)
def test_a_part_of_a_layer_is_never_left_out(tmp_path, name):
    tensor = f"model.layers.1.{name}"
    folder = edited(tmp_path, W4A4, lambda t: t.update({tensor: np.zeros(256, np.float32)}))
    with pytest.raises(CheckpointError, match=f"'{tensor}'.*is not part of the model"):
        load_model(folder)


@pytest.mark.parametrize("module", ["q_proj", "v_proj", "o_proj"])
def test_a_bias_that_the_config_denies_is_used(tmp_path, caplog, module):
    """A stored bias takes part, as where the configuration names it."""
    name = f"model.layers.1.self_attn.{module}.bias"
    rows = {"q_proj": 256, "v_proj": 128, "o_proj": 256}

    def edit(value, modules):
        def change(tensors):
            for layer in range(2):
                for one in modules:
                    bias = f"model.layers.{layer}.self_attn.{one}.bias"
                    tensors[bias] = np.zeros(rows.get(one, 128), np.float32)
            tensors[name] = np.full(rows[module], value, np.float32)

        return change

    found = logits(edited(tmp_path, W4A16, edit(0.5, [])))
    (told,) = warnings(caplog)
    assert "the file stores biases that the configuration denies; they are used" in told
    every = ("q_proj", "k_proj", "v_proj", "o_proj")
    named = set_config(edited(tmp_path, W4A16, edit(0.5, every)), attention_bias=True)
    np.testing.assert_allclose(found, logits(named), atol=1e-5)
    assert np.abs(found - logits(GIVEN / W4A16)).max() > 1e-2


def test_a_correction_bias_that_the_config_denies_is_used(tmp_path, caplog):
    source = CHECKPOINTS / "lfm2_moe-modelopt-w4a16"
    folder = copy_with_config(source, tmp_path / "m", use_expert_bias=False)
    model, plain = (load_model(one, dtype=jnp.float32) for one in (folder, source))
    assert any("use_expert_bias is false" in one for one in warnings(caplog))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(plain))
