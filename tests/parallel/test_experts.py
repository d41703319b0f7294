"""Test experts over a mesh of eight CPU devices against one device."""

import functools
import logging
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_block import block, make_block
from flax import nnx
from host_devices import BOUND, SHAPES, call, difference, make_mesh, name_shape, run_counted, tokens
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_nvfp4_moe import NVFP4MoE, Target, ops
from jax_nvfp4_moe.backends.conversion import forget_reports
from jax_nvfp4_moe.parallel import run_sharded
from jax_nvfp4_moe.parallel.shard_order import join_shards
from jax_nvfp4_moe.parallel.shard_spec import array_layouts
from jax_nvfp4_moe.parallel.sharded_variable import find_layout
from jax_nvfp4_moe.testing import random_moe_params

pytestmark = pytest.mark.eight_devices

# Schemes, activations with and without a gate, and alternating rows. All blocks have biases.
BLOCKS = {
    "w4a16": {},
    "w4a4": {"scheme": "w4a4"},
    "relu2": {"activation": "relu2"},
    "swigluoai": {"activation": "swigluoai"},
    "reference": {"backend": "reference"},
}


def test_only_this_process_has_eight_devices():
    """Code without a mesh runs on the first device. Programs that tests start have one device."""
    first = jax.devices()[0]
    assert jnp.zeros(3).devices() == {first}
    assert Target.current() == Target.of(first)
    code = "import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (jax.device_count(), done.stdout) == (8, "1\n")


@functools.cache
def one_device(case):
    """Return the result of one device for 24 tokens."""
    return call(block(**BLOCKS[case])(), tokens(24))


@pytest.mark.parametrize(
    ("case", "shape", "kind"),
    [
        *(("w4a16", shape, "Auto") for shape in SHAPES),
        ("w4a4", (2, 4), "Auto"),
        ("relu2", (2, 4), "Auto"),
        ("swigluoai", (2, 4), "Auto"),
        ("reference", (2, 4), "Auto"),
        ("w4a16", (4, 2), "Explicit"),
    ],
    ids=name_shape,
)
def test_a_block_over_a_mesh_equals_one_device(case, shape, kind):
    """The only communication is one all-reduce."""
    eight = block(**BLOCKS[case])(mesh=make_mesh(shape, AxisType[kind]))
    found, sent = run_counted(eight, tokens(24))
    assert difference(found, one_device(case)) <= BOUND
    assert sent == {"all-reduce": 1}


def test_sums_of_half_precision_are_float32():
    """Each shard's output and their sum are rounded to bfloat16, so the error at most doubles."""
    x = tokens(256, jnp.bfloat16)
    exact = call(block()(), x.astype(np.float32))
    make = block(dtype=jnp.bfloat16)
    one, eight = (
        difference(call(module, x), exact) for module in (make(), make(mesh=make_mesh((8, 1))))
    )
    assert 0 < eight <= 2 * one


def test_a_block_made_inside_jit():
    """The block is made over a mesh, and on one device."""

    def run(mesh):
        make = functools.partial(make_block, top_k=4, mesh=mesh, dtype=jnp.float32)
        return jax.jit(lambda x: make()(x))(tokens(8))

    assert difference(run(make_mesh((2, 4))), run(None)) <= BOUND


@pytest.mark.parametrize("name", ["expert", "tensor"])
def test_a_mesh_of_one_axis(name):
    mesh, x = make_mesh((2,), names=(name,)), tokens(24)
    assert difference(call(block()(mesh=mesh), x), one_device("w4a16")) <= BOUND


def route(module, x):
    return map(np.asarray, jax.jit(lambda module, x: module.route(x))(module, x))


def test_a_wrong_shard_is_seen():
    """Negative control: ids are one off, as if a shard counted from a wrong expert."""
    x, one, eight = tokens(24), block()(), block()(mesh=make_mesh((8, 1)))
    ids, chosen = route(one, x)
    experts, expert_mesh = eight.experts.params.get_value(), eight.experts.expert_mesh
    run = functools.partial(ops.moe_mlp, scheme="w4a16")
    wrong = jax.jit(functools.partial(run_sharded, run, expert_mesh=expert_mesh))(
        x, experts, (ids + 1) % 16, chosen
    )
    assert difference(wrong, one_device("w4a16")) > 1e-2


def test_shards_are_prepared_for_their_own_number_of_experts():
    """Weights are prepared for the 512 experts of each of two devices, not for all 1024."""
    sizes = {"num_experts": 1024, "hidden": 16, "intermediate": 16}
    params = jax.tree.map(  # zeros, because nothing runs
        lambda leaf: np.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(lambda: random_moe_params(jax.random.key(0), **sizes)),
    )
    given = {"params": params, "mesh": make_mesh((2, 1)), "rngs": nnx.Rngs(0)}
    moe = NVFP4MoE(**sizes, top_k=2, **given)
    forget_reports()  # it logs each message once in a process
    with unittest.mock.patch.object(logging.getLogger("jax_nvfp4_moe"), "warning") as warning:
        program = jax.jit(lambda moe, x: moe(x)).lower(moe, jnp.zeros((4, 16))).as_text()
    assert "nvfp4_moe_w4a16_cpu" in program
    assert not [entry for entry in warning.call_args_list if "converts weights" in entry.args[0]]


def test_a_sum_of_explicit_tokens_that_are_cut():
    """With "psum", tokens that are sharded over Explicit axes stay sharded."""
    mesh = make_mesh((8, 1), AxisType.Explicit)
    x = jax.device_put(tokens(24), NamedSharding(mesh, PartitionSpec("expert")))
    found = call(block()(mesh=mesh), x)
    assert difference(found, one_device("w4a16")) <= BOUND
    assert "expert" in str(found.sharding.spec)


@functools.cache
def routed(count):
    """Return ids and weights of tokens. Some ids are -1 or out of range."""
    ids, chosen = route(block()(), tokens(count))
    ids = ids.copy()
    ids[:3, 0], ids[3:6, 1], ids[6:9] = -1, 16, 99
    return ids, chosen


def gradients(scheme, **options):
    """Return the result, and the gradients of tokens, weights and biases.

    Some ids are -1 or out of range, and shards do not divide the tokens.
    """
    x, module = tokens(21), block(scheme=scheme)(**options)
    y_bar = np.random.default_rng(3).standard_normal(x.shape, np.float32)
    ids, chosen = routed(x.shape[0])
    graph, state = nnx.split(module)

    def loss(x, chosen, state):
        y = nnx.merge(graph, state).experts(x, ids, chosen)
        return (y * y_bar).sum(), y

    grad = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True, allow_int=True))
    (x_bar, chosen_bar, bars), y = grad(x, chosen, state)
    bars = bars["experts"]["params"].get_value()
    layout = find_layout(module.experts.params)
    gate_up_bias = join_shards(bars.gate_up_bias, array_layouts(bars, layout).gate_up_bias)
    return [y, x_bar, chosen_bar, gate_up_bias, bars.down_bias]


one_device_gradients = functools.cache(gradients)


@pytest.mark.parametrize(
    ("scheme", "kind", "shape"),
    [("w4a16", "Explicit", (4, 1)), ("w4a16", "Auto", (2, 2)), ("w4a4", "Auto", (2, 2))],
    ids=name_shape,
)
@pytest.mark.parametrize("dispatch", ["psum", "all_to_all"])
def test_gradients_over_a_mesh_equal_one_device(scheme, dispatch, kind, shape):
    """Gradients of tokens, weights and biases agree, also with ids that are out of range.

    The kind of axes does not depend on the scheme, so w4a4 runs over one kind.
    The bias of gate and up is compared in the order of one device. The bias of down counts once.
    """
    found = gradients(scheme, mesh=make_mesh(shape, AxisType[kind]), dispatch=dispatch)
    for own, expected in zip(found, one_device_gradients(scheme), strict=True):
        assert difference(own, expected) <= BOUND
