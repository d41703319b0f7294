"""Fine-tune around frozen experts in NVFP4 with LoRA and optax, as a user would write it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_nvfp4_moe as nvfp4

HIDDEN, TOKENS = 64, 32


class Layer(nnx.Module):
    """Two projections with LoRA, around experts in NVFP4."""

    def __init__(self, rngs):
        how = {"dtype": jnp.float32, "rngs": rngs}
        base = nvfp4.NVFP4Linear(HIDDEN, HIDDEN, **how)
        self.before = nnx.LoRA(HIDDEN, 4, HIDDEN, base_module=base, rngs=rngs)
        self.moe = nvfp4.NVFP4MoE(8, HIDDEN, 32, top_k=2, **how)
        self.after = nnx.LoRA(HIDDEN, 4, HIDDEN, rngs=rngs)

    def __call__(self, x):
        x = x + self.before(x)
        return x + self.after(self.moe(x))


def test_only_the_adapters_learn():
    model = Layer(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN))
    y = jnp.roll(x, 1, axis=1)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model)))

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return jnp.mean((model(x) - y) ** 2)

        wrt = nnx.DiffState(0, nnx.LoRAParam)
        value, gradients = nnx.value_and_grad(loss, argnums=wrt)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer, x, y)) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    after = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    changed = {
        jax.tree_util.keystr(path)
        for (path, old), new in zip(
            jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
        if np.asarray(old).tobytes() != np.asarray(new).tobytes()
    }
    assert changed == {
        f"['{name}']['lora_{which}']" for name in ("before", "after") for which in "ab"
    }


def test_the_gradient_is_that_of_the_dequantized_experts():
    """The experts are frozen, and gradients pass through to the adapter before them."""
    params = nvfp4.testing.random_moe_params(
        jax.random.key(0), num_experts=4, hidden=HIDDEN, intermediate=32
    )
    x = jax.random.normal(jax.random.key(1), (8, HIDDEN))
    ids, weights = nvfp4.testing.random_routing(jax.random.key(2), 8, 4, 2)

    def quantized(scale):
        y = nvfp4.ops.moe_mlp(x * scale, params, ids, weights, scheme="w4a16")
        return jnp.sum(jnp.sin(y))

    def dense(scale, weights=weights):
        gate, up = jnp.split(params.gate_up.dequantize(), 2, axis=1)
        rows = x * scale
        each = jax.nn.silu(jnp.einsum("th,eih->eti", rows, gate, precision="highest"))
        each = each * jnp.einsum("th,eih->eti", rows, up, precision="highest")
        out = jnp.einsum("eti,ehi->teh", each, params.down.dequantize(), precision="highest")
        chosen = jnp.take_along_axis(out, ids[..., None], axis=1)
        return jnp.sum(jnp.sin(jnp.sum(chosen * weights[..., None], axis=1)))

    scale = jnp.ones(HIDDEN)
    got, want = (np.asarray(jax.jit(jax.grad(run))(scale)) for run in (quantized, dense))
    bound = (1e-4 if jax.default_backend() == "cpu" else 2e-2) * np.abs(want).max()
    assert np.abs(got - want).max() <= bound
    wrong = jax.jit(jax.grad(dense))(scale, weights[:, ::-1])  # negative control
    assert np.abs(wrong - want).max() > 5 * bound
