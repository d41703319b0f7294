"""Test that devices run each op on the rows that they hold, and gather no rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.devices.host_devices import collectives, make_mesh
from support.ops.numpy_weights import random_experts, random_tensor

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe import ops
from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.ops.chosen_keys import choose_keys
from jax_nvfp4_moe.ops.moves import read_rows, write_tokens

pytestmark = pytest.mark.eight_devices

ROWS = PartitionSpec("data")
RANDOM = np.random.default_rng(0)


def normal(*shape, dtype=jnp.bfloat16):
    return RANDOM.standard_normal(shape, np.float32).astype(dtype)


def integers(high, *shape):
    return RANDOM.integers(0, high, shape, np.int32)


WEIGHT = random_tensor(0, 32, 64)
PARAMS = random_experts(0, 4, 64, 32)
X = normal(16, 64)
IDS, WEIGHTS = integers(4, 16, 2), RANDOM.random((16, 2), np.float32)
Q, K, V = normal(8, 4, 4, 64), normal(8, 2, 16, 64), normal(8, 2, 16, 64)
POSITIONS = np.tile(np.arange(4, dtype=np.int32), (8, 1))
ONE = np.full((8, 1), 5, np.int32)
CACHE = np.zeros((8, 2, 8, 4), np.float32)
STATE = normal(8, 2, 3, 16, 8, dtype=jnp.float32)


def moe_mlp(x, ids, weights, params):
    """Run experts in the layout of their kernel."""
    return ops.moe_mlp(x, nvfp4.prepare(params, scheme="w4a16"), ids, weights, scheme="w4a16")


def quantize(x):
    y = ops.quantize_nvfp4(x)
    return y.packed, y.block_scale, y.global_scale


def step(projected, positions, inputs, state):
    weights = {"conv_weight": jnp.ones((112, 4)), "norm": jnp.ones(8)}
    return ops.gated_delta_step(
        projected, positions, inputs, state, A_log=jnp.zeros(6), dt_bias=jnp.zeros(6), **weights
    )


def convolve(x, inputs):
    positions = jnp.broadcast_to(jnp.arange(16), x.shape[:2])
    return ops.causal_convolution(x, positions, inputs, weight=jnp.ones((8, 4)), widths=(4, 4))


def prepare_latents(down, positions, cache):
    weights = {"kv_weight": jnp.ones(8), "q_weight": jnp.ones(16)}
    return ops.prepare_latents(down, positions, cache, **weights)


# Op -> the function, its rows, and what every device holds.
FORWARD = {
    "linear-of-sequences": (ops.linear, (normal(16, 3, 64),), (WEIGHT,)),
    "moe_mlp": (moe_mlp, (X, IDS, WEIGHTS), (PARAMS,)),
    "attention": (ops.attention, (Q, K, V, POSITIONS), ()),
    "latent-attention": (
        lambda q, k, p: ops.attention(q, k, None, p, value_width=32),
        (Q, K[:, :1], POSITIONS),
        (),
    ),
    "fp8-attention": (
        lambda q, k, v, p, s: ops.attention(q, k, v, p, k_scale=s, v_scale=s),
        (Q, K.astype(jnp.float8_e4m3fn), V.astype(jnp.float8_e4m3fn), POSITIONS),
        (np.ones(2, np.float32),),
    ),
    "norm": (
        lambda x, added, w: ops.add_rms_norm(x, added, w, eps=1e-6),
        (normal(8, 3, 64, dtype=jnp.float32), normal(8, 3, 64, dtype=jnp.float32)),
        (normal(64, dtype=jnp.float32),),
    ),
    "quantize": (quantize, (X,), ()),
    "route": (functools.partial(ops.route, nvfp4.Router(2)), (normal(16, 8),), ()),
    "gated_delta_step": (
        step,
        (normal(8, 1, 172, dtype=jnp.float32), ONE, np.zeros((8, 3, 112), np.float32), STATE),
        (),
    ),
    "convolution": (convolve, (normal(8, 16, 12), np.zeros((8, 3, 8), jnp.bfloat16)), ()),
    "gate_heads": (ops.gate_heads, (normal(16, 4, 64), normal(16, 4)), ()),
    "prepare_heads": (
        ops.prepare_heads,
        (normal(8, 1, 32, dtype=jnp.float32), ONE, CACHE, CACHE),
        (),
    ),
    "prepare_latents": (
        prepare_latents,
        (normal(8, 1, 28, dtype=jnp.float32), ONE, np.zeros((8, 1, 8, 12), np.float32)),
        (),
    ),
}


def run(function, rows, others, kind=AxisType.Auto):
    """Return the compiled program on eight devices, and its results.

    Every device has an eighth of `rows`, and all of `others`.
    """
    mesh = make_mesh((8,), kind, ("data",))
    divided = jax.device_put(rows, NamedSharding(mesh, ROWS))
    whole = jax.device_put(others, NamedSharding(mesh, PartitionSpec()))
    compiled = jax.jit(function).lower(*divided, *whole).compile()
    return compiled, jax.tree.leaves(compiled(*divided, *whole))


def check(function, rows, others, kind=AxisType.Auto, sums=0, bound=0.0):
    """Check a program on eight devices: its sharding, its communication and its values.

    Args:
      function: function of `rows` and `others`.
      rows: arrays whose first axis is divided.
      others: what every device holds.
      kind: type of the mesh axis.
      sums: number of the last results that are sums over all rows.
      bound: largest difference from one device.
    """
    compiled, results = run(function, rows, others, kind)
    assert set(collectives(compiled)) <= ({"all-reduce"} if sums else set())
    expected = jax.tree.leaves(jax.jit(function)(*rows, *others))
    for index, (got, one) in enumerate(zip(results, expected, strict=True)):
        divided = index < len(expected) - sums
        assert not divided or got.sharding.spec[0] == "data"
        own = (one.shape[0] // 8, *one.shape[1:]) if divided else one.shape
        assert got.addressable_shards[0].data.shape == own
        difference = np.abs(np.asarray(got, np.float32) - np.asarray(one, np.float32))
        assert difference.max(initial=0) <= bound


@pytest.mark.parametrize("name", FORWARD)
def test_rows_stay_where_they_are(name):
    check(*FORWARD[name], sums=name == "quantize")


def gradient(function, *arguments):
    """Return a function that computes gradients of a sum to some arguments."""

    def loss(*operands):
        return jnp.sum(jnp.sin(function(*operands).astype(jnp.float32)))

    return jax.grad(loss, arguments)


def linear_with_bias(x, weight, bias):
    return ops.linear(x, weight, bias=bias)


GRADIENTS = {
    "linear": (gradient(linear_with_bias, 0, 2), (X,), (WEIGHT, normal(32, dtype=jnp.float32)), 1),
    "moe_mlp": (
        gradient(lambda x, w, i, p: moe_mlp(x, i, w, p), 0, 1),
        (X, WEIGHTS, IDS),
        (PARAMS,),
        0,
    ),
    "attention": (gradient(ops.attention, 0, 1, 2), (Q, K, V, POSITIONS), (), 0),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_so_do_their_gradients(name, kind):
    function, rows, others, sums = GRADIENTS[name]
    check(function, rows, others, kind, sums, bound=1e-5)


# Functions on Explicit axes. All but the first one are nothing but `by_rows`: the types of their
# results follow from its rule, and not from the sizes of the first array.
EXPLICIT = {
    "prepare_heads": FORWARD["prepare_heads"],
    "read_rows": (
        lambda ids, table: read_rows(table, ids),
        (integers(16, 16),),
        (normal(16, 64),),
    ),
    "write_tokens": (write_tokens, (CACHE, ONE, normal(8, 1, 2, 4, dtype=jnp.float32)), ()),
    "choose_keys": (
        functools.partial(choose_keys, count=4),
        (
            normal(8, 3, 2, 16),
            normal(8, 3, 2, dtype=jnp.float32),
            normal(8, 8, 16),
            POSITIONS[:, :3],
        ),
        (),
    ),
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_rows_on_explicit_axes(name):
    check(*EXPLICIT[name], AxisType.Explicit)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_an_axis_of_vmap_has_rows(kind):
    check(jax.vmap(ops.linear, (0, None)), (normal(8, 3, 64),), (WEIGHT,), kind)


def test_rows_that_a_mesh_does_not_divide():
    """They are gathered, as a sum over rows must not add those that fill up the last part."""

    def compute(x, weight, bias):
        x = jax.lax.with_sharding_constraint(x[:13], NamedSharding(mesh, ROWS))
        return gradient(linear_with_bias, 0, 2)(x, weight, bias)

    mesh = make_mesh((8,), names=("data",))
    others = WEIGHT, normal(32, dtype=jnp.float32)
    _, results = run(compute, (X,), others)
    expected = gradient(linear_with_bias, 0, 2)(X[:13], *others)
    for got, one in zip(results, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(one, np.float32), 1e-2)


def test_shardings_that_only_jit_knows():
    mesh = make_mesh((8,), names=("data",))
    places = NamedSharding(mesh, ROWS), NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(ops.linear, in_shardings=places).lower(X, WEIGHT).compile()
    assert not collectives(compiled)
    assert compiled.output_shardings.spec == ROWS


def test_batch_and_sequence_divided_at_once():
    mesh = make_mesh((4, 2), names=("data", "sequence"))
    x = jax.device_put(normal(8, 4, 64), NamedSharding(mesh, PartitionSpec("data", "sequence")))
    compiled = jax.jit(ops.linear).lower(x, WEIGHT).compile()
    assert not collectives(compiled)
    assert compiled.output_shardings.spec == PartitionSpec("data", "sequence")


def test_one_device_runs_what_it_would_run_alone():
    """The wrapper leaves nothing in the program of one device."""

    def call(x):
        return kernel_call("a_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def strip(function):
        return jax.jit(lambda x: function(x)).lower(X).as_text()

    assert strip(by_rows(call, "... _ -> ... _")) == strip(call)
