"""Train LoRA on the attention of an NVFP4 checkpoint. The experts stay packed and frozen.

Run it: ``python -m jax_nvfp4_moe.examples.lora``.
"""

import pathlib

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.nn.attention.grouped_query import Attention

CHECKPOINT = pathlib.Path(__file__).parent / "tiny-python-moe"
TEXT = '''
def haiku(season):
    """Say what the season brings."""
    if season == "autumn":
        return ["the old maple lets", "one red leaf fall on the pond", "the frog does not mind"]
    return ["snow on the mailbox", "nobody has written me", "the cat keeps the stove"]
'''


def add_lora(model, rank, rngs):
    """Add a low-rank product to the projections of each attention.

    Args:
      model: model from `load_model`, changed in place.
      rank: rank of the low-rank products.
      rngs: `nnx.Rngs` for their initial values.

    Raises:
      ValueError: a layer has a mixer that is not grouped-query attention, or the heads are sharded
        along the mesh axis "tensor". The model is then unchanged.
    """
    check_attention(model)
    for layer in model.layers:
        attention, sizes = layer.attention, layer.attention.config
        widths = {"qkv": sizes.hidden, "out": sizes.num_heads * sizes.head_dim}
        for name, width in widths.items():
            base = getattr(attention, name)
            rows = jax.eval_shape(base, jnp.zeros((1, width), model.dtype)).shape[-1]
            beside = nnx.LoRA(width, rank, rows, base_module=base, dtype=model.dtype, rngs=rngs)
            setattr(attention, name, beside)


def check_attention(model):
    """Check that `add_lora` can take the mixer of each layer of a model.

    Raises:
      ValueError: it cannot; the message names each mixer.
    """
    mixers = {
        f"layers.{index}": getattr(layer, "attention", getattr(layer, "mixer", None))
        for index, layer in enumerate(model.layers)
    }
    others = [f"{path} {type(one).__name__}" for path, one in mixers.items() if not _is_taken(one)]
    if others:
        raise ValueError(
            "model: add_lora takes layers with grouped-query attention whose heads are not sharded "
            f'along the mesh axis "tensor"; got {", ".join(others)}. Load the model without the '
            "axis, or wrap the linears of these layers in nnx.LoRA yourself"
        )


def _is_taken(mixer):
    """Return whether `add_lora` can take a mixer."""
    sharded = getattr(mixer, "expert_mesh", None)
    return isinstance(mixer, Attention) and (sharded is None or sharded.tensor == 1)


def loss(model, ids):
    """Return the mean cross-entropy of a text, given its token ids ``[b, t]``."""
    logits = model(ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def train(model, ids, steps, learning_rate=3e-3):
    """Run Adam on the LoRA parameters, and return the loss before each step.

    Args:
      model: model with LoRA parameters, changed in place.
      ids: int32 ``[b, t]``, the text to learn.
      steps: number of steps.
      learning_rate: learning rate of Adam. Defaults to 0.003.
    """
    optimizer = nnx.Optimizer(model, optax.adam(learning_rate), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer, ids):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        value, gradients = nnx.value_and_grad(loss, argnums=wrt)(model, ids)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer, ids)) for _ in range(steps)]


def main(steps=20):
    """Teach the example model a text that it has never seen, and return the losses."""
    model = nvfp4.load_model(CHECKPOINT)
    add_lora(model, rank=8, rngs=nnx.Rngs(0))
    ids = jnp.asarray([load_tokenizer(CHECKPOINT).encode(TEXT)], jnp.int32)
    losses = train(model, ids, steps)
    print(f"{ids.size} tokens, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
