"""Generate as a user does: from a model of their own, from texts, and inside of `jax.jit`."""

import dataclasses
import importlib.resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_nvfp4_moe as nvfp4

NEW = 70  # more tokens than the room is rounded up to


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocab_size: int = 64
    max_positions: int = 256
    hidden: int = 64
    heads: int = 4


class Layer(nnx.Module):
    """Causal attention with a cache of keys and values, and experts in NVFP4."""

    def __init__(self, sizes, rngs):
        h = sizes.hidden
        self.heads = sizes.heads
        self.before, self.after = nnx.RMSNorm(h, rngs=rngs), nnx.RMSNorm(h, rngs=rngs)
        self.qkv = nnx.Linear(h, 3 * h, rngs=rngs)
        self.out = nnx.Linear(h, h, rngs=rngs)
        self.moe = nvfp4.NVFP4MoE(8, h, 32, top_k=2, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x, positions, keys_and_values):
        b, t, h = x.shape
        q, k, v = jnp.split(self.qkv(self.before(x)).reshape(b, t, self.heads, -1), 3, axis=-1)
        rows = jnp.arange(b)[:, None]
        keys, values = keys_and_values
        keys = keys.at[rows, positions].set(k, mode="drop")
        values = values.at[rows, positions].set(v, mode="drop")
        scores = jnp.einsum("btnd,bsnd->bnts", q, keys) / q.shape[-1] ** 0.5
        seen = jnp.arange(keys.shape[1])[None, None, :] <= positions[:, :, None]
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        y = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1), values)
        x = x + self.out(y.reshape(b, t, h))
        return x + self.moe(self.after(x).reshape(-1, h)).reshape(x.shape), (keys, values)


class Transformer(nnx.Module):
    """A model that takes prompts of one length."""

    def __init__(self, sizes, rngs):
        self.config = sizes
        self.embedding = nnx.Embed(sizes.vocab_size, sizes.hidden, rngs=rngs)
        self.position = nnx.Embed(sizes.max_positions, sizes.hidden, rngs=rngs)
        self.layers = nnx.List([Layer(sizes, rngs) for _ in range(2)])
        self.head = nnx.Linear(sizes.hidden, sizes.vocab_size, rngs=rngs)

    def init_cache(self, batch, max_length):
        d = self.config.hidden // self.config.heads
        empty = jnp.zeros((batch, max_length, self.config.heads, d))
        layers = [(empty, empty) for _ in self.layers]
        return {"read": jnp.zeros(batch, jnp.int32), "layers": layers}

    def __call__(self, input_ids, cache):
        return self.run(input_ids, cache, jnp.full(len(input_ids), input_ids.shape[1], jnp.int32))

    def run(self, input_ids, cache, lengths):
        steps = jnp.arange(input_ids.shape[1], dtype=jnp.int32)[None]
        positions = cache["read"][:, None] + steps
        # The cache has no such position, so what stands there is dropped.
        positions = jnp.where(steps < lengths[:, None], positions, 2**30)
        x = self.embedding(input_ids) + self.position(jnp.minimum(positions, 255))
        layers = []
        for layer, entries in zip(self.layers, cache["layers"], strict=True):
            x, entries = layer(x, positions, entries)
            layers.append(entries)
        return self.head(x), {"read": cache["read"] + lengths, "layers": layers}


class PaddedTransformer(Transformer):
    """A model that also takes prompts of different lengths."""

    def __call__(self, input_ids, cache, *, lengths=None):
        if lengths is None:
            return super().__call__(input_ids, cache)
        return self.run(input_ids, cache, lengths)


@pytest.fixture(scope="module", autouse=True)
def settings():
    """Use JAX's default promotion, as users do, and full float32 on GPUs: tokens are compared."""
    promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with promotion[0], promotion[1], jax.default_matmul_precision("float32"):
        yield


@pytest.fixture(scope="module")
def model():
    return Transformer(Sizes(), nnx.Rngs(0))


@pytest.fixture(scope="module")
def prompts():
    return jax.random.randint(jax.random.key(1), (2, 9), 0, 64)


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Return greedy tokens, from a loop that the user writes."""
    read = jax.jit(lambda model, ids, cache: model(ids, cache))
    logits, cache = read(model, prompts, model.init_cache(2, 9 + NEW))
    tokens = [jnp.argmax(logits[:, -1], axis=-1)]
    for _ in range(NEW - 1):
        logits, cache = read(model, tokens[-1][:, None], cache)
        tokens.append(jnp.argmax(logits[:, -1], axis=-1))
    return np.stack(tokens, axis=1)


def test_own_model(model, prompts, expected):
    assert isinstance(model, nvfp4.GenerativeModel)
    tokens, stats = nvfp4.generate(model, prompts, max_new_tokens=NEW, stats=True)
    np.testing.assert_array_equal(tokens, expected)
    assert len(np.unique(expected)) > 4
    assert stats.lengths.tolist() == [NEW, NEW]
    inside = jax.jit(lambda model, ids: nvfp4.generate(model, ids, max_new_tokens=NEW))
    np.testing.assert_array_equal(inside(model, prompts), expected)
    pieces = nvfp4.generate(model, prompts, max_new_tokens=NEW, prefill_chunk=4)
    np.testing.assert_array_equal(pieces, expected)
    padded = np.pad(prompts, ((0, 0), (0, 3)))
    same = nvfp4.generate(model, padded, lengths=[9, 9], max_new_tokens=5)
    np.testing.assert_array_equal(same, expected[:, :5])


def test_own_stop_ids(model, prompts, expected):
    stopping = nnx.clone(model)
    stopping.stop_ids = (int(expected[0, 6]),)
    ends = [
        next((i + 1 for i, t in enumerate(row) if t in stopping.stop_ids), NEW) for row in expected
    ]
    tokens, stats = nvfp4.generate(stopping, prompts, max_new_tokens=NEW, stats=True)
    assert stats.lengths.tolist() == ends
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(tokens[row, :end], expected[row, :end])
        assert (tokens[row, end:] == stopping.stop_ids[0]).all()
    streamed = np.stack(list(nvfp4.stream(stopping, prompts, max_new_tokens=NEW)), axis=1)
    np.testing.assert_array_equal(streamed, tokens[:, : max(ends)])
    never = nvfp4.generate(stopping, prompts, max_new_tokens=NEW, stop_ids=())
    np.testing.assert_array_equal(never, expected)


def test_prompts_of_different_lengths(model, prompts):
    lengths = jnp.asarray([9, 4])
    with pytest.raises(ValueError, match=r"Transformer takes no argument `lengths`.*\[9, 4\]"):
        nvfp4.generate(model, prompts, lengths=lengths, max_new_tokens=3)
    padded = PaddedTransformer(Sizes(), nnx.Rngs(0))
    together = nvfp4.generate(padded, prompts, lengths=lengths, max_new_tokens=12)
    alone = [
        nvfp4.generate(padded, prompts[row : row + 1, :length], max_new_tokens=12)[0]
        for row, length in enumerate((9, 4))
    ]
    np.testing.assert_array_equal(together, alone)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counting:
    """A model without Flax: each token is followed by the next one."""

    table: jax.Array
    config: Any = dataclasses.field(default=Sizes(), metadata={"static": True})

    def init_cache(self, batch, max_length):
        return jnp.zeros((batch, 0))

    def __call__(self, input_ids, cache):
        return self.table[input_ids], cache


def test_a_model_without_flax():
    model = Counting(jnp.roll(jnp.eye(64), 1, axis=1).astype(jnp.bfloat16))
    tokens = nvfp4.generate(model, [[3, 7]], max_new_tokens=4, stop_ids=(10,))
    assert tokens.tolist() == [[8, 9, 10, 10]]


class Other(Counting):
    """Not registered as a pytree."""


class Growing(Counting):
    def __call__(self, input_ids, cache):
        return self.table[input_ids], jnp.concatenate([cache, cache[:, :1]], axis=1)

    def init_cache(self, batch, max_length):
        return jnp.zeros((batch, 2))


class Narrow(Counting):
    def __call__(self, input_ids, cache):
        return self.table[input_ids][..., :32], cache


class Single(Counting):
    def __call__(self, input_ids, cache):
        return self.table[input_ids]


for kind in (Growing, Narrow, Single):
    jax.tree_util.register_dataclass(kind, data_fields=["table"], meta_fields=["config"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), r"no init_cache.*vocab_size.*config\.max_positions"),
        (Counting(jnp.eye(64), config=None), r"Counting has no config\.vocab_size, no config\.max"),
        (object(), r"object has no __call__"),
        (Other(jnp.eye(64)), r"Other holds itself as a leaf"),
        (Growing(jnp.eye(64)), r"Growing to return a cache .* float32\[1, 2\] at it, got .*1, 3\]"),
        (Narrow(jnp.eye(64)), r"expected logits \(1, 2, 64\) from Narrow .*, got \(1, 2, 32\)"),
        (Single(jnp.eye(64)), r"expected a pair of logits and cache from Single"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_model_lacks_is_said(model, message):
    with pytest.raises(TypeError, match=message):
        nvfp4.generate(model, jnp.asarray([[3, 7]]), max_new_tokens=4)


def test_a_batch_of_texts():
    """Texts become a padded batch, and the new tokens become texts; a row ends at its stop id."""
    path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
    model = nvfp4.load_model(path, scheme="w4a16", dtype=jnp.float32)
    tokenizer = nvfp4.load_tokenizer(path)
    assert model.stop_ids == tokenizer.stop_ids != ()
    ends = (
        "class A:\n    def f(self):\n        return 1\n\n\nif __name__ == '__main__':\n    main()\n"
    )
    texts = ["def softmax(x", ends, "import jax"]
    ids, lengths = tokenizer.encode(texts)
    assert tokenizer.decode(ids, lengths) == texts
    how = {"lengths": lengths, "max_new_tokens": 12}
    tokens, stats = nvfp4.generate(model, ids, **how, stats=True)
    new = tokenizer.decode(tokens, stats.lengths)
    assert stats.lengths.tolist() == [12, 1, 12]  # the second program is complete
    assert new[1] == ""
    assert tokens[1].tolist() == [model.stop_ids[0]] * 12
    assert new == tokenizer.decode(tokens)  # repeated stop ids are special tokens
    assert new[0].startswith(", axis=")
    endless = nvfp4.generate(model, ids, **how, stop_ids=())
    np.testing.assert_array_equal(endless[::2], tokens[::2])
    assert (np.asarray(endless[1]) != np.asarray(tokens[1])).any()

    @jax.jit
    def score(model, ids, lengths):
        """Use the tokens in the same program."""
        tokens, stats = nvfp4.generate(model, ids, lengths=lengths, max_new_tokens=12, stats=True)
        return tokens, stats.lengths / tokens.shape[1]

    inside, share = score(model, ids, lengths)
    np.testing.assert_array_equal(inside, tokens)
    np.testing.assert_allclose(share, [1, 1 / 12, 1])
