"""Test `NVFP4Provider` with Qwix: which kernels are packed, and what models then compute."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_nvfp4_moe as nvfp4

pytestmark = pytest.mark.qwix
if importlib.util.find_spec("qwix"):
    import qwix

    from jax_nvfp4_moe.nn.qwix_provider import NVFP4Provider, PackedKernel, WithAux, quantize_params

D, F, E = 64, 96, 4
SIZES = np.array([5, 0, 4, 7], np.int32)


class Experts(nnx.Module):
    """Gate and up have the same shape, and are cast before the products."""

    def __init__(self, rngs):
        for name, shape in {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}.items():
            setattr(
                self, name, nnx.Param(jax.random.normal(rngs.params(), shape) * shape[1] ** -0.5)
            )

    def __call__(self, x):
        gate, up, down = (getattr(self, name)[...] for name in ("gate", "up", "down"))
        h = jax.nn.silu(jax.lax.ragged_dot(x, gate.astype(x.dtype), SIZES))
        h = h * jax.lax.ragged_dot(x, up.astype(x.dtype), SIZES)
        return jax.lax.ragged_dot(h, down.astype(x.dtype), SIZES)


class Model(nnx.Module):
    """A model in NNX with a kernel of each kind."""

    def __init__(self, rngs):
        self.first = nnx.Linear(D, D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=D, decode=False, rngs=rngs)
        self.batched = nnx.Einsum("etd,edf->etf", (E, D, D), rngs=rngs)
        self.experts = Experts(rngs)
        self.last = nnx.Linear(D, 8, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = x + self.attention(x)
        x = x + self.batched(x)
        x = x + self.experts(x.reshape(-1, D)).reshape(x.shape)
        return self.last(x)


class Linen(linen.Module):
    """A model in Linen with a kernel of each kind."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(D)(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=4)(x)
        shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
        make = linen.initializers.lecun_normal(batch_axis=0)
        kernels = {name: self.param(name, make, shape) for name, shape in shapes.items()}
        rows = x.reshape(-1, D)
        h = jax.nn.silu(jax.lax.ragged_dot(rows, kernels["gate"], SIZES))
        h = h * jax.lax.ragged_dot(rows, kernels["up"], SIZES)
        x = x + jax.lax.ragged_dot(h, kernels["down"], SIZES).reshape(x.shape)
        return linen.Dense(8)(jnp.einsum("btd,dhk->bthk", x, self.param("e", make, (D, 4, 16))))


X = np.random.default_rng(0).standard_normal((E, 4, D), np.float32)
PACKED = {
    *(f"attention.{name}.kernel" for name in ("key", "out", "query", "value")),
    *(f"experts.{name}" for name in ("gate", "up", "down")),
    "batched.kernel",
    "first.kernel",
    "last.kernel",
}


def provider(*rules, **options):
    rules = [*rules, qwix.QuantizationRule(weight_qtype="nvfp4")]
    return NVFP4Provider(rules, **{"dtype": jnp.float32, **options})


def packed_of(model):
    """Return path -> packed kernel of a model in NNX."""
    return {
        ".".join(map(str, (*path, name))): value.array
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, WithAux)
    }


def values_of(kernel):
    """Return the values of a packed kernel in its own shape."""
    axes = kernel.axes
    order = (*axes.groups, *axes.outputs, *axes.inputs)
    tensor = getattr(kernel.tensor, "get_value", lambda: kernel.tensor)()
    values = tensor.dequantize().reshape([kernel.shape[axis] for axis in order])
    return jnp.transpose(values, np.argsort(order))


def assert_near(actual, expected):
    distance = np.linalg.norm(np.asarray(actual) - np.asarray(expected))
    assert distance < 1e-5 * np.linalg.norm(expected)


def test_every_kernel_of_an_nnx_model():
    """The packed model is the model with dequantized kernels; gradients flow to the rest."""
    model = Model(nnx.Rngs(0))
    packed = qwix.quantize_model(model, provider(), X)
    kernels = packed_of(packed)
    assert kernels.keys() == PACKED
    assert len(nnx.to_flat_state(nnx.state(packed, nvfp4.NVFP4Param))) == len(PACKED)
    expected = nnx.clone(model)
    for path, kernel in kernels.items():
        *parents, name = path.split(".")
        module = expected
        for parent in parents:
            module = getattr(module, parent)
        assert kernel.shape == getattr(module, name).shape
        getattr(module, name)[...] = values_of(kernel)
    assert_near(nnx.jit(lambda m, x: m(x))(packed, X), nnx.jit(lambda m, x: m(x))(expected, X))
    differs = np.abs(np.asarray(packed(X)) - np.asarray(model(X))).max()
    assert differs > 1e-3  # the negative control: kernels did change

    def loss(model, x):
        return jnp.sum(jnp.sin(model(x)))

    found, wanted = (nnx.grad(loss, argnums=(0, 1))(one, X) for one in (packed, expected))
    assert_near(found[1], wanted[1])
    assert_near(found[0]["first"]["bias"][...], wanted[0]["first"]["bias"][...])
    assert "kernel" not in found[0]["first"]


def test_packed_kernels_are_those_of_quantize():
    """The loss therefore is that of a model whose experts `quantize` quantized."""
    model = Model(nnx.Rngs(0))
    kernels = packed_of(qwix.quantize_model(model, provider(), X))
    for name in ("gate", "up", "down"):
        tensor = kernels[f"experts.{name}"].tensor.get_value()
        expected = nvfp4.quantize(getattr(model.experts, name)[...].mT)
        canonical = tensor.to_layout("canonical")
        np.testing.assert_array_equal(canonical.packed, expected.packed)
        np.testing.assert_array_equal(canonical.dequantize(), expected.dequantize())
        assert tensor.layout == nvfp4.prepare(expected, dtype="float32").layout
    searched = packed_of(qwix.quantize_model(model, provider(algorithm="search"), X))
    assert (values_of(searched["first.kernel"]) != values_of(kernels["first.kernel"])).any()


def test_a_packed_model_is_saved_and_restored(tmp_path):
    x = X.reshape(-1, D)
    packed, other = (qwix.quantize_model(Experts(nnx.Rngs(seed)), provider(), x) for seed in (0, 1))
    nvfp4.save(tmp_path / "saved", packed)
    restored = nvfp4.restore(tmp_path / "saved", other)
    np.testing.assert_array_equal(restored(x), packed(x))
    assert (np.asarray(other(x)) != np.asarray(packed(x))).any()


def test_activations_in_bfloat16():
    model = Model(nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):
        packed = qwix.quantize_model(model, provider(dtype=jnp.bfloat16), X.astype(jnp.bfloat16))
        y = packed(X.astype(jnp.bfloat16))
    assert packed_of(packed).keys() == PACKED
    exact = qwix.quantize_model(model, provider(), X)(X)
    assert np.linalg.norm(np.asarray(y, np.float32) - exact) < 0.05 * np.linalg.norm(exact)


def test_the_first_rule_that_matches_decides():
    rules = (
        qwix.QuantizationRule(module_path="last"),
        qwix.QuantizationRule(module_path="first", weight_qtype=jnp.int8),
        qwix.QuantizationRule(op_names=("einsum",)),
    )
    packed = qwix.quantize_model(Model(nnx.Rngs(0)), provider(*rules), X)
    kernels = packed_of(packed)
    assert isinstance(packed.last.kernel, nnx.Param)
    assert isinstance(packed.batched.kernel, nnx.Param)
    assert isinstance(kernels.pop("first.kernel"), qwix.QArray)
    assert kernels.keys() == PACKED - {"last.kernel", "first.kernel", "batched.kernel"}
    assert all(isinstance(kernel, PackedKernel) for kernel in kernels.values())


def test_every_kernel_of_a_linen_model():
    model, key = Linen(), jax.random.key(0)
    params = jax.jit(model.init)(key, X)["params"]
    packed = qwix.quantize_model(model, provider())
    shapes = jax.eval_shape(packed.init, key, X)["params"]
    found = quantize_params(params, shapes)
    is_packed = lambda leaf: isinstance(leaf, WithAux)  # noqa: E731
    count = sum(map(is_packed, jax.tree.leaves(found, is_leaf=is_packed)))
    assert count == 1 + 4 + 3 + 1 + 1
    dense = jax.tree.map(
        lambda leaf: values_of(leaf.array) if is_packed(leaf) else leaf, found, is_leaf=is_packed
    )
    run = jax.jit(packed.apply)
    assert_near(run({"params": found}, X), jax.jit(model.apply)({"params": dense}, X))
    made = jax.jit(packed.init)(key, X)["params"]
    assert_near(run({"params": made}, X), run({"params": found}, X))
    with pytest.raises(ValueError, match=r"kernel: expected a packed kernel, got an array"):
        packed.apply({"params": params}, X)


def test_what_cannot_be_packed_is_named():
    x = np.ones((2, 24), np.float32)
    with pytest.raises(ValueError, match=r"kernel: expected a multiple of 16 inputs.*got 24"):
        qwix.quantize_model(nnx.Linear(24, 8, rngs=nnx.Rngs(0)), provider(), x)
    for wrong in ({"act_qtype": "nvfp4"}, {"tile_size": 32}):
        with pytest.raises(ValueError, match=r"^rules: expected act_qtype None"):
            provider(qwix.QuantizationRule(weight_qtype="nvfp4", **wrong))

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Param(jax.random.normal(rngs.params(), (D, D)))

        def __call__(self, x):
            x = jax.lax.dot_general(x, self.table[...], (((1,), (0,)), ((), ())))
            return jax.lax.dot_general(x, self.table[...], (((1,), (1,)), ((), ())))

    with pytest.raises(ValueError, match=r"^kernel: expected a product with the axes"):
        qwix.quantize_model(Tied(nnx.Rngs(0)), provider(), X[0])


def test_products_without_kernels_are_those_of_jax():
    """Attention multiplies activations; their dtypes and precision stay as they are."""

    class Plain(nnx.Module):
        def __call__(self, x):
            y = jnp.einsum("etd,esd->ets", x, x, preferred_element_type=jnp.float32)
            z = jax.lax.dot_general(x[0], x[0], (((1,), (1,)), ((), ())), precision="highest")
            w = jax.lax.ragged_dot(x[0], jnp.stack([z.T @ x[0]] * 2).mT, np.array([2, 2]))
            v = jax.lax.conv_general_dilated(x[:, :, None], x[:1, :, None, :3], (1, 1), "SAME")
            return y, z, w, v, jnp.einsum("etd->d", x)

    packed = qwix.quantize_model(Plain(), provider(), X)
    for one, other in zip(packed(X), Plain()(X), strict=True):
        np.testing.assert_array_equal(one, other)


def test_arrays_of_qwix_in_both_directions():
    kernel = np.random.default_rng(1).standard_normal((3, D, F), np.float32)
    tiles = {"channelwise_axes": [0, 2], "tiled_axes": {1: 16}}
    for dtype in (np.float32, jnp.bfloat16):
        array = qwix.quantize(jnp.asarray(kernel, dtype), "nvfp4", **tiles)
        weight = nvfp4.NVFP4Tensor.from_qarray(array)
        values = qwix.dequantize(array).astype(np.float32)
        np.testing.assert_array_equal(weight.mT.dequantize(dtype).astype(np.float32), values)
        back = weight.to_qarray()
        assert back.qtype == array.qtype == "nvfp4"
        np.testing.assert_array_equal(
            qwix.dequantize(back).astype(dtype).astype(np.float32), values
        )
        again = nvfp4.NVFP4Tensor.from_qarray(back)
        np.testing.assert_array_equal(again.packed, weight.packed)
        np.testing.assert_array_equal(again.block_scale, weight.block_scale)
    own = nvfp4.prepare(nvfp4.quantize(kernel.swapaxes(1, 2)), dtype="float32")
    for axis, expected in ((-2, own.mT), (-1, own)):
        array = own.to_qarray(axis)
        assert array.qtype == jnp.float4_e2m1fn
        np.testing.assert_array_equal(qwix.dequantize(array), expected.dequantize())
    with pytest.raises(ValueError, match=r"^axis: expected -1 or -2"):
        own.to_qarray(0)


def test_ragged_dot_takes_arrays_of_qwix():
    kernel = np.random.default_rng(1).standard_normal((E, D, F), np.float32)
    array = qwix.quantize(kernel, "nvfp4", channelwise_axes=[0, 2], tiled_axes={1: 16})
    rows = X.reshape(-1, D)
    for run in (nvfp4.ragged_dot, jax.jit(nvfp4.ragged_dot)):
        assert_near(run(rows, array, SIZES), qwix.ragged_dot(rows, array, SIZES))
    other = dataclasses.replace(array, scale=array.scale * 1.01)
    with pytest.raises(NotImplementedError, match="E4M3"):
        nvfp4.ragged_dot(rows, other, SIZES)
