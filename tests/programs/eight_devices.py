"""Run expert blocks on a mesh of eight host devices; `test_parallel.py` starts this and judges.

python tests/programs/eight_devices.py NAME ...  prints JSON for each: [name, figures]
"""

import functools
import logging
import os
import re
import unittest.mock

if __name__ == "__main__":
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from expert_layer import with_biases, with_one_scale
from flax import nnx
from given import CHECKPOINTS, EXAMPLE
from host_devices import call, collectives, compare, difference, make_mesh, run_checks, tokens
from jax.sharding import AxisType
from ragged_emulation import emulate_ragged

import jax_nvfp4_moe as nvfp4
import jax_nvfp4_moe.parallel.dispatch
import jax_nvfp4_moe.parallel.experts
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.parallel import ExpertMesh, run_sharded
from jax_nvfp4_moe.parallel.shard_order import join_shards
from jax_nvfp4_moe.parallel.shard_spec import array_layouts, find_layout
from jax_nvfp4_moe.testing import random_moe_params

LAYER = {"num_experts": 16, "hidden": 64, "intermediate": 128}


@functools.cache
def weights(activation="silu"):
    """Return the weights of a small block with biases."""
    row = find_activation(activation).row
    params = random_moe_params(jax.random.key(0), **LAYER, gated=row.gated)
    params = with_one_scale(params) if row.interleaved else params
    return with_biases(params, jax.random.split(jax.random.key(1), 2), 1 / 8)


def block(**changes):
    """Return a function that makes a small block with biases, over a mesh or not."""
    params = weights(changes.get("activation", "silu"))
    options = {
        "top_k": 4,
        "params": params,
        "dtype": jnp.float32,
        "checkpoint_scheme": "w4a4",
    } | changes
    return functools.partial(make_block, **options)


def make_block(**options):
    return nvfp4.NVFP4MoE(**LAYER, **options, rngs=nnx.Rngs(0))


def blocks():
    """Schemes, activations with and without a gate, alternating rows; biases in all."""
    x = tokens(24)
    figures = {"w4a16": compare(block(), x)}
    cases = {
        "w4a4": {"scheme": "w4a4"},
        "relu2": {"activation": "relu2"},
        "swigluoai": {"activation": "swigluoai"},
        "reference": {"backend": "reference"},
    }
    for name, changes in cases.items():
        figures[name] = compare(block(**changes), x, [(2, 4)])
    figures["explicit"] = compare(block(), x, [(4, 2)], AxisType.Explicit)
    return figures


def half_precision():
    """Errors against float32 of one device and of eight, whose sums are float32."""
    x = tokens(256).astype(jnp.bfloat16)
    exact = call(block()(), x.astype(jnp.float32))
    one = block(dtype=jnp.bfloat16)
    return [difference(call(module, x), exact) for module in (one(), one(mesh=make_mesh((8, 1))))]


def traced():
    """A block made inside a jitted function, over a mesh and not."""

    def run(mesh):
        make = functools.partial(make_block, top_k=4, mesh=mesh, dtype=jnp.float32)
        return jax.jit(lambda x: make()(x))(tokens(8))

    return difference(run(make_mesh((2, 4))), run(None))


def one_axis():
    """A mesh with one of the two axes."""
    figures = []
    for name in ("expert", "tensor"):
        mesh = jax.make_mesh((2,), (name,), devices=jax.devices()[:2])
        figures.append(difference(call(block()(mesh=mesh), tokens(8)), call(block()(), tokens(8))))
    return figures


def unshifted():
    """The error where ids are one off: the negative control of all others."""
    x, one, eight = tokens(24), block()(), block()(mesh=make_mesh((8, 1)))
    ids, weights = one.route(x)
    experts, expert_mesh = eight.experts.params.get_value(), eight.experts.expert_mesh
    run = functools.partial(nvfp4.ops.moe_mlp, scheme="w4a16")
    wrong = run_sharded(run, x, experts, (ids + 1) % 16, weights, expert_mesh=expert_mesh)
    return difference(wrong, one.experts(x, ids, weights))


def many_experts():
    """The log of a call: 1024 experts on two devices, of which one kernel takes 512."""
    sizes = {"num_experts": 1024, "hidden": 16, "intermediate": 16}
    params = random_moe_params(jax.random.key(0), **sizes)
    given = {"params": params, "mesh": make_mesh((2, 1)), "rngs": nnx.Rngs(0)}
    block = nvfp4.NVFP4MoE(**sizes, top_k=2, **given)
    with unittest.mock.patch.object(logging.getLogger("jax_nvfp4_moe"), "info") as info:
        program = jax.jit(lambda block, x: block(x)).lower(block, jnp.zeros((4, 16))).as_text()
    said = [entry.args[0] for entry in info.call_args_list]
    converts = any("converts weights" in text for text in said)
    return ["nvfp4_moe_w4a16_cpu" in program, converts]


def refusals():
    """What is refused, as it is said."""
    devices = jax.devices()
    cases = {
        "experts": lambda: block()(mesh=jax.make_mesh((3,), ("expert",), devices=devices[:3])),
        "blocks": lambda: block()(mesh=jax.make_mesh((3,), ("tensor",), devices=devices[:3])),
        "axes": lambda: block()(mesh=jax.make_mesh((8,), ("data",))),
        "type": lambda: block()(mesh=devices),
        "rows": lambda: block(scheme="w4a4_token_scale")(mesh=make_mesh((1, 2))),
        "alternating": lambda: block(activation="swigluoai", params=weights())(
            mesh=make_mesh((1, 2))
        ),
        "context": lambda: call_in_context(block()(mesh=make_mesh((8, 1)))),
        "exchange name": lambda: nvfp4.load_model(EXAMPLE, dispatch="broadcast"),
        "exchange alone": lambda: nvfp4.load_model(EXAMPLE, dispatch="all_to_all"),
        "exchange axes": lambda: nvfp4.load_moe(
            EXAMPLE,
            0,
            dispatch="all_to_all",
            mesh=jax.make_mesh((2,), ("tensor",), devices=devices[:2]),
        ),
        "exchange platform": lambda: nvfp4.load_model(
            EXAMPLE, dispatch="ragged", mesh=make_mesh((8, 1))
        ),
        "checkpoint": lambda: nvfp4.load_model(
            CHECKPOINTS / "deepseekv3-modelopt-w4a4", mesh=make_mesh((2, 4))
        ),
    }
    said = {}
    for name, refused in cases.items():
        try:
            refused()
        except ValueError as error:
            said[name] = str(error)
    return said


def call_in_context(module):
    with jax.set_mesh(make_mesh((8, 1), AxisType.Explicit)):
        return call(module, tokens(8))


def dispatched():
    """Tokens shared out too; where there are two figures, the second is of rounds of two rows.

    In such rounds over eight shards rows of w4a4 go as codes, once for each expert.
    """
    x, figures = tokens(24), {}
    cases = {
        "w4a16": ({}, (8, 1), x),
        "product": ({}, (2, 2), x),
        "w4a4": ({"scheme": "w4a4"}, (2, 2), x),
        "w4a4 by slot": ({"scheme": "w4a4"}, (8, 1), x),
        "w4a4_unit_scale": ({"scheme": "w4a4_unit_scale"}, (2, 1), x),
        "w4a4_token_scale": ({"scheme": "w4a4_token_scale"}, (2, 1), x),
        "uneven": ({}, (8, 1), x[:21]),
        "nothing": ({}, (2, 1), x[:0]),
    }
    on_input = {"top_k": None, "router": Router(4, score="sigmoid", weight_on_input=True)}
    for scheme in ("w4a4", "w4a4_unit_scale", "w4a4_token_scale"):
        cases[f"{scheme} on input"] = (on_input | {"scheme": scheme}, (2, 1), x)
    for name, (changes, shape, x) in cases.items():
        one = block(**changes)
        expected, figures[name] = call(one(), x), []
        rounds = "w4a16", "w4a4 by slot", "product", "uneven"
        for capacity in (None, 2) if name in rounds else (None,):
            eight = one(mesh=make_mesh(shape), dispatch="all_to_all", capacity=capacity)
            compiled = call.lower(eight, x).compile()
            error = difference(compiled(eight, x), expected) if x.size else 0.0
            figures[name].append([error, collectives(compiled)])
    return figures


def explicit_sum():
    """The error of "psum" over Explicit axes on tokens that come in cut, and how they come out."""
    mesh = make_mesh((8, 1), AxisType.Explicit)
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    x = jax.device_put(tokens(24), cut)
    found = call(block()(mesh=mesh), x)
    return [difference(found, call(block()(), tokens(24))), str(found.sharding.spec)]


def explicit_tokens():
    """Errors over Explicit axes, by the shape of the tokens and how they come in."""
    figures, mesh = {}, make_mesh((8, 1), AxisType.Explicit)
    one, eight = block()(), block()(mesh=mesh, dispatch="all_to_all")
    for lead in ((1,), (5,), (1, 5), (3, 1), (3, 8), (8, 3), (24,)):
        x = tokens(24)[: np.prod(lead)].reshape(*lead, 64)
        expected = call(one, x)
        for name in ("", "expert") if lead[0] % 8 == 0 else ("",):
            spec = jax.sharding.PartitionSpec(name or None)
            given = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
            found = call(eight, given)
            same = found.sharding.is_equivalent_to(given.sharding, x.ndim)
            figures[f"{lead} {name}"] = [difference(found, expected), same]
    figures["(24,) bare"] = [difference(call(eight, x), expected), True]  # x of no mesh
    return figures


def gradients():
    """Differences of results, and gradients to tokens, weights and biases, from one device's.

    Some ids are -1 or out of range; shards do not divide the tokens.
    """
    x, figures = tokens(21), {}
    y_bar = jax.random.normal(jax.random.key(3), x.shape)
    ids, chosen = block()().route(x)
    ids = ids.at[:3, 0].set(-1).at[3:6, 1].set(16).at[6:9].set(99)

    def run(module):
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

    for scheme in ("w4a16", "w4a4"):
        one = block(scheme=scheme)
        expected = run(one())
        for dispatch in ("psum", "all_to_all"):
            for kind, shape in (("Auto", (4, 1)), ("Explicit", (4, 1)), ("Auto", (2, 2))):
                mesh = make_mesh(shape, AxisType[kind])
                pairs = list(zip(run(one(mesh=mesh, dispatch=dispatch)), expected, strict=True))
                errors = [difference(a, b) for a, b in pairs]
                figures[f"{scheme} {dispatch} {kind} {shape}"] = errors
    return figures


def bytes_sent():
    """Words that all_to_all moves for rows of bfloat16 as they are, and quantized."""
    found = {}
    for scheme in ("w4a16", "w4a4_unit_scale"):
        module = block(scheme=scheme, dtype=jnp.bfloat16)(
            mesh=make_mesh((8, 1)), dispatch="all_to_all"
        )
        text = call.lower(module, tokens(64)).as_text()
        found[scheme] = re.findall(r"all_to_all.*-> tensor<([0-9x]+)xui32>", text)
    return found


def ragged():
    """Names of collectives in the program for a GPU; a CPU cannot run it."""
    module = block(target=nvfp4.Target("cuda", (9, 0)))(mesh=make_mesh((8, 1)), dispatch="ragged")
    lowered = call.trace(module, tokens(64)).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @(ragged_all_to_all|nvfp4_moe_w4a16_sm90)", lowered.as_text())


def ragged_numbers():
    """Differences of "ragged" and "all_to_all", by scheme, mesh, tokens and pieces of a pair.

    A CPU has no `ragged_all_to_all`: an emulation of what XLA's documentation says of it stands in.
    """
    figures = {}
    module = jax_nvfp4_moe.parallel.dispatch
    cases = ("w4a16", (8, 1), 24), ("w4a4", (2, 1), 5), ("w4a4_token_scale", (2, 1), 64)
    for scheme, shape, count in cases:
        x, one = tokens(count), block(scheme=scheme)
        expected = call(one(mesh=make_mesh(shape), dispatch="all_to_all"), x)
        for near in (True, False):
            with (
                unittest.mock.patch.object(jax.lax, "ragged_all_to_all", emulate_ragged),
                unittest.mock.patch.object(ExpertMesh, "in_one_process", return_value=near),
            ):
                found = jax.jit(lambda m, x: m(x))(one(mesh=make_mesh(shape), dispatch="ragged"), x)
            pieces = module._count_updates(-(-count // shape[0]), shape[0], near)
            name = f"{scheme} {shape} {count} in {pieces}"
            figures[name] = float(np.abs(np.asarray(found - expected)).max())
    return figures


CHECKS = {
    check.__name__: check
    for check in (
        blocks,
        half_precision,
        traced,
        one_axis,
        unshifted,
        many_experts,
        refusals,
        dispatched,
        explicit_sum,
        explicit_tokens,
        gradients,
        bytes_sent,
        ragged,
        ragged_numbers,
    )
}

if __name__ == "__main__":
    run_checks(CHECKS)
