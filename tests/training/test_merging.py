"""Test `merge_lora`: weights, logits and files of merged models, with and without `merge_aware`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS, MODELS, reference_tensors
from support.models.adapters import adapted, fill, load

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.nn.linear.lora import LoRA, weight_with_adapters
from jax_nvfp4_moe.numerics.changed_weights import add_rounded
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor, quantize_by
from jax_nvfp4_moe.testing import assert_as_accurate_as
from jax_nvfp4_moe.training.adaptable import find_adaptable

call = jax.jit(lambda model, ids: model(ids))
# Grouped queries and experts; latents, with FP8 and bfloat16 beside; delta nets; experts with
# biases; dense. The slow tests have all.
FEW = (
    "deepseek_v3-modelopt-mixed-w4a16-kv8",
    "gpt_oss-modelopt-w4a16",
    "llama-modelopt-w4a4",
    "qwen3_next-modelopt-w4a16",
)


def ids_of(name):
    return reference_tensors(CHECKPOINTS / name)["input_ids"][:, :12].astype(np.int32)


def add_and_fill(model, size, **how):
    """Add adapters to all layers of a model, whose products are about `size` of the weights."""
    adapted(model, rank=4, **how)
    fill(model)
    for layer in find_adaptable(model):
        if layer.pair is not None:
            a, b = layer.take()
            layer.put(a, size * b, 4, merge_aware=layer.pair.merge_aware)
    return model


def weights_of(model):
    """Return the dequantized weights of a model by the path of their variable."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        for part, matrix in matrices_of(variable.get_value()).items():
            found[f"{'.'.join(map(str, path))}{part}"] = np.asarray(matrix)
    return found


def matrices_of(value):
    if isinstance(value, MoEParams | DenseExperts):
        inner = {f".{name}": getattr(value, name) for name in ("gate_up", "down")}
        return {name: matrices_of(one)[""] for name, one in inner.items()}
    quantized = isinstance(value, NVFP4Tensor | FP8Tensor)
    return {"": value.dequantize() if quantized else value}


@pytest.mark.parametrize("algorithm", ["max", "four_or_six", "search"])
def test_zeros_change_no_weight(algorithm):
    """A sum with zeros has the values of the weight, whatever chose its block scales."""
    x = jax.random.normal(jax.random.key(0), (3, 8, 64))
    weight = quantize_by(x, algorithm)
    again = add_rounded(weight, jnp.zeros(x.shape))
    np.testing.assert_array_equal(again.dequantize(), weight.dequantize())
    found = nvfp4.quantize(weight.dequantize(), weight.global_scale)
    if algorithm != "max":  # new scales would round these weights again
        assert (found.dequantize() != weight.dequantize()).any()


def test_sums_beyond_the_scale_of_a_block_find_a_new_one():
    """A block that grows is rounded as `quantize` does; one that shrinks keeps its scale."""
    x = jax.random.normal(jax.random.key(0), (8, 64))
    weight = nvfp4.quantize(x)
    values = weight.dequantize()
    grown = add_rounded(weight, values)
    expected = nvfp4.quantize(2 * values, weight.global_scale)
    np.testing.assert_array_equal(grown.packed, expected.packed)
    assert (expected.block_scale == grown.block_scale).all()
    shrunk = add_rounded(weight, -values / 2)
    assert (shrunk.block_scale == weight.block_scale).all()
    assert float(jnp.abs(shrunk.dequantize() - values / 2).max()) > 0


@pytest.mark.parametrize("scale", [(8,), (8, 2)], ids=["rows", "groups"])
def test_sums_in_fp8_keep_their_scales(scale):
    """Sums are rounded to E4M3 in units of their scale, and saturate."""
    values = jnp.linspace(-448, 448, 8 * 256).reshape(8, 256).astype(jnp.float8_e4m3fn)
    weight = FP8Tensor(values, jnp.full(scale, 0.5))
    same = add_rounded(weight, jnp.zeros(values.shape))
    np.testing.assert_array_equal(same.dequantize(), weight.dequantize())
    changed = add_rounded(weight, jnp.full(values.shape, 100.0))
    expected = jnp.clip((weight.dequantize() + 100) / 0.5, -448, 448).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(changed.dequantize(), expected.astype(jnp.float32) * 0.5)
    assert not np.isnan(
        add_rounded(FP8Tensor(values, jnp.zeros(scale)), jnp.ones(values.shape)).dequantize()
    ).any()


def test_sums_that_are_not_finite_show():
    """A block of NVFP4 and a value of FP8 with NaN do not become finite."""
    nan = jnp.zeros((8, 64)).at[0, 0].set(jnp.nan)
    weight = nvfp4.quantize(jnp.ones((8, 64)))
    made = add_rounded(weight, nan).dequantize()
    assert jnp.isnan(made[0, :16]).all()
    assert jnp.isfinite(made[0, 16:]).all()
    rounded = FP8Tensor(jnp.ones((8, 64), jnp.float8_e4m3fn), jnp.ones(8))
    assert int(jnp.isnan(add_rounded(rounded, nan).dequantize()).sum()) == 1


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_a_merged_model_computes_what_merge_aware_adapters_do(name):
    """Logits agree up to the rounding of float32, and all adapters are gone."""
    ids, folder = ids_of(name), CHECKPOINTS / name
    how = {"scheme": "w4a16"}  # activations that are rounded would make small differences large
    model = add_and_fill(load(folder, **how), 0.2, merge_aware=True)
    trained = np.asarray(call(model, ids))
    nvfp4.merge_lora(model)
    assert not jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    assert all(layer.pair is None for layer in find_adaptable(model))
    merged = np.asarray(call(model, ids))
    before = np.asarray(call(load(folder, **how), ids))
    size = np.abs(trained - before).max()
    assert size > 1e-2
    assert np.abs(merged - trained).max() < 1e-4 * size


def adapted_linears(model) -> list[Any]:
    return [
        one for _, one in nnx.iter_modules(model) if isinstance(getattr(one, "adapter", 0), LoRA)
    ]


@jax.jit
def multiplied(linear):
    """Return the weight by which a call of a linear layer multiplies."""
    return weight_with_adapters(linear, linear.adapter)


def values(weight):
    return np.asarray(matrices_of(weight)[""])


def test_a_plain_merge_rounds():
    """Merged weights do not depend on the option, but logits before the merge do."""
    name = "qwen3_moe-window-modelopt-w4a16"
    ids, models = ids_of(name), []
    for how in ({"merge_aware": True}, {}):
        models.append(add_and_fill(load(CHECKPOINTS / name), 0.2, **how))
    aware, plain = (np.asarray(call(model, ids)) for model in models)
    used = {id(one): values(multiplied(one)) for one in adapted_linears(models[0])}
    still = [values(one.weight.get_value()) for one in adapted_linears(models[1])]
    before = np.asarray(call(load(CHECKPOINTS / name), ids))
    for model in models:
        nvfp4.merge_lora(model)
    weights, others = map(weights_of, models)
    assert weights.keys() == others.keys()
    for path, weight in weights.items():
        np.testing.assert_array_equal(weight, others[path], path)
    linears: list[Any] = [one for _, one in nnx.iter_modules(models[0]) if id(one) in used]
    assert len(linears) == len(used) > 2
    for one, before_it in zip(linears, still, strict=True):
        np.testing.assert_array_equal(values(one.weight.get_value()), used[id(one)])
        assert (used[id(one)] != before_it).any()
    merged = np.asarray(call(models[1], ids))
    size = np.abs(plain - before).max()
    assert np.abs(merged - aware).max() < 1e-5 * size
    assert np.abs(merged - plain).max() > 0.05 * size


def test_gradients_take_the_rounding_for_the_identity():
    """They are those of ``x @ (Q(W + D) + D - D).T``, where the last D is a constant."""
    layer = nvfp4.NVFP4Linear(64, 32, dtype=jnp.float32, rngs=nnx.Rngs(0))
    nvfp4.add_lora(layer, 4, targets="linear", alpha=8, merge_aware=True, rngs=nnx.Rngs(1))
    (one,) = find_adaptable(layer)
    a, b = one.take()
    b = np.random.default_rng(0).normal(0, 0.05, b.shape).astype(np.float32)
    one.put(a, b, 8, merge_aware=True)
    x = jax.random.normal(jax.random.key(0), (5, 64))
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    found = nnx.grad(lambda layer, x: (layer(x) ** 2).sum(), argnums=(wrt, 1))(layer, x)
    rounded = values(multiplied(layer))

    def expected(dtype, weight):
        """Return what the derivative of ``sum((x @ weight.T)^2)`` is to a, b and x."""
        wide, first, second, weight = (np.asarray(each, dtype) for each in (x, a, b, weight))
        y_bar = 2 * wide @ weight.T
        bar = y_bar.T @ wide  # of the weight; its change is 2 b a
        return 2 * second.T @ bar, 2 * bar @ first.T, y_bar @ weight

    truth, yardstick = (expected(dtype, rounded) for dtype in (np.float64, np.float32))
    unrounded = values(layer.weight.get_value()) + 2 * b @ a
    for own, plain, exact, other in zip(
        jax.tree.leaves(found), yardstick, truth, expected(np.float64, unrounded), strict=True
    ):
        assert_as_accurate_as(own, plain, exact)
        with pytest.raises(AssertionError, match="yardstick"):  # the sum that is not rounded
            assert_as_accurate_as(np.float32(other), plain, exact)


def test_a_mesh_trains_through_the_same_rounding():
    """Each shard rounds its own rows and columns, as one device does."""
    folder, found = CHECKPOINTS / "qwen3moe-modelopt-w4a16", []
    ids = ids_of("qwen3moe-modelopt-w4a16")
    for how in ({}, {"mesh": jax.make_mesh((2, 2), ("expert", "tensor"))}):
        model = add_and_fill(load(folder, **how), 0.5, merge_aware=True)
        found.append(np.asarray(call(model, ids)))
    one, mesh = found
    assert np.abs(one - mesh).max() < 1e-5 * np.abs(one).max()


def test_what_cannot_be_merged_is_refused():
    """A model without adapters, or with values that are not finite, stays as it is."""
    folder = CHECKPOINTS / "qwen3_moe-window-modelopt-w4a16"
    model = load(folder)
    with pytest.raises(ValueError, match="expected a model with adapters"):
        nvfp4.merge_lora(model)
    nvfp4.add_lora(model, 2, targets=("q_proj", "v_proj"), rngs=nnx.Rngs(0))
    for layer in find_adaptable(model):
        if layer.name.endswith("1.self_attn.v_proj"):
            a, b = layer.take()
            layer.put(a, np.full(b.shape, np.nan), 2)
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj .* not finite"):
        nvfp4.merge_lora(model)
    jax.tree.map(np.testing.assert_array_equal, weights_of(model), before)


FILES = (
    "gpt_oss-modelopt-w4a16",
    "llama-ct-w4a16",
    "qwen3moe-modelopt-w4a4",
)


@pytest.mark.parametrize(
    "name",
    [
        n if n in FILES else pytest.param(n, marks=pytest.mark.slow)
        for n in MODELS
        if n != "gpt_oss-mxfp4"  # see `test_experts_in_mxfp4_are_not_written`
    ],
)
def test_the_written_checkpoint_has_the_trained_weights(name, tmp_path):
    """`merge_model` and `save` keep every bit of the weights that the adapted model used."""
    folder = CHECKPOINTS / name
    model = add_and_fill(nvfp4.load_model(folder), 0.2, merge_aware=True)
    nvfp4.save_lora(model, tmp_path / "adapters")
    nvfp4.merge_model(folder, tmp_path / "adapters", tmp_path / "merged")
    nvfp4.merge_lora(model)
    nvfp4.save(tmp_path / "saved", model)
    original = nvfp4.load_model(folder)
    before, merged = weights_of(original), weights_of(model)
    restored = weights_of(nvfp4.restore(tmp_path / "saved", original))
    loaded = weights_of(nvfp4.load_model(tmp_path / "merged"))
    assert before.keys() == merged.keys() == loaded.keys() == restored.keys()
    assert sum((before[path] != merged[path]).any() for path in merged) > 2
    for path, weight in merged.items():
        np.testing.assert_array_equal(restored[path], weight, path)
        # The file may store `kv_b_proj` in fewer bits than the model holds it.
        if ".kv_up." not in path:
            np.testing.assert_array_equal(loaded[path], weight, path)


def test_experts_in_mxfp4_are_not_written(tmp_path):
    """The scales of MXFP4 are shared by two blocks, so its experts cannot be written back."""
    folder = CHECKPOINTS / "gpt_oss-mxfp4"
    model = nvfp4.load_model(folder)
    nvfp4.add_lora(model, 2, targets="experts", rngs=nnx.Rngs(0))
    nvfp4.save_lora(model, tmp_path / "adapters")
    with pytest.raises(nvfp4.CheckpointError, match=r"layers\.0\.mlp\.experts: .* such as MXFP4"):
        nvfp4.merge_model(folder, tmp_path / "adapters", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
