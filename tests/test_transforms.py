"""Test JAX transformations and copies of ops and modules, on the kernel that users get.

A transformed op must equal the plain call bit for bit: the kernel sees operands of the same shapes,
and it is deterministic. The router of a block runs in XLA, which may sum in another order when it
is mapped. A block is therefore compared with float64, and the yardstick is plain XLA in bfloat16.

``jax_debug_nans`` and 64-bit numbers have their own files.
"""

import concurrent.futures
import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS
from support.ops.expert_layer import E, H, I, expert_layer

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.testing import (
    assert_as_accurate_as,
    moe_mlp_float64,
    moe_mlp_xla,
    random_moe_params,
)

LAYERS, SIZES = 3, {"num_experts": E, "hidden": H, "intermediate": I}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
X, PARAMS, IDS, WEIGHTS = expert_layer(dtype=jnp.bfloat16)
OTHERS = random_moe_params(jax.random.key(9), **SIZES)
op = functools.partial(nvfp4.ops.moe_mlp, scheme="w4a16")
plain, yardstick = jax.jit(op), jax.jit(moe_mlp_xla, static_argnums=4)
prepared = pytest.mark.parametrize("prepare", [lambda params: params, nvfp4.prepare])


def assert_same_bits(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *trees)


def part(tree, index):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), tree)


@pytest.fixture(scope="module")
def expected():
    y = plain(X, PARAMS, IDS, WEIGHTS)
    assert np.any(np.asarray(y))
    assert (np.asarray(y) != np.asarray(plain(X, OTHERS, IDS, WEIGHTS))).any()
    return y


def test_the_kernel_runs_and_not_the_reference():
    problem = nvfp4.Problem("moe_mlp", nvfp4.Scheme.W4A16, nvfp4.Target.current())
    assert nvfp4.explain(problem).backend.startswith("moe_w4a16_")


def test_vmap_over_tokens(expected):
    mapped = jax.jit(jax.vmap(op, in_axes=(0, None, 0, 0)))
    x = np.asarray(X)
    twice = (2 * x).astype(x.dtype)  # an older NumPy gives a product in float32
    y = np.asarray(mapped(np.stack([x, twice]), PARAMS, *stack((IDS, WEIGHTS), (IDS, WEIGHTS))))
    assert_same_bits(y[0], expected)
    assert_same_bits(y[1], plain(twice, PARAMS, IDS, WEIGHTS))


@prepared
def test_vmap_over_weights(expected, prepare):
    both = stack(prepare(PARAMS), prepare(OTHERS))
    y = np.asarray(jax.jit(jax.vmap(op, in_axes=(None, 0, None, None)))(X, both, IDS, WEIGHTS))
    assert_same_bits(y[0], expected)
    assert_same_bits(y[1], plain(X, OTHERS, IDS, WEIGHTS))


@prepared
def test_scan_over_layers(expected, prepare):
    both = stack(prepare(PARAMS), prepare(OTHERS))

    def layer(x, params):
        return op(x, params, IDS, WEIGHTS), None

    y = jax.jit(lambda x, layers: jax.lax.scan(layer, x, layers)[0])(X, both)
    assert_same_bits(y, plain(expected, OTHERS, IDS, WEIGHTS))


def test_checkpoint(expected):
    """Rematerialization changes neither the output nor the gradient."""

    def total(run, x):
        return jnp.sum(run(x, PARAMS, IDS, WEIGHTS).astype(jnp.float32))

    again = jax.checkpoint(op)
    assert_same_bits(jax.jit(again)(X, PARAMS, IDS, WEIGHTS), expected)
    gradients = [jax.jit(jax.grad(functools.partial(total, run)))(X) for run in (op, again)]
    assert_same_bits(*gradients)


def test_donation(expected):
    """Donate tokens, whose buffer the output may reuse, and weights, which return in place."""
    x, params = jax.tree.map(jnp.array, (X, nvfp4.prepare(PARAMS)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(x, params):
        return op(x, params, IDS, WEIGHTS), params

    y, kept = step(x, params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((x, params)))
    assert_same_bits(y, expected)
    assert_same_bits(plain(X, kept, IDS, WEIGHTS), expected)


def test_disable_jit(expected):
    with jax.disable_jit():
        assert_same_bits(op(X, PARAMS, IDS, WEIGHTS), expected)


def test_ahead_of_time_compilation(expected):
    given = X, nvfp4.prepare(PARAMS), IDS, WEIGHTS
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
    compiled = jax.jit(op).lower(*shapes).compile()
    assert_same_bits(compiled(*given), expected)


@pytest.mark.parametrize("name", INTEGERS)
def test_ids_of_any_integer_type(expected, name):
    """numpy ids have any dtype. JAX has 64-bit arrays only under x64."""
    ids = np.asarray(IDS).astype(name)
    assert_same_bits(op(X, PARAMS, ids, WEIGHTS), expected)
    with jax.enable_x64(True):
        assert_same_bits(plain(X, PARAMS, jnp.asarray(ids, name), WEIGHTS), expected)


@pytest.mark.parametrize("name", ["int64", "uint64", "uint32"])
def test_ids_that_do_not_fit_32_bits_contribute_nothing(name):
    """A cast to int32 would turn 2**32 into expert 0."""
    ids = np.asarray(IDS).astype(name)
    none = np.asarray(IDS).copy()
    none[0, 0] = none[1, 1] = -1
    ids[0, 0] = np.iinfo(name).max
    ids[1, 1] += np.array(1 << (31 if name == "uint32" else 32), name)
    expected = plain(X, PARAMS, none, WEIGHTS)
    assert_same_bits(op(X, PARAMS, ids, WEIGHTS), expected)
    with jax.enable_x64(True):
        assert_same_bits(plain(X, PARAMS, jnp.asarray(ids, name), WEIGHTS), expected)
    module = nvfp4.NVFP4MoE(E, H, I, top_k=2, params=PARAMS, router_weight=jnp.zeros((E, H)))
    assert_same_bits(module.experts(X, ids, WEIGHTS), expected)


def test_arrays_of_numpy(expected):
    """Pass weights and routing as other libraries give them: numpy arrays, float64 and int64."""
    x, ids, weights = np.asarray(X), np.asarray(IDS, np.int64), np.asarray(WEIGHTS, np.float64)
    for params in (jax.device_get(PARAMS), jax.device_get(nvfp4.prepare(PARAMS))):
        for run in (op, plain):
            assert_same_bits(run(x, params, ids, weights), expected)
    reference = functools.partial(op, backend="reference")
    given = jax.jit(reference)(X, PARAMS, IDS, WEIGHTS)
    assert_same_bits(reference(x, jax.device_get(PARAMS), ids, weights), given)


def test_gradients_of_functions_that_close_over_arrays_of_numpy():
    """The gradients are those of functions that close over arrays of JAX, bit for bit."""

    def of_experts(x, params, ids, weights):
        return jnp.sum(op(x, params, ids, weights).astype(jnp.float32))

    def of_groups(x, weight, sizes):
        y = nvfp4.ops.grouped_gemm(x, weight, sizes, scheme="w4a16")
        return jnp.sum(y.astype(jnp.float32))

    rows, sizes = X.shape[0], np.full(E, X.shape[0] // E, np.int32)
    sizes[0] += rows - sizes.sum()
    for total, given in (
        (of_experts, (PARAMS, IDS, WEIGHTS)),
        (of_groups, (PARAMS.gate_up, jnp.asarray(sizes))),
    ):
        expected = jax.jit(jax.grad(total))(X, *given)
        assert np.any(np.asarray(expected))
        host = jax.device_get(given)

        def closed(x, total=total, host=host):
            return total(x, *host)

        assert_same_bits(jax.jit(jax.grad(closed))(X), expected)


@pytest.fixture(scope="module")
def layers():
    """Return the weights of some blocks, and the same blocks stacked into one module."""
    params = [random_moe_params(jax.random.key(i), **SIZES) for i in range(LAYERS)]
    rng = np.random.default_rng(5)
    routers = jnp.asarray(rng.standard_normal((LAYERS, E, H)).astype(jnp.bfloat16))
    return params, nnx.vmap(make_block)(stack(*params), routers)


def make_block(params, router):
    return nvfp4.NVFP4MoE(*SIZES.values(), top_k=2, params=params, router_weight=router)


@jax.jit
def call(module, x):
    return module(x)


@jax.jit
def route(block, x):
    return block.route(x)


def one_of(stacked, index):
    graph, state = nnx.split(stacked)
    return nnx.merge(graph, part(state, index))


def assert_is_the_block(y, x, block, params):
    """Assert that `y` is the output of `block`: compare with float64 on the block's own routing."""
    given = x, params, *route(block, x), find_activation("silu")
    assert_as_accurate_as(y, yardstick(*given), moe_mlp_float64(*given))


def test_vmap_of_modules(layers):
    params, stacked = layers
    x = np.stack([np.asarray(X) * factor for factor in (1, 2, 3)])
    y = np.asarray(nnx.jit(nnx.vmap(lambda block, x: block(x)))(stacked, x))
    for i in range(LAYERS):
        assert_is_the_block(y[i], x[i], one_of(stacked, i), params[i])
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_is_the_block(y[0], x[0], one_of(stacked, 0), params[1])


def test_scan_of_modules(layers):
    params, stacked = layers

    def layer(x, block):
        y = block(x)
        return x + y, (x, y)

    @nnx.jit
    def run(x, stacked):
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(x, stacked)

    last, (xs, ys) = jax.tree.map(np.asarray, run(X, stacked))
    for i in range(LAYERS):
        assert_is_the_block(ys[i], xs[i], one_of(stacked, i), params[i])
        np.testing.assert_array_equal(xs[i] + ys[i], [*xs[1:], last][i])


def test_remat_of_modules(layers):
    block = one_of(layers[1], 0)

    def total(run, block, x):
        return jnp.sum(run(block, x).astype(jnp.float32))

    runs = lambda block, x: block(x), nnx.remat(lambda block, x: block(x))
    gradients = [nnx.jit(nnx.grad(functools.partial(total, run), argnums=1)) for run in runs]
    given, again = (gradient(block, X) for gradient in gradients)
    np.testing.assert_array_equal(given, again)
    assert np.abs(np.asarray(given, np.float32)).max() > 0


def test_modules_without_jit_and_compiled_ahead(layers):
    params, stacked = layers
    block = one_of(stacked, 1)
    with jax.disable_jit():
        y = block(X)
    assert_is_the_block(y, X, block, params[1])
    compiled = call.lower(block, jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()
    assert_same_bits(compiled(block, X), call(block, X))
    assert_same_bits(call(block, np.asarray(X)), call(block, X))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}
copies = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())


@copies
def test_copies_of_parameters(expected, copied):
    for params in (PARAMS, nvfp4.prepare(PARAMS)):
        again = copied(params)
        assert jax.tree.structure(again) == jax.tree.structure(params)
        assert_same_bits(plain(X, again, IDS, WEIGHTS), expected)


@copies
def test_copies_of_modules(layers, copied):
    """A copy has the same static parts and the same kernel record, so nothing is recompiled."""
    block = one_of(layers[1], 0)
    expected, programs = call(block, X), call._cache_size()
    again = copied(block)
    assert nnx.graphdef(again) == nnx.graphdef(block)
    assert again.experts.params is not block.experts.params
    assert_same_bits(call(again, X), expected)
    assert call._cache_size() == programs
    linear = nvfp4.NVFP4Linear(64, 32, use_bias=True, rngs=nnx.Rngs(0))
    assert_same_bits(call(copied(linear), X), call(linear, X))


@pytest.fixture(scope="module")
def model():
    return nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16", dtype="float32")


def test_generate_from_eight_threads(model):
    """All threads start at once, before anything is compiled."""
    prompts = [np.array([[5 + i, 6, 7 * i]]) for i in range(8)]
    run = functools.partial(nvfp4.generate, model, max_new_tokens=12)
    jax.clear_caches()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda prompt: np.asarray(run(prompt)), prompts))
    for prompt, tokens in zip(prompts, together, strict=True):
        np.testing.assert_array_equal(tokens, run(prompt))
    assert len({tokens.tobytes() for tokens in together}) > 1


@copies
def test_copies_of_models(model, copied):
    prompt = np.array([[5, 6, 7, 8]])
    expected = nvfp4.generate(model, prompt, max_new_tokens=6)
    np.testing.assert_array_equal(nvfp4.generate(copied(model), prompt, max_new_tokens=6), expected)


def test_generate_without_jit(model):
    """Generate only two tokens, because without jit each operation is a program of its own."""
    prompt = np.array([[5, 6, 7, 8]])
    expected = nvfp4.generate(model, prompt, max_new_tokens=2)
    with jax.disable_jit():
        tokens = nvfp4.generate(model, prompt, max_new_tokens=2)
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_model_takes_ids_of_any_integer_type(model, name):
    """The vocabulary has more tokens than int8 has values. Lengths have the same dtype as ids."""
    ids, lengths = np.array([[5, 6, 7, 8], [9, 3, 0, 0]]), np.array([4, 2])
    expected = call_padded(model, ids.astype(np.int32), lengths.astype(np.int32))
    found = call_padded(model, ids.astype(name), lengths.astype(name))
    assert_same_bits(found, expected)
    np.testing.assert_array_equal(
        nvfp4.generate(model, ids.astype(name), lengths=lengths.astype(name), max_new_tokens=3),
        nvfp4.generate(model, ids, lengths=lengths, max_new_tokens=3),
    )
    with jax.enable_x64(True):
        wide = jnp.asarray(ids.astype(name)), jnp.asarray(lengths.astype(name))
        logits, cache = jax.eval_shape(
            lambda: model(wide[0], model.init_cache(2, 8), lengths=wide[1])
        )
    assert (logits.dtype, cache.lengths.dtype) == (jnp.float32, jnp.int32)


@jax.jit
def call_padded(model, ids, lengths):
    return model(ids, lengths=lengths)
