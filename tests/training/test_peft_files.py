"""Test the files of adapters against PEFT's own files and logits.

``tests/reference/adapters.py`` made them with PEFT and transformers. With ``--back`` it also reads
files that this package wrote.
"""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from support.devices.host_devices import make_mesh
from support.files.given import CHECKPOINTS, reference_tensors
from support.models.adapters import adapted, fill, load

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, read_header
from jax_nvfp4_moe.models.loading import abstract_model
from jax_nvfp4_moe.training.adaptable import find_adaptable
from jax_nvfp4_moe.training.peft_files import CONFIG, WEIGHTS

ADAPTERS = CHECKPOINTS / "adapters"
NAMES = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
QWEN = "qwen3_moe-window-modelopt-w4a16"
# Attention and experts; latent attention; gate and up interleaved, inputs before outputs.
FEW = (QWEN, "glm4_moe_lite-modelopt-w4a16", "gpt_oss-modelopt-w4a16", "llama4_text-modelopt-w4a16")
call = jax.jit(lambda model, ids: model(ids))


def read(path):
    with Tensors({path.name: path}, read_header(path, path.name, []) or {}) as tensors:
        return {name: np.array(tensors.read(name)) for name in tensors.names()}


def prompt(name):
    return reference_tensors(CHECKPOINTS / name)["input_ids"].astype(np.int32)


def same_files(one, other):
    first, second = (read(folder / WEIGHTS) for folder in (one, other))
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_adapters_of_peft(name, tmp_path):
    """They give PEFT's logits, and are written as PEFT wrote them."""
    want = read(ADAPTERS / "reference.safetensors")[name]
    scale = np.sqrt(np.mean(np.square(want)))
    model, ids = load(CHECKPOINTS / name, scheme="checkpoint"), prompt(name)
    nvfp4.load_lora(model, ADAPTERS / name)
    error = np.abs(np.asarray(call(model, ids))[:, -want.shape[1] :] - want).max() / scale
    assert error <= 1e-5  # the bound of logits without adapters; without them it is 0.35 to 3
    nvfp4.save_lora(model, tmp_path)
    same_files(tmp_path, ADAPTERS / name)
    ours, peft = (json.loads((one / CONFIG).read_text()) for one in (tmp_path, ADAPTERS / name))
    assert (ours["r"], ours["lora_alpha"]) == (peft["r"], peft["lora_alpha"])
    listed = (ours["target_modules"] or []) + (ours["target_parameters"] or [])
    names = (layer.name for layer in find_adaptable(model) if layer.pair is not None)
    assert sorted(one.removesuffix(".weight") for one in listed) == sorted(names)


def test_linears_that_peft_takes_for_experts_are_listed_by_parameter(tmp_path):
    """PEFT adapts routed experts where ``target_modules`` lists a `gate_proj` of a sparse model."""
    model = abstract_model(CHECKPOINTS / "deepseek_v3-direct-modelopt-w4a16").model
    targets = ("layers.1.mlp.shared_experts.gate_proj", "layers.1.self_attn.q_proj")
    nvfp4.add_lora(model, 2, targets=targets[0], rngs=nnx.Rngs(0))
    nvfp4.add_lora(model, 3, targets=targets[1], rngs=nnx.Rngs(0))
    nvfp4.save_lora(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["target_parameters"] == [f"model.{targets[0]}.weight"]
    assert config["target_modules"] == [f"model.{targets[1]}"]
    other = next(iter(config["rank_pattern"].items()))
    assert config["r"] + other[1] == 2 + 3


def test_trained_adapters_are_read_back(tmp_path):
    model = fill_all(load(CHECKPOINTS / QWEN))
    nvfp4.save_lora(model, tmp_path / "new" / "folder")
    again = load(CHECKPOINTS / QWEN)
    nvfp4.load_lora(again, tmp_path / "new" / "folder")
    ids = np.arange(8, dtype=np.int32)[None]
    np.testing.assert_array_equal(call(again, ids), call(model, ids))


def fill_all(model):
    fill(adapted(model, 2))
    return model


@pytest.mark.eight_devices
def test_files_do_not_depend_on_the_mesh(tmp_path):
    name = CHECKPOINTS / "qwen3moe-modelopt-w4a16"
    nvfp4.save_lora(fill_all(load(name)), tmp_path / "one")
    mesh = load(name, mesh=make_mesh((2, 4)))
    nvfp4.load_lora(mesh, tmp_path / "one")
    nvfp4.save_lora(mesh, tmp_path / "mesh")
    for file in (CONFIG, WEIGHTS):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "mesh" / file).read_bytes()


def write(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    whole = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}
    (folder / CONFIG).write_text(json.dumps(whole))
    write_safetensors(folder / WEIGHTS, tensors)
    return folder


def test_adapters_of_single_experts_are_joined(tmp_path):
    """Gate and up have an A each; together they are one adapter of twice the rank."""
    rng, tensors, alone = np.random.default_rng(0), {}, {}
    e, h, i, stem = 12, 64, 112, "base_model.model.model.layers.0.block_sparse_moe.experts"
    for expert in range(e):
        for name, n, k in (("w1", i, h), ("w3", i, h), ("w2", h, i)):
            a, b = rng.standard_normal((2, k)), rng.standard_normal((n, 2))
            alone[expert, name] = b @ a
            for letter, matrix in (("A", a), ("B", b)):
                key = f"{stem}.{expert}.{name}.lora_{letter}.weight"
                tensors[key] = matrix.astype(np.float32)
    model = load(CHECKPOINTS / "mixtral-window-modelopt-w4a16")
    nvfp4.load_lora(model, write(tmp_path / "single", tensors))
    adapter = model.layers[0].mlp.experts.adapter
    for pair, names in ((adapter.gate_up, ("w1", "w3")), (adapter.down, ("w2",))):
        both = pair.read()
        found = both.scale * np.einsum("enr,erk->enk", both.b, both.a)
        want = [np.concatenate([alone[one, name] for name in names]) for one in range(e)]
        np.testing.assert_allclose(found, 1.5 * np.stack(want), rtol=1e-4, atol=1e-4)
    del tensors[f"{stem}.3.w1.lora_A.weight"], tensors[f"{stem}.3.w1.lora_B.weight"]
    model = load(CHECKPOINTS / "mixtral-window-modelopt-w4a16")
    with pytest.raises(nvfp4.CheckpointError, match="for gate_proj and up_proj of all 12 experts"):
        nvfp4.load_lora(model, write(tmp_path / "less", tensors))


Q = "base_model.model.model.layers.1.self_attn.q_proj"
GOOD = {f"{Q}.lora_A.weight": (2, 64), f"{Q}.lora_B.weight": (64, 2)}


def zeros(shapes):
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("words", "shapes", "config"),
    [
        ("use_dora: expected one of False, None; got True", GOOD, {"use_dora": True}),
        ("peft_type: expected one of 'LORA'; got 'IA3'", GOOD, {"peft_type": "IA3"}),
        ("modules_to_save", GOOD, {"modules_to_save": ["lm_head"]}),
        ("init_lora_weights: .* got 'pissa'", GOOD, {"init_lora_weights": "pissa"}),
        ("r: expected a positive number, got 'two'", GOOD, {"r": "two"}),
        ("rank_pattern: expected positive numbers", GOOD, {"rank_pattern": {"q": -1}}),
        ("alpha_pattern: a pattern is no regular", GOOD, {"alpha_pattern": {"(": 1}}),
        (
            "this model has no layer of this name",
            {k.replace("q_", "x_"): v for k, v in GOOD.items()},
            {},
        ),
        ("expected lora_A .r, 64. and lora_B .64, r.", {**GOOD, f"{Q}.lora_A.weight": (2, 32)}, {}),
        (
            "expected lora_A .r, k. and lora_B .n, r., got lora_A",
            {f"{Q}.lora_A.weight": (2, 64)},
            {},
        ),
        ("got lora_A .0, 64.", {f"{Q}.lora_A.weight": (0, 64), f"{Q}.lora_B.weight": (64, 0)}, {}),
        ("lora_magnitude_vector", {**GOOD, f"{Q}.lora_magnitude_vector.weight": (64,)}, {}),
    ],
)
def test_what_is_wrong_is_said(tmp_path, words, shapes, config):
    model = load(CHECKPOINTS / QWEN)
    with pytest.raises(nvfp4.CheckpointError, match=words):
        nvfp4.load_lora(model, write(tmp_path, zeros(shapes), **config))
    assert all(layer.pair is None for layer in find_adaptable(model))


def test_matrices_are_floats(tmp_path):
    whole = {name: value.astype(np.int32) for name, value in zeros(GOOD).items()}
    with pytest.raises(nvfp4.CheckpointError, match="expected a matrix of floats"):
        nvfp4.load_lora(load(CHECKPOINTS / QWEN), write(tmp_path, whole))


@pytest.mark.parametrize("listed", [5, [3], None, "experts.down_proj"])
def test_odd_lists_of_parameters(tmp_path, listed):
    """A list that names no parameter of the experts stands for all of them."""
    model = load(CHECKPOINTS / QWEN)
    stem = "base_model.model.model.layers.1.mlp.experts"
    shapes = {f"{stem}.lora_A.weight": (16, 48), f"{stem}.lora_B.weight": (64, 16)}
    nvfp4.load_lora(model, write(tmp_path, zeros(shapes), target_parameters=listed))
    assert model.layers[1].mlp.experts.adapter.down.a.shape == (8, 2, 48)


def test_patterns_and_a_scale_of_the_root_of_the_rank(tmp_path):
    model = load(CHECKPOINTS / QWEN)
    config = {"alpha_pattern": {r".*\.1\..*q_proj": 5}, "use_rslora": True}
    nvfp4.load_lora(model, write(tmp_path, zeros(GOOD), **config))
    pair = model.layers[1].attention.qkv.q_k_v.adapter.q.read()
    assert pair.scale == pytest.approx(5 / 2**0.5)


def test_each_adapter_keeps_its_rank_and_alpha(tmp_path):
    model, again = load(CHECKPOINTS / QWEN), load(CHECKPOINTS / QWEN)
    nvfp4.add_lora(model, 2, targets="mixers", alpha=3, rngs=nnx.Rngs(0))
    nvfp4.add_lora(model, 4, targets="layers.1.mlp.experts.*", alpha=7, rngs=nnx.Rngs(0))
    nvfp4.add_lora(model, 4, targets="layers.0.mlp.down_proj", alpha=0.5, rngs=nnx.Rngs(0))
    nvfp4.save_lora(model, tmp_path)
    nvfp4.load_lora(again, tmp_path)
    for one, other in zip(find_adaptable(model), find_adaptable(again), strict=True):
        if one.pair is None:
            assert other.pair is None
        else:
            assert one.pair.read().scale == pytest.approx(other.pair.read().scale), one.name


def test_a_folder_and_a_model_without_adapters(tmp_path):
    model = load(CHECKPOINTS / QWEN)
    with pytest.raises(ValueError, match="model: expected a model with adapters"):
        nvfp4.save_lora(model, tmp_path)
    with pytest.raises(nvfp4.CheckpointError, match=CONFIG):
        nvfp4.load_lora(model, tmp_path)
    nvfp4.load_lora(model, ADAPTERS / QWEN)
    with pytest.raises(ValueError, match="expected a model without adapters"):
        nvfp4.load_lora(model, ADAPTERS / QWEN)
