"""Run and train transformers of a user, in NNX and in Linen, whose layers are of this package."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

import jax_nvfp4_moe as nvfp4

VOCABULARY, HIDDEN, WIDE, EXPERTS, TOP_K, LAYERS = 32, 64, 32, 8, 2, 2
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 6)).astype(np.int32)
SIZES = EXPERTS, HIDDEN, WIDE
F32 = {"dtype": jnp.float32}
CONSOLE = {"width": 200, "force_terminal": False, "force_jupyter": False}


@pytest.fixture(autouse=True)
def _settings():
    """Promote dtypes as users do, which Adam of optax relies on, and sum float32 on a GPU too."""
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("float32"):
        yield


def attend(qkv):
    """Return causal attention with one head."""
    q, k, v = jnp.split(qkv, 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k) * HIDDEN**-0.5
    t = scores.shape[-1]
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool))[None], scores, -jnp.inf)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, axis=-1), v)


def balance(logits):
    """Return the auxiliary loss of Switch Transformers for router logits ``[..., e]``."""
    shares = jax.nn.softmax(logits, axis=-1).reshape(-1, EXPERTS)
    chosen = jax.nn.one_hot(logits.argmax(-1), EXPERTS).reshape(-1, EXPERTS)
    return EXPERTS * jnp.sum(shares.mean(0) * chosen.mean(0))


def cross_entropy(logits):
    targets = jnp.asarray(IDS[:, 1:])
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets).mean()


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(2))
        self.qkv = nvfp4.NVFP4Linear(HIDDEN, 3 * HIDDEN, rngs=rngs, **F32)
        self.out = nvfp4.NVFP4Linear(HIDDEN, HIDDEN, use_bias=True, rngs=rngs, **F32)
        self.moe = nvfp4.NVFP4MoE(*SIZES, top_k=TOP_K, rngs=rngs, **F32)

    def __call__(self, x):
        x = x + self.out(attend(self.qkv(self.first(x))))
        normal = self.second(x)
        return x + self.moe(normal), self.moe.router_logits(normal)


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap
def make_layers(rngs):
    return Layer(rngs)


class Transformer(nnx.Module):
    """The layers are stacked into one module. A scan runs them, and recomputes them backward."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, HIDDEN, rngs=rngs)
        self.layers = make_layers(rngs)
        self.head = nvfp4.NVFP4Linear(HIDDEN, VOCABULARY, rngs=rngs, **F32)

    def __call__(self, ids):
        run = nnx.remat(lambda x, layer: layer(x))
        scan = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        x, logits = scan(self.embed(ids), self.layers)
        return self.head(x), logits

    def layer(self, index):
        """Return one layer as a module of its own."""
        graph, state = nnx.split(self.layers)
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], state))


class Unrolled(nnx.Module):
    """The same model with a list of layers."""

    def __init__(self, model):
        self.embed, self.head = model.embed, model.head
        self.layers = nnx.List([model.layer(index) for index in range(LAYERS)])

    def __call__(self, ids):
        x, each = self.embed(ids), []
        for layer in self.layers:
            x, logits = layer(x)
            each.append(logits)
        return self.head(x), jnp.stack(each)


@functools.cache
def transformer():
    return Transformer(nnx.Rngs(0))


run = nnx.jit(lambda model, ids: model(ids))


def assert_close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def assert_all_differ(ours, theirs):
    """Check that `assert_close` would find each leaf wrong, with a margin of 10."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert not np.allclose(a, b, rtol=1e-3, atol=1e-3)


def test_scan_jit_and_vmap_compute_what_a_loop_computes():
    model = transformer()
    expected = run(Unrolled(model), IDS)
    assert expected[1].shape == (LAYERS, *IDS.shape, EXPERTS)
    assert_close(run(model, IDS), expected)
    rows = nnx.vmap(lambda model, row: model(row[None])[0][0], in_axes=(None, 0))
    assert_close(nnx.jit(rows)(model, IDS), expected[0])
    backward = Unrolled(model)
    backward.layers = nnx.List(list(backward.layers)[::-1])
    assert_all_differ(run(backward, IDS), expected)  # negative control


def test_gradients_with_scan_and_remat_are_those_of_a_loop():
    model = transformer()

    def loss(model):
        logits, router_logits = model(IDS)
        return cross_entropy(logits) + balance(router_logits)

    def stacked(gradient):
        layers = jax.tree.map(lambda *each: jnp.stack(each), *gradient["layers"].values())
        return gradient | {"layers": layers}

    gradient, loop = nnx.jit(nnx.grad(loss)), Unrolled(model)
    ours, plain = (nnx.to_pure_dict(gradient(one)) for one in (model, loop))
    assert ours.keys() == {"embed", "layers"}
    assert_close(ours, stacked(plain))
    weight = loop.layers[0].out.weight  # negative control: one weight is larger by a 64th
    scaled = weight.get_value().global_scale * (1 + 2**-6)
    weight.set_value(dataclasses.replace(weight.get_value(), global_scale=scaled))
    assert_all_differ(stacked(nnx.to_pure_dict(gradient(loop))), ours)


def test_training_moves_the_router_and_no_quantized_weight():
    model = Transformer(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    frozen = jax.tree.map(np.asarray, nnx.state(model, nvfp4.NVFP4Param))
    router = np.asarray(model.layers.moe.token_router.weight[...])
    assert router.dtype == np.float32

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits, router_logits = model(IDS)
            return cross_entropy(logits) + 0.01 * balance(router_logits)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert np.abs(model.layers.moe.token_router.weight[...] - router).max() > 1e-3
    after = jax.tree.map(np.asarray, nnx.state(model, nvfp4.NVFP4Param))
    jax.tree.map(np.testing.assert_array_equal, after, frozen)


def test_flax_shows_shards_and_copies_the_model():
    model = Unrolled(transformer())
    table = nnx.tabulate(model, IDS, console_kwargs=CONSOLE)
    for name in ("NVFP4MoE", "NVFP4Experts", "TokenRouter", "NVFP4Linear", "NVFP4Param"):
        assert name in table
    specs = jax.tree.leaves(nnx.get_partition_spec(nnx.state(model)))
    assert set(specs) == {PartitionSpec()}
    assert len(specs) == len(jax.tree.leaves(nnx.state(model)))
    assert_close(run(nnx.clone(model), IDS), run(model, IDS))


def test_an_exported_model_computes_the_same():
    graph, state = nnx.split(transformer())
    leaves, structure = jax.tree.flatten(state)

    @jax.jit
    def call(leaves, ids):
        return nnx.merge(graph, jax.tree.unflatten(structure, leaves))(ids)[0]

    checks = nvfp4.export_checks()
    exported = jax.export.export(call, disabled_checks=checks)(leaves, IDS)
    loaded = nvfp4.load_exported(exported.serialize())
    assert_close(loaded.call(leaves, IDS), call(leaves, IDS))


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        qkv = nnx.bridge.to_linen(nvfp4.NVFP4Linear, HIDDEN, 3 * HIDDEN, name="qkv", **F32)
        out = nnx.bridge.to_linen(nvfp4.NVFP4Linear, HIDDEN, HIDDEN, name="out", **F32)
        moe = nnx.bridge.to_linen(nvfp4.NVFP4MoE, *SIZES, top_k=TOP_K, name="moe", **F32)
        x = x + out(attend(qkv(linen.RMSNorm()(x))))
        normal = linen.RMSNorm()(x)
        return x + moe(normal), moe(normal, nnx_method="router_logits")


class LinenTransformer(linen.Module):
    """The same model in Linen, with a scan over layers that are recomputed backward."""

    @linen.compact
    def __call__(self, ids):
        layers = linen.scan(
            linen.remat(LinenLayer),
            variable_axes={"params": 0, "NVFP4Param": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, logits = layers(name="layers")(linen.Embed(VOCABULARY, HIDDEN)(ids), None)
        head = nnx.bridge.to_linen(nvfp4.NVFP4Linear, HIDDEN, VOCABULARY, name="head", **F32)
        return head(x), logits


def test_a_linen_model_runs_trains_and_is_exported():
    model = LinenTransformer()
    variables = model.init(jax.random.key(0), IDS)
    assert variables.keys() == {"params", "NVFP4Param"}
    rest = {"NVFP4Param": variables["NVFP4Param"]}
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits, router_logits = model.apply({"params": params} | rest, IDS)
            return cross_entropy(logits) + 0.01 * balance(router_logits)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    params, losses = variables["params"], []
    state = optimizer.init(params)
    for _ in range(5):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    router = params["layers"]["moe"]["token_router"]["weight"]
    assert router.dtype == jnp.float32
    assert router.shape == (LAYERS, EXPERTS, HIDDEN)
    before = variables["params"]["layers"]["moe"]["token_router"]["weight"]
    assert np.abs(router - before).max() > 1e-3
    call = jax.jit(lambda params, ids: model.apply({"params": params} | rest, ids)[0])
    checks = nvfp4.export_checks()
    exported = jax.export.export(call, disabled_checks=checks)(params, IDS)
    assert_close(nvfp4.load_exported(exported.serialize()).call(params, IDS), call(params, IDS))


@pytest.mark.parametrize("algorithm", ["max", "search"])
def test_the_layers_of_a_dense_model_are_replaced(algorithm):
    """The replaced block and linear compute nearly the same; search has the smaller error."""
    keys = jax.random.split(jax.random.key(0), 5)
    gate, up = (jax.random.normal(key, (EXPERTS, HIDDEN, WIDE)) / 8 for key in keys[:2])
    down = jax.random.normal(keys[2], (EXPERTS, WIDE, HIDDEN)) / 6
    router = jax.random.normal(keys[3], (HIDDEN, EXPERTS))
    x = jax.random.normal(keys[4], (16, HIDDEN))
    moe = nvfp4.NVFP4MoE.from_dense(gate, up, down, router, top_k=TOP_K, algorithm=algorithm, **F32)
    ids, weights = moe.route(x)
    inner = jax.nn.silu(jnp.einsum("th,ehi->eti", x, gate)) * jnp.einsum("th,ehi->eti", x, up)
    every = jnp.einsum("eti,eih->teh", inner, down)
    chosen = jnp.take_along_axis(every, ids[..., None], axis=1)
    truth = jnp.sum(chosen * weights[..., None], axis=1)
    error = float(jnp.linalg.norm(moe(x) - truth) / jnp.linalg.norm(truth))
    assert error < {"max": 0.2, "search": 0.15}[algorithm]
    linear = nvfp4.NVFP4Linear.from_dense(router, algorithm=algorithm, **F32)
    assert float(jnp.linalg.norm(linear(x) - x @ router) / jnp.linalg.norm(x @ router)) < 0.15
