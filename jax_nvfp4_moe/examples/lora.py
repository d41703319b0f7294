"""Train LoRA on the attention of a loaded NVFP4 checkpoint; its experts stay packed and frozen.

Run it: ``python -m jax_nvfp4_moe.examples.lora``.
"""

import pathlib

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer

CHECKPOINT = pathlib.Path(__file__).parent / "tiny-python-moe"
TEXT = '''
def haiku(season):
    """Say what the season brings."""
    if season == "autumn":
        return ["the old maple lets", "one red leaf fall on the pond", "the frog does not mind"]
    return ["snow on the mailbox", "nobody has written me", "the cat keeps the stove"]
'''


def add_lora(model, rank, rngs):
    """Put a low-rank product beside the projections of each attention."""
    for layer in model.layers:
        attention, sizes = layer.attention, layer.attention.config
        widths = {"qkv": sizes.hidden, "out": sizes.num_heads * sizes.head_dim}
        for name, width in widths.items():
            base = getattr(attention, name)
            rows = jax.eval_shape(base, jnp.zeros((1, width), model.dtype)).shape[-1]
            beside = nnx.LoRA(width, rank, rows, base_module=base, dtype=model.dtype, rngs=rngs)
            setattr(attention, name, beside)


def loss(model, ids):
    """Return the mean cross-entropy of each token after those before it."""
    logits = model(ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def train(model, ids, steps, learning_rate=3e-3):
    """Run Adam over the LoRA parameters; return the loss before each step."""
    optimizer = nnx.Optimizer(model, optax.adam(learning_rate), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, ids):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        value, gradients = nnx.value_and_grad(loss, argnums=wrt)(model, ids)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer, ids)) for _ in range(steps)]


def main(steps=20):
    """Teach the example model a text that it has not seen."""
    model = nvfp4.load_model(CHECKPOINT)
    add_lora(model, rank=8, rngs=nnx.Rngs(0))
    ids = jnp.asarray([load_tokenizer(CHECKPOINT).encode(TEXT)], jnp.int32)
    losses = train(model, ids, steps)
    print(f"{ids.size} tokens, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
