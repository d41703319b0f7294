"""Layers with shared experts, as calls of `ops` whose chain has branches on a GPU."""

import jax
import jax.numpy as jnp

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe import Router, ops
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.preparation import convert, plan_product

HIDDEN, EXPERTS, TOP_K, INTERMEDIATE, SHARED = 1024, 16, 4, 256, 512


def make_layer(seed, target):
    """Return the random weights of a layer, in the layouts for a target."""
    keys = jax.random.split(jax.random.key(seed), 4)

    def linear(key, n, k):
        weight = nvfp4.quantize(jax.random.normal(key, (n, k)) * k**-0.5)
        plan = plan_product(weight, checkpoint_scheme="w4a16", target=target)
        return convert(weight, plan.layout)

    experts = nvfp4.testing.random_moe_params(
        keys[1], num_experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE
    )
    return {
        "norm": jnp.ones(HIDDEN, jnp.bfloat16),
        "router": jax.random.normal(keys[0], (EXPERTS, HIDDEN), jnp.bfloat16),
        "experts": nvfp4.prepare(experts, target=target),
        "gate_up": linear(keys[2], 2 * SHARED, HIDDEN),
        "down": linear(keys[3], HIDDEN, SHARED),
    }


def run_layers(x, layers, target, *, shared=True):
    """Run the layers, whose norms add the inputs of the layer before.

    Args:
      x: tokens ``[t, HIDDEN]``, bfloat16.
      layers: list of what `make_layer` returns.
      target: the `Target` to lower for.
      shared: whether to run the shared experts. Otherwise norms add what the routed experts return,
        and compute its sums over the experts of a token in a chain.

    Returns:
      ``[t, HIDDEN]``.
    """
    y = None
    for layer in layers:
        x, own = ops.add_rms_norm(x, y, layer["norm"], eps=1e-6, target=target)
        logits = dense(own, layer["router"], target=target)
        ids, weights = ops.route(Router(TOP_K), logits, target=target)
        routed = ops.moe_mlp(own, layer["experts"], ids, weights, target=target)
        if not shared:
            y = routed
            continue
        gate_up = ops.linear(own, layer["gate_up"], target=target)
        other = ops.linear(ops.activate(gate_up, target=target), layer["down"], target=target)
        y = ops.add_gated(routed, None, other, target=target)
    return ops.add_rms_norm(x, y, layers[-1]["norm"], eps=1e-6, target=target)[1]
