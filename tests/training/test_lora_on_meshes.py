"""Test adapters on meshes of eight CPU devices against those of one device."""

import jax
import numpy as np
import pytest
from flax import nnx
from support.devices.host_devices import BOUND, IDS, call, difference, make_mesh
from support.files.given import CHECKPOINTS
from support.files.unquantized import dequantized
from support.models.adapters import adapted, fill, load, loss_and_gradients

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.training.adaptable import find_adaptable

pytestmark = pytest.mark.eight_devices
QWEN = CHECKPOINTS / "qwen3moe-modelopt-w4a16"


def both(folder, shape, names=("expert", "tensor"), **how):
    """Return a model on one device and on a mesh, with the same adapters that change results."""
    pair = load(folder), load(folder, mesh=make_mesh(shape, names=names), **how)
    for model in pair:
        fill(adapted(model, 4))
    return pair


def matrices(model, gradients):
    """Return the gradients of whole adapters, by the name of the layer."""
    nnx.update(model, gradients)
    return {layer.name: layer.take() for layer in find_adaptable(model) if layer.pair is not None}


def check(one, cut):
    """Check that logits and gradients of two models agree."""
    ids = IDS[:, :9] % one.config.vocab_size
    assert difference(call(cut, ids), call(one, ids)) <= 2 * BOUND
    (here, slopes), (there, others) = (loss_and_gradients(model, ids) for model in (one, cut))
    assert abs(float(here) - float(there)) <= 1e-5 * float(here)
    wanted, found = matrices(one, slopes), matrices(cut, others)
    assert wanted.keys() == found.keys()
    for name, pair in wanted.items():
        for want, got in zip(pair, found[name], strict=True):
            assert difference(got, want) <= 1e-5, name


# Two devices hold the same key head; experts are sharded along both axes.
def test_gradients_over_a_mesh_equal_those_of_one_device():
    check(*both(QWEN, (2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("deepseekv3-modelopt-w4a4", (4, 2)),  # latent attention
        ("granitemoehybrid-modelopt-w4a16", (1, 2)),  # gate and up in one linear, Mamba-2
        ("kimi_linear-modelopt-w4a16", (2, 2)),  # Kimi delta attention
        ("lfm2_moe-modelopt-w4a16", (1, 2)),  # short convolutions
        ("nemotron_h-modelopt-w4a16", (2, 2)),  # Mamba-2, experts without a gate
        ("qwen3_next-modelopt-w4a16", (1, 2)),  # gated delta net
        ("gpt_oss-modelopt-w4a16", (2, 1)),  # biases
        ("gemma3-modelopt-w4a16", (1, 2)),
    ],
)
def test_gradients_of_each_mixer(tmp_path, name, shape):
    small = shape[1] == 1 or name.startswith("deepseekv3")
    check(*both(CHECKPOINTS / name if small else dequantized(name, tmp_path), shape))


@pytest.mark.slow
def test_gradients_of_sharded_rows_are_added_up():
    check(*both(QWEN, (2, 2, 2), ("data", "expert", "tensor")))


@pytest.mark.slow
def test_tokens_that_travel_to_their_experts():
    """The adapters of experts are on the devices of the experts."""
    one, cut = both(QWEN, (4, 1), dispatch="all_to_all")
    assert difference(call(cut, IDS), call(one, IDS)) <= 2 * BOUND


@pytest.mark.slow
def test_generate_on_a_mesh():
    one, cut = both(QWEN, (2, 2))
    made = [nvfp4.generate(m, IDS, max_new_tokens=3, stop_ids=()) for m in (one, cut)]
    np.testing.assert_array_equal(*made)


def test_matrices_are_sharded_like_the_weights_beside_them():
    _, cut = both(QWEN, (2, 4))
    specs = {
        layer.name.split(".", 3)[-1]: tuple(
            tuple(one.get_value().sharding.spec) for one in (layer.pair.a, layer.pair.b)
        )
        for layer in find_adaptable(cut)
        if layer.pair is not None
    }
    assert specs["self_attn.q_proj"] == ((), ("tensor", None))
    assert specs["self_attn.o_proj"] == ((None, "tensor"), ())
    assert specs["mlp.experts.gate_up_proj"] == (("expert",), ("expert", "tensor"))
    assert specs["mlp.experts.down_proj"] == (("expert", None, "tensor"), ("expert",))
    found = nnx.get_partition_spec(nnx.state(cut, nnx.LoRAParam))
    adapter = found["layers"][0]["attention"]["out"]["adapter"]["out"]
    assert tuple(adapter["a"].get_value()) == (None, "tensor")


@pytest.mark.parametrize(
    ("here", "there"), [((2, 4), None), pytest.param((2, 4), (4, 2), marks=pytest.mark.slow)]
)
def test_a_saved_model_moves_to_another_mesh(tmp_path, here, there):
    mesh = load(QWEN, mesh=make_mesh(here))
    fill(adapted(mesh, 2))
    nvfp4.save(tmp_path / "saved", mesh)
    how = {} if there is None else {"mesh": make_mesh(there)}
    again = nvfp4.restore(tmp_path / "saved", adapted(load(QWEN, **how), 2))
    assert difference(call(again, IDS), call(mesh, IDS)) <= 2 * BOUND
    for one, other in zip(find_adaptable(mesh), find_adaptable(again), strict=True):
        if one.pair is not None:
            jax.tree.map(np.testing.assert_array_equal, one.take(), other.take())


def of_kind(model):
    """Return the arrays of a model without adapters, by their paths."""
    state = nnx.state(model, nnx.Not(nnx.LoRAParam))
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (QWEN.name, (2, 4)),  # two devices hold the same key head
        pytest.param("deepseekv3-modelopt-w4a4", (4, 2), marks=pytest.mark.slow),  # latents
        pytest.param("granitemoehybrid-modelopt-w4a16", (2, 1), marks=pytest.mark.slow),
        pytest.param("gpt_oss-modelopt-w4a16", (2, 1), marks=pytest.mark.slow),  # biases
    ],
)
def test_a_model_on_a_mesh_is_merged_with_the_bits_of_one_device(tmp_path, name, shape):
    """The merged weights are sharded as before, and `restore` moves them to one device."""
    folder = CHECKPOINTS / name
    one, cut = both(folder, shape)
    before = {path: leaf.sharding for path, leaf in of_kind(cut).items()}
    for model in (one, cut):
        nvfp4.merge_lora(model)
        assert not jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    assert {path: leaf.sharding for path, leaf in of_kind(cut).items()} == before
    nvfp4.save(tmp_path / "saved", cut)
    moved, original = nvfp4.restore(tmp_path / "saved", load(folder)), of_kind(load(folder))
    changed = 0
    for path, leaf in of_kind(one).items():
        np.testing.assert_array_equal(of_kind(moved)[path], leaf, path)
        changed += bool((np.asarray(leaf) != np.asarray(original[path])).any())
    assert changed > 4
    assert (
        difference(*(call(model, IDS % one.config.vocab_size) for model in (cut, one))) <= 2 * BOUND
    )
