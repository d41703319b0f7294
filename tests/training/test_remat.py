"""Test `remat`: the backward pass of a model that computes its layers again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS
from support.models.adapters import adapted, fill, load

from jax_nvfp4_moe.models import scores
from jax_nvfp4_moe.models.loading import abstract_model

QWEN = "qwen3_moe-window-modelopt-w4a16"
# Layers that hand on more than one stream, and layers that share keys.
OTHERS = ("deepseek_v4-modelopt-w4a16", "gemma4_edge-modelopt-w4a16")


def loss(adapters, graph, rest, ids, remat):
    model = nnx.merge(graph, adapters, rest)
    return -model.score(ids[:, :-1], ids[:, 1:], remat=remat).log_probability.mean()


@pytest.mark.parametrize(
    "name", [QWEN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_gradients_do_not_change(name):
    """The layers are computed twice by the same operations, which XLA may fuse in another way."""
    model = load(CHECKPOINTS / name)
    fill(adapted(model, 2))
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    ids = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)

    def differentiate(remat):
        run = jax.jit(jax.grad(lambda adapters, rest: loss(adapters, graph, rest, ids, remat)))
        return run(adapters, rest)

    plain, again = map(differentiate, (False, True))
    # As many roundings of 2^-24 as the longest sums of the layers have terms, in each of them.
    bound = model.config.num_layers * model.config.hidden * 2**-24
    for want, got in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert np.abs(got - want).max() <= bound * np.abs(want).max()
        assert np.abs(want).max() > 0


def kept_bytes(model, tokens, remat):
    """Return the bytes that a forward pass keeps for the backward pass."""
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    ids = jnp.zeros((1, tokens + 1), jnp.int32)

    def forward(adapters, rest):
        return jax.vjp(lambda adapters: loss(adapters, graph, rest, ids, remat), adapters)[1]

    leaves = jax.tree.leaves(jax.eval_shape(forward, adapters, rest))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("remat", [True, False])
def test_a_token_keeps_what_enters_each_layer(remat, monkeypatch):
    """Beside it there are the two streams that leave the last layer, and scores of pieces."""
    monkeypatch.setattr(scores, "_TOGETHER", 16)
    model = adapted(abstract_model(CHECKPOINTS / QWEN).model, 2)
    few, many = (kept_bytes(model, tokens, remat) for tokens in (64, 128))
    each = (many - few) / 64
    stream = 2 * model.config.hidden * 2  # both parts of a `Residual`, in bfloat16
    most = (model.config.num_layers + 3) * stream + 200
    assert (each <= most) == remat, each
