"""Test that Flax shows our modules, copies them and takes them apart, alone and in whole models."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.devices.host_devices import make_mesh
from support.files.given import CHECKPOINTS

import jax_nvfp4_moe as nvfp4

X = jax.random.normal(jax.random.key(0), (2, 64))
IDS = np.arange(10, dtype=np.int32).reshape(2, 5)
WIDE = {"width": 300, "force_terminal": False, "force_jupyter": False}


class Users(nnx.Module):
    """A model of a user that has our modules in it."""

    def __init__(self, rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.block = nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=rngs)
        self.last = nvfp4.NVFP4Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.last(self.block(self.first(x)))


def tabulate(module, *args, **named):
    """Return the table of a module as text. Flax is unusable after a failure, so end the test."""
    return nnx.tabulate(module, *args, console_kwargs=WIDE, **named)


def names(table):
    """Return the entries of the second column, the types of modules."""
    rows = (line.split("│") for line in table.splitlines() if line.startswith("│"))
    return {row[2].strip() for row in rows} - {""}


MODULES = {
    "experts": lambda rngs: nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=rngs),
    "linear": lambda rngs: nvfp4.NVFP4Linear(64, 32, rngs=rngs),
    "a user's model": Users,
}
SHOWN = {
    "experts": {"NVFP4MoE", "TokenRouter", "NVFP4Experts"},
    "linear": {"NVFP4Linear"},
    "a user's model": {"Users", "Linear", "NVFP4MoE", "TokenRouter", "NVFP4Experts", "NVFP4Linear"},
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    module = MODULES[name](nnx.Rngs(0))
    before = module(X)
    assert names(tabulate(module, X)) == SHOWN[name]
    assert "flops" in tabulate(module, X, compute_flops=True)
    np.testing.assert_array_equal(module(X), before)


# Folder, whether the table is of a call with a cache, and some modules that it names. There are
# mixers, caches in FP8 and residual streams of several kinds.
MODELS = [
    ("deepseek_v3-modelopt-mixed-w4a16-kv8", True, {"LatentAttention", "FP8Linear", "GatedMLP"}),
    ("deepseek_v4-modelopt-w4a16", False, {"CompressedAttention", "KeyPool", "HyperConnection"}),
    ("qwen3_next-modelopt-w4a16", False, {"GatedDeltaNet", "Attention", "NVFP4Experts"}),
    ("qwen3moe-modelopt-w4a16", True, {"Attention", "NVFP4MoE", "RMSNorm"}),
]


@pytest.mark.parametrize(("folder", "cached", "expected"), MODELS)
def test_models(folder, cached, expected):
    model = nvfp4.load_model(CHECKPOINTS / folder)
    given = (IDS, model.init_cache(2, 8)) if cached else (IDS,)
    table = tabulate(model, *given, lengths=jnp.array([5, 3]))
    assert expected | {type(model).__name__} <= names(table)


@pytest.mark.parametrize("folder", ["deepseek_v3-direct-modelopt-w4a16", "qwen3moe-modelopt-w4a16"])
def test_operations_of_derivatives_are_counted(folder):
    """Flax differentiates each public method, and passes arrays to it as the model does."""
    layer = nvfp4.load_model(CHECKPOINTS / folder).layers[0].attention
    x = jnp.ones((*IDS.shape, layer.config.hidden), layer.dtype)
    table = tabulate(layer, x, np.broadcast_to(np.arange(5), (2, 5)), None, compute_vjp_flops=True)
    assert {"KeysAndValues", type(layer).__name__} <= names(table)
    assert "vjp_flops" in table


def test_scores_are_shown():
    model = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    assert "NVFP4MoE" in names(tabulate(model, IDS, IDS, method="score"))


def test_copies_and_parts(capsys):
    model = nvfp4.load_model(CHECKPOINTS / "nemotron_h-modelopt-w4a16")
    run = jax.jit(lambda model, ids: model(ids))
    logits = run(model, IDS)
    assert {"Mamba2", "NVFP4MoE"} <= names(tabulate(model, IDS))
    run.clear_cache()  # trace the methods that Flax has put back
    copies = model, copy.deepcopy(model), nnx.clone(model), nnx.merge(*nnx.split(model))
    for one in copies:
        np.testing.assert_array_equal(run(one, IDS), logits)
    for one in (model, nnx.state(model), nnx.graphdef(model)):
        assert "NVFP4Param" in str(one)
    nnx.display(model)
    assert "NVFP4Param" in capsys.readouterr().out
    kinds = {type(part) for _, part in nnx.iter_graph(model)}
    assert {nvfp4.NVFP4MoE, type(model)} <= kinds
    shapes = nnx.eval_shape(lambda model, ids: model(ids), model, IDS)
    assert shapes.shape == logits.shape


def test_a_cache_is_copied_replaced_and_compared():
    """A cache is a dataclass and a tuple."""
    model = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    cache = model.init_cache(2, 8)
    shorter = dataclasses.replace(cache, lengths=jnp.ones(2, jnp.int32))
    assert shorter.lengths.tolist() == shorter[1].tolist() == [1, 1]
    for one in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert type(one) is type(cache)
        assert jax.tree.structure(one) == jax.tree.structure(cache)
        assert one.max_length == one[2] == 8
    assert jax.tree.structure(cache) != jax.tree.structure(model.init_cache(2, 9))


@pytest.mark.eight_devices
def test_a_whole_model_on_a_mesh():
    """The table shows how each variable is sharded, which Flax takes from its metadata."""
    model = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16", mesh=make_mesh((1, 2)))
    before = np.asarray(model(IDS))
    table = tabulate(model, IDS)
    assert {"Decoder", "NVFP4MoE"} <= names(table)
    assert "ShardLayout" in table
    np.testing.assert_array_equal(model(IDS), before)
