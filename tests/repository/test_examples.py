"""Test that the examples show what they say: less memory, LoRA and a drafter that learn."""

import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from support.files.given import EXAMPLE
from support.models.architecture import relative

from jax_nvfp4_moe import (
    NVFP4Tensor,
    add_lora,
    calibrate,
    load_model,
    load_tokenizer,
    quantize_experts,
)
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, open_tensors
from jax_nvfp4_moe.examples import lora, swap_linen, swap_nnx, train_drafter
from jax_nvfp4_moe.nn.variables import NVFP4Param
from jax_nvfp4_moe.numerics.rounding import quantize_weight
from jax_nvfp4_moe.testing import assert_as_accurate_as


@jax.jit
def rounded(gate, up, down):
    """Round kernels ``[experts, inputs, outputs]`` to NVFP4."""
    params = quantize_experts(*(w.swapaxes(1, 2) for w in (gate, up, down)))
    gate, up = jnp.split(params.gate_up.dequantize(), 2, axis=1)
    return [w.swapaxes(1, 2) for w in (gate, up, params.down.dequantize())]


def in_float64(run, values, x):
    """Return ``run(values, x)`` in float64, as the truth."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # Flax also uses float32
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (values, x))
        return np.asarray(jax.jit(run)(*wide))


def normal(shape):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32))


def assert_same_model(swapped, of_rounded, truth, dense):
    """The dense model with rounded weights is the yardstick; its own weights are too far off."""
    assert_as_accurate_as(swapped, of_rounded, truth)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(dense, of_rounded, truth)


def test_swap_in_an_nnx_model():
    model = swap_nnx.Model(64, 32, 8, 2, num_layers=2, rngs=nnx.Rngs(0))
    x = normal((5, 64))
    before = nnx.jit(model)(x)
    swapped = [swap_nnx.swap(block, dtype=x.dtype) for block in model.blocks]
    for block in model.blocks:
        weights = block.gate, block.up, block.down
        for weight, value in zip(weights, rounded(*(w[...] for w in weights)), strict=True):
            weight[...] = value
    of_rounded = nnx.jit(model)(x)
    graph, state = nnx.split(model)
    truth = in_float64(lambda state, x: nnx.merge(graph, state)(x), state, x)
    model.blocks = nnx.List(swapped)
    assert_same_model(nnx.jit(model)(x), of_rounded, truth, before)


def test_swap_in_a_linen_model():
    x = normal((32, swap_linen.HIDDEN))
    run = jax.jit(swap_linen.Model().apply)
    variables = jax.jit(swap_linen.Model().init)(jax.random.key(0), x)
    swapped = jax.jit(swap_linen.NVFP4Model().apply)(swap_linen.swap(variables), x)
    before = run(variables, x)
    names = ("gate", "up", "down")
    moe = variables["params"]["moe"]
    moe |= dict(zip(names, rounded(*(moe[name] for name in names)), strict=True))
    truth = in_float64(swap_linen.Model().apply, variables, x)
    assert_same_model(swapped, run(variables, x), truth, before)


def test_swaps_say_what_they_change(capsys):
    swap_nnx.main()
    swap_linen.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "MB ->" in line]
    for line in lines:
        before, after = (float(word) for word in (line.split()[0], line.split()[3]))
        assert before > 6 * after
    assert len(lines) == 2


def test_lora_learns_and_nothing_else_moves():
    model = load_model(EXAMPLE)
    # The rank and the text of docs/guides/fine_tune.md, so that both compile one program.
    add_lora(model, rank=8, rngs=nnx.Rngs(0))
    ids = jnp.asarray(load_tokenizer(EXAMPLE).encode(lora.TEXT), jnp.int32)[None]
    others = nnx.All(nnx.Variable, nnx.Not(nnx.LoRAParam))
    before = jax.tree.map(np.asarray, nnx.state(model, others))
    assert len(nnx.to_flat_state(nnx.state(model, NVFP4Param))) > 5  # attention too
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for optax
        losses = lora.train(model, ids, steps=4)
    assert losses[-1] < losses[0] - 0.5
    after = nnx.state(model, others)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_trained_drafter_is_the_loaded_one(tmp_path):
    """A few steps learn something, and the file is read as what was trained."""
    folder = tmp_path / "folder"
    shutil.copytree(EXAMPLE, folder)
    rng = np.random.default_rng(0)
    model = load_model(EXAMPLE, dtype=jnp.float32)
    ids = rng.integers(40, size=(4, 24), dtype=np.int32)
    with jax.numpy_dtype_promotion("standard"):  # for optax
        weights = train_drafter.train(model, ids, steps=4, batch=2)
    write_safetensors(folder / "mtp.safetensors", weights)
    drafting = load_model(folder, dtype=jnp.float32, draft="mtp")

    @jax.jit
    def run(model, ids):
        _, hidden = model(ids, with_hidden=True)
        cache = model.init_draft_cache(*ids.shape)
        return hidden, model.draft(hidden[:, :-1], ids[:, 1:], cache)[1]

    hidden, found = run(drafting, ids)
    table = drafting.embedding.get_value()

    def vectors(tensors):
        stacked = jax.tree.map(jnp.asarray, train_drafter.stack_experts(tensors))
        return train_drafter.draft(model.config, stacked, table[ids[:, 1:]], hidden[:, :-1])[0]

    # The bound of draft logits against transformers; a few steps of training are far beyond it.
    assert relative(found, vectors(weights)) < 1e-5
    assert relative(found, vectors(train_drafter.init(model.config))) > 1e-3


def test_a_trained_drafter_is_stored_as_modelopt_stores_it():
    """The example's own file has the same tensors, and their experts have the bits of "max"."""
    trained = {
        name: x.astype(ml_dtypes.bfloat16)
        for name, x in train_drafter.init(load_model(EXAMPLE).config, seed=1).items()
    }
    stored = train_drafter.pack_experts(trained, [2688.0, 1344.0])
    with open_tensors(EXAMPLE) as tensors:
        own = {n: tensors.info(n) for n in tensors.names() if n.startswith("mtp.")}
        shapes = {n: (info.array_shape, STORED_TYPES[info.dtype].numpy) for n, info in own.items()}
        scales = {n: float(tensors.read(n)) for n in own if n.endswith(("input_scale", "scale_2"))}
    assert {n: (x.shape, x.dtype) for n, x in stored.items()} == shapes
    stem = "mtp.layers.0.mlp.experts.3"
    for parts, entering in ((("gate_proj", "up_proj"), 1.0), (("down_proj",), 0.5)):
        names = [f"{stem}.{part}.weight" for part in parts]
        whole = quantize_weight(jnp.concatenate([trained[name] for name in names]))
        for kind, expected in zip(("", "_scale"), whole, strict=False):
            found = np.concatenate([stored[name + kind] for name in names])
            np.testing.assert_array_equal(found, np.asarray(expected))
        for name in names:
            assert stored[f"{name}_scale_2"] == whole[2]
            assert stored[name.replace("weight", "input_scale")] == entering
    # Runtimes merge gate and up of an expert, and take one input scale for all experts.
    assert scales[f"{stem}.gate_proj.weight_scale_2"] == scales[f"{stem}.up_proj.weight_scale_2"]
    first = ("gate_proj.input_scale", "up_proj.input_scale")
    for ends in (first, "down_proj.input_scale"):
        assert len({scale for name, scale in scales.items() if name.endswith(ends)}) == 1


class Drafts(nnx.Module):
    """Drafts several tokens behind each token of a text, as training does."""

    def __init__(self, model):
        self.model = model

    @nnx.jit
    def __call__(self, ids):
        hidden = self.model(ids, with_hidden=True)[1][:, :-1]
        first = hidden[:, :1]
        for _ in range(train_drafter.DEPTH):
            cache = self.model.init_draft_cache(*ids.shape)
            hidden = self.model.draft(hidden, ids[:, 1:], cache)[1]
            hidden = jnp.concatenate([first, hidden[:, :-1]], axis=1)


def test_input_scales_are_those_of_a_calibration():
    model = load_model(EXAMPLE, draft="mtp", dtype=jnp.float32, backend="reference")
    ids = np.random.default_rng(0).integers(4096, size=(4, 24), dtype=np.int32)
    with open_tensors(EXAMPLE) as tensors:
        drafting = {name: tensors.read(name) for name in tensors.names() if name[:4] == "mtp."}
    dense = {name: x for name, x in drafting.items() if x.dtype == ml_dtypes.bfloat16}
    for name, x in drafting.items():
        if x.dtype == np.uint8:
            scales = drafting[f"{name}_scale"], drafting[f"{name}_scale_2"]
            dense[name] = np.asarray(NVFP4Tensor.from_packed(x, *scales).dequantize())
    largest = train_drafter.find_largest_inputs(model, dense, ids, batch=4)
    calibrate(Drafts(model), [ids])
    found = model.drafter.layers[0].mlp.experts.params.get_value()
    for scale, expected in zip(
        (found.gate_up_input_scale, found.down_input_scale), largest, strict=True
    ):
        # Both are maxima of sums of float32 products, in another order.
        assert np.abs(np.asarray(scale) * 2688 / expected - 1).max() < 256 * 2**-24
    assert largest[0] != largest[1]
