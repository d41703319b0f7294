"""Calibrate models of a user, in every form in which Flax and JAX run them, and run them W4A4."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_nvfp4_moe as nvfp4

HIDDEN, WIDE, EXPERTS, LAYERS = 64, 32, 4, 2
BATCHES = np.random.default_rng(0).standard_normal((2, 5, HIDDEN)).astype(np.float32)
F32 = {"dtype": jnp.float32}


@pytest.fixture(autouse=True)
def _float32():
    """Sum float32 on a GPU too, so that all forms of a model compute the same numbers."""
    with jax.default_matmul_precision("float32"):
        yield


class Block(nnx.Module):
    """A residual block with a router of the user, experts, and a linear layer behind them."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.router = nnx.Linear(HIDDEN, EXPERTS, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        kernels = [
            init(rngs.params(), (EXPERTS, HIDDEN, 2 * WIDE)),
            None,
            init(rngs.params(), (EXPERTS, WIDE, HIDDEN)),
        ]
        self.experts = nvfp4.NVFP4Experts.from_dense(*kernels, **F32)
        self.out = nvfp4.NVFP4Linear(HIDDEN, HIDDEN, rngs=rngs, **F32)

    def __call__(self, x):
        normal = self.norm(x)
        weights, ids = jax.lax.top_k(jax.nn.softmax(self.router(normal)), 2)
        return x + self.out(self.experts(normal, ids, weights))


class Plain(nnx.Module):
    """Blocks in a list, called one after the other."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs.fork()) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class WithNnxJit(Plain):
    @nnx.jit
    def __call__(self, x):
        return super().__call__(x)


class WithJit(Plain):
    @jax.jit
    def __call__(self, x):
        return super().__call__(x)


class WithRemat(Plain):
    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


class Vmapped(Plain):
    """Each row of a batch passes through the blocks on its own."""

    def __call__(self, x):
        return nnx.vmap(lambda model, row: Plain.__call__(model, row[None]), in_axes=(None, 0))(
            self, x
        )[:, 0]


class Scanned(nnx.Module):
    """Blocks that are stacked into one module, which a scan takes apart."""

    def __init__(self, blocks):
        graphs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        self.blocks = nnx.merge(graphs[0], stacked)

    def __call__(self, x):
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.blocks
        )


class LaxScanned(Scanned):
    """The same scan in plain JAX, over the arrays of the stacked module, inside `jax.jit`."""

    def __call__(self, x):
        graph, states = nnx.split(self.blocks)

        @jax.jit
        def run(x, states):
            return jax.lax.scan(lambda x, own: (nnx.merge(graph, own)(x), None), x, states)[0]

        return run(x, states)


def make(kind=Plain):
    if issubclass(kind, Scanned):
        return kind(Plain(nnx.Rngs(0)).blocks)
    return kind(nnx.Rngs(0))


def scales(model):
    """Return the input scales of all layers: of the first and second product, and of linears."""
    if isinstance(model, Scanned):
        params, own = model.blocks.experts.params.get_value(), model.blocks.out.input_scale[...]
        return [np.asarray(params.gate_up_input_scale), np.asarray(params.down_input_scale), own]
    params = [block.experts.params.get_value() for block in model.blocks]
    return [
        np.stack([one.gate_up_input_scale for one in params]),
        np.stack([one.down_input_scale for one in params]),
        np.stack([block.out.input_scale[...] for block in model.blocks]),
    ]


@functools.cache
def plain_scales():
    return scales(nvfp4.calibrate(make(), BATCHES))


def entering(model, x):
    """Return the largest magnitudes that enter the products of the first block, in float64."""
    block = model.blocks[0]
    x = np.asarray(block.norm(x), np.float64)
    ids = np.asarray(jax.lax.top_k(block.router(x.astype(np.float32)), 2)[1])
    params = block.experts.params.get_value()
    inner = np.einsum("th,eih->eti", x, np.asarray(params.gate_up.dequantize(), np.float64))
    gate, up = np.split(inner, 2, axis=-1)
    inner = gate / (1 + np.exp(-gate)) * up
    chosen = np.take_along_axis(np.moveaxis(inner, 0, 1), ids[..., None], axis=1)
    return np.abs(x).max(), np.abs(chosen).max()


def test_input_scales_are_the_largest_magnitudes():
    model = make()
    truth = np.max([entering(model, x) for x in BATCHES], axis=0) / 2688
    assert nvfp4.calibrate(model, BATCHES) is model
    first, second, _ = scales(model)
    assert first.shape == second.shape == (LAYERS, EXPERTS)
    np.testing.assert_allclose(first[0], np.full(EXPERTS, truth[0]), rtol=1e-5)
    np.testing.assert_allclose(second[0], np.full(EXPERTS, truth[1]), rtol=1e-5)
    alone = scales(nvfp4.calibrate(make(), BATCHES[:1]))
    # Negative control: without the second batch, some scales are smaller by far more than 1e-5.
    assert any((a < 0.99 * b).any() for a, b in zip(alone, scales(model), strict=True))


@pytest.mark.parametrize("kind", [WithNnxJit, WithJit, WithRemat, Vmapped, Scanned, LaxScanned])
def test_every_form_of_a_model_has_the_same_scales(kind):
    model = make(kind)
    before = model(BATCHES[0])  # programs that were compiled before do not report
    nvfp4.calibrate(model, BATCHES)
    for ours, plain in zip(scales(model), plain_scales(), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5)
    np.testing.assert_allclose(model(BATCHES[0]), before, rtol=1e-5, atol=1e-5)
    assert not any("number" in str(path) for path, _ in nnx.to_flat_state(nnx.state(model)))


@pytest.mark.parametrize("kind", [Plain, Scanned])
def test_a_calibrated_model_runs_w4a4(kind):
    """It computes what a model computes whose modules are made with these scales."""
    model = make(kind)
    before = np.asarray(model(BATCHES[0]))
    nvfp4.calibrate(model, BATCHES, scheme="w4a4")
    y = np.asarray(model(BATCHES[0]))
    assert 1e-3 < np.abs(y - before).max() / np.abs(before).max() < 0.5
    assert {str(c.scheme) for _, c in nvfp4.explain(model).modules} == {"w4a4"}
    if kind is Scanned:
        return
    other = make()
    for block, first, second, own in zip(other.blocks, *plain_scales(), strict=True):
        kernel = block.out.weight.get_value()
        w4a4 = {"scheme": "w4a4", **F32}
        block.out = nvfp4.NVFP4Linear(HIDDEN, HIDDEN, weight=kernel, input_scale=own, **w4a4)
        params = block.experts.params.get_value()
        params = nvfp4.MoEParams(
            params.gate_up,
            params.down,
            gate_up_input_scale=jnp.asarray(first),
            down_input_scale=jnp.asarray(second),
        )
        block.experts = nvfp4.NVFP4Experts(params, **w4a4)
    np.testing.assert_array_equal(y, other(BATCHES[0]))


def test_a_loaded_model_and_a_model_with_its_own_request():
    """Without a scheme, calibration keeps what a module was asked for."""
    asked = nvfp4.NVFP4MoE(4, 64, 32, top_k=2, scheme="w4a16", rngs=nnx.Rngs(0), **F32)
    nvfp4.calibrate(asked, BATCHES)
    assert asked.scheme == "w4a16"
    assert asked.experts.params.get_value().has_input_scales
    nvfp4.calibrate(asked, BATCHES, scheme="checkpoint")
    assert asked.scheme == "w4a4"
    before = asked.experts.params.get_value().gate_up_input_scale
    nvfp4.calibrate(asked, 2 * BATCHES)  # again, while it runs W4A4
    np.testing.assert_allclose(
        asked.experts.params.get_value().gate_up_input_scale, 2 * before, rtol=1e-5
    )


def test_saved_scales_come_back(tmp_path):
    model = nvfp4.calibrate(make(), BATCHES, scheme="w4a4")
    nvfp4.save(tmp_path / "m", model)
    restored = nvfp4.restore(tmp_path / "m", nnx.eval_shape(lambda: model))
    for ours, theirs in zip(scales(restored), scales(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(restored(BATCHES[0]), model(BATCHES[0]))


class Forked(nnx.Module):
    """A model whose second layer no call reaches."""

    def __init__(self, rngs):
        self.first = nvfp4.NVFP4Linear(HIDDEN, HIDDEN, rngs=rngs, **F32)
        self.second = nvfp4.NVFP4Linear(HIDDEN, HIDDEN, rngs=rngs, **F32)

    def __call__(self, x):
        return self.first(x)


def test_a_module_that_no_batch_reaches_is_named(caplog):
    model = Forked(nnx.Rngs(0))
    nvfp4.calibrate(model, BATCHES, scheme="w4a4")
    assert model.first.scheme == "w4a4"
    assert model.second.scheme == "w4a16"
    assert "no batch reached 1 of 2 NVFP4 modules" in caplog.text
    assert "second" in caplog.text


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(nvfp4.NVFP4Linear, HIDDEN, HIDDEN, **F32)(x)


@pytest.mark.parametrize(
    ("make_model", "batches", "message"),
    [
        (lambda: Forked(nnx.Rngs(0)), [], "batches: expected at least one batch"),
        (lambda: Forked(nnx.Rngs(0)), BATCHES[:, :0], "batches: none of the 2 batches reached"),
        (lambda: Forked(nnx.Rngs(0)), BATCHES * np.nan, "that enter first are not finite"),
        (lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), BATCHES, "module: .* Linear contains none"),
        (Linen, BATCHES, "module: expected a Flax NNX module, got Linen"),
        (
            lambda: nnx.bridge.ToNNX(Linen(), nnx.Rngs(0)).lazy_init(BATCHES[0]),
            BATCHES,
            "module: .* ToNNX contains none",
        ),
    ],
    ids=["no batches", "no rows", "nan", "no modules", "linen", "linen in nnx"],
)
def test_what_cannot_be_calibrated_is_said(make_model, batches, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        nvfp4.calibrate(model, batches)
    if isinstance(model, Forked):
        assert model.first.input_scale is None


def test_an_unknown_scheme_is_refused_before_a_batch_runs():
    def batches():
        raise AssertionError
        yield

    with pytest.raises(ValueError, match="scheme: expected"):
        nvfp4.calibrate(make(), batches(), scheme="w8a8")
