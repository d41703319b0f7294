"""Train LoRA on an NVFP4 checkpoint, whose weights stay packed and frozen.

Run it: ``python -m jax_nvfp4_moe.examples.lora [FOLDER]``. FOLDER gets the adapters.
"""

import pathlib
import sys

import jax.numpy as jnp
import optax
from flax import nnx

import jax_nvfp4_moe as nvfp4

CHECKPOINT = pathlib.Path(__file__).parent / "tiny-python-moe"
TEXT = '''
def haiku(season):
    """Say what the season brings."""
    if season == "autumn":
        return ["the old maple lets", "one red leaf fall on the pond", "the frog does not mind"]
    return ["snow on the mailbox", "nobody has written me", "the cat keeps the stove"]
'''


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


def main(steps=20, folder=None):
    """Teach the example model a text that it has never seen, and return the losses.

    Args:
      steps: number of steps. Defaults to 20.
      folder: where to write the adapters, in the files of PEFT. None (default) writes none.
    """
    model = nvfp4.load_model(CHECKPOINT)
    nvfp4.add_lora(model, rank=8, rngs=nnx.Rngs(0))
    ids = jnp.asarray([nvfp4.load_tokenizer(CHECKPOINT).encode(TEXT)], jnp.int32)
    losses = train(model, ids, steps)
    print(f"{ids.size} tokens, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if folder is not None:
        nvfp4.save_lora(model, folder)
    return losses


if __name__ == "__main__":
    main(folder=sys.argv[1] if sys.argv[1:] else None)
