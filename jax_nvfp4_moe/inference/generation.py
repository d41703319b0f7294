"""Sample from a model: a compiled prefill, and one compiled decoding loop.

Shapes are rounded up, so that prompts of similar length and any number of new tokens below the same
bound share both. The loop stops on the device: `generate` asks it to run to the end, `stream` to
run one token at a time.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.inference.prefill import CHUNK, empty_cache, padded_length, prefill_chunks

PROMPT_STEP = 32  # prompts are padded to a multiple of it
NEW_STEP = 64  # room for new tokens is made in multiples of it
# One CUDA graph of the whole loop. XLA makes one of each trip by itself, but then the host reads
# after each token whether there is another trip, and the GPU waits for it. The kinds are XLA's own
# and WHILE; a graph of one thing, the loop, is below the size from which XLA makes any. Other
# devices pass this by.
_ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      temperature, top_p: float32 scalars.
      stop_ids: int32 ``[s]``; a row that draws one repeats it from then on.
      key: of `jax.random.key`.
      greedy: static; take the largest logit, and read none of the others.
      top_k: static; draw from the k largest logits, None for all.
      nucleus: static; whether top_p is below 1.
    """

    temperature: jax.Array
    top_p: jax.Array
    stop_ids: jax.Array
    key: jax.Array
    greedy: bool = dataclasses.field(metadata={"static": True})
    top_k: int | None = dataclasses.field(metadata={"static": True})
    nucleus: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What decoding carries from token to token.

    Attributes:
      cache: of the model; holds all but the last token.
      tokens: int32 ``[b, room]``, the new tokens; those from `count` on are zeros.
      count: int32 scalar, new tokens so far.
      stopped: bool ``[b]``, rows that have drawn a stop id.
    """

    cache: Any
    tokens: jax.Array
    count: jax.Array
    stopped: jax.Array


def generate(
    model: Callable,
    input_ids: Int32[Array, "b t"],
    *,
    max_new_tokens: int,
    lengths: Int32[Array, " b"] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_ids: Sequence[int] = (),
    key: jax.Array | None = None,
    prefill_chunk: int = CHUNK,
) -> Int32[Array, "b new"]:
    """Continue each prompt by up to `max_new_tokens` tokens.

    The next token is the largest logit at temperature 0, else drawn from
    ``softmax(logits / temperature)`` cut first to the `top_k` largest and then to the smallest set
    whose probability reaches `top_p`. Each row comes out as if it were alone.

    Args:
      model: as `load_model` returns.
      input_ids: prompts ``[b, t]``, left-aligned; what stands behind a shorter one is not read.
      max_new_tokens: at least 1.
      lengths: true length of each prompt ``[b]``, 1 to t; t where None.
      temperature: 0 or more.
      top_k: at least 1, or None for all.
      top_p: in (0, 1].
      stop_ids: tokens that end a row; all rows ended ends the run.
      key: of `jax.random.key`; needed where the temperature is over 0.
      prefill_chunk: tokens of each prompt that go through the model together. Longer prompts go
        through it chunk by chunk, which bounds the memory.

    Returns:
      int32 ``[b, max_new_tokens]``, the new tokens alone, the stop id repeated after a stop.

    Raises:
      ValueError: an argument is out of range, or prompt and new tokens exceed the model's
        positions.

    Example:
      >>> import importlib.resources
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model, tokenizer = nvfp4.load_model(path), nvfp4.load_tokenizer(path)
      >>> prompt = jnp.asarray([tokenizer.encode("def softmax(x")])
      >>> tokens = nvfp4.generate(model, prompt, max_new_tokens=3)
      >>> tokenizer.decode(tokens[0])
      ', axis='
    """
    sampling = make_sampling(temperature, top_k, top_p, stop_ids, key)
    state = _start(model, input_ids, lengths, max_new_tokens, sampling, prefill_chunk)
    state = decode(model, sampling, state, jnp.int32(max_new_tokens))
    return _fill(state)[:, :max_new_tokens]


def stream(
    model: Callable,
    input_ids: Int32[Array, "b t"],
    *,
    max_new_tokens: int,
    lengths: Int32[Array, " b"] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_ids: Sequence[int] = (),
    key: jax.Array | None = None,
    prefill_chunk: int = CHUNK,
) -> Iterator[np.ndarray]:
    """Yield the tokens of `generate` as they come, int32 ``[b]`` each, until all rows stopped.

    Args and errors are those of `generate`; nothing is computed before the first is asked for.

    Example:
      >>> import importlib.resources
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model, tokenizer = nvfp4.load_model(path), nvfp4.load_tokenizer(path)
      >>> prompt = jnp.asarray([tokenizer.encode("def softmax(x")])
      >>> for tokens in nvfp4.stream(model, prompt, max_new_tokens=3):
      ...     print(repr(tokenizer.decode(tokens)))
      ','
      ' axis'
      '='
    """
    sampling = make_sampling(temperature, top_k, top_p, stop_ids, key)
    state = _start(model, input_ids, lengths, max_new_tokens, sampling, prefill_chunk)
    for count in range(1, max_new_tokens + 1):
        state = decode(model, sampling, state, jnp.int32(count))
        yield np.asarray(state.tokens[:, count - 1])
        if bool(state.stopped.all()):
            return


def _start(model, input_ids, lengths, max_new_tokens, sampling, chunk):
    """Check the arguments, pad the prompts and run them through the model."""
    ids, true_lengths = _check_prompts(model, input_ids, lengths, max_new_tokens)
    if chunk < 1:
        raise ValueError(f"prefill_chunk: expected at least 1, got {chunk}")
    b, t = ids.shape
    if t > chunk:
        room = round_up(max_new_tokens, NEW_STEP)
        cache = empty_cache(model, b, padded_length(t, chunk) + room)
        logits, cache = prefill_chunks(model, cache, ids, true_lengths, chunk)
        return _begin(sampling, logits, cache, room)
    padded = np.zeros((b, round_up(t, PROMPT_STEP)), np.int32)
    padded[:, :t] = ids
    room = round_up(max_new_tokens, NEW_STEP)
    return _prefill(model, sampling, padded, true_lengths, room)


@functools.partial(jax.jit, static_argnames="room")
def _prefill(model, sampling, padded, lengths, room):
    """Fill the cache and draw the first token."""
    b, t = padded.shape
    cache = model.init_cache(b, t + room)
    logits, cache = model(padded, cache, lengths=lengths, logits_at=lengths - 1)
    tokens = jnp.zeros((b, room), jnp.int32)
    state = State(cache, tokens, jnp.int32(0), jnp.zeros(b, jnp.bool_))
    return draw(sampling, logits[:, 0], state)


@functools.partial(jax.jit, static_argnames="room", donate_argnames="cache")
def _begin(sampling, logits, cache, room):
    """Draw the first token after a prefill by chunks."""
    b = logits.shape[0]
    cache = lax.optimization_barrier(cache)
    tokens, stopped = jnp.zeros((b, room), jnp.int32), jnp.zeros(b, jnp.bool_)
    return draw(sampling, logits, State(cache, tokens, jnp.int32(0), stopped))


@functools.partial(jax.jit, donate_argnames="state", compiler_options=_ONE_GRAPH)
def decode(model, sampling, state, limit):
    """Draw tokens until there are `limit` of each row or all rows have stopped."""

    def more(state):
        return (state.count < limit) & ~state.stopped.all()

    def step(state):
        last = lax.dynamic_slice_in_dim(state.tokens, state.count - 1, 1, axis=1)
        logits, cache = model(last, state.cache)
        return draw(sampling, logits[:, 0], dataclasses.replace(state, cache=cache))

    return lax.while_loop(more, step, state)


def draw(sampling, logits, state):
    """Add the next token of each row to `state`; a stopped row repeats its last."""
    token = _choose(sampling, logits, jax.random.fold_in(sampling.key, state.count))
    last = lax.dynamic_slice_in_dim(state.tokens, jnp.maximum(state.count - 1, 0), 1, axis=1)[:, 0]
    token = jnp.where(state.stopped, last, token)
    stops = (token[:, None] == sampling.stop_ids[None, :]).any(axis=-1)
    tokens = lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.count, axis=1)
    return State(state.cache, tokens, state.count + 1, state.stopped | stops)


def _choose(sampling: Sampling, logits: Float[Array, "b v"], key) -> Int32[Array, " b"]:
    """Draw one token of each row."""
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        smallest = lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if sampling.nucleus:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        chances = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances
        smallest = jnp.min(
            jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True
        )
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


@jax.jit
def _fill(state):
    """Repeat the last token, a stop id, to the end; all rows have stopped if any is missing."""
    last = lax.dynamic_slice_in_dim(state.tokens, state.count - 1, 1, axis=1)
    drawn = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :] < state.count
    return jnp.where(drawn, state.tokens, last)


def round_up(n: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `n`."""
    return -(-n // step) * step


def make_sampling(
    temperature: float,
    top_k: int | None,
    top_p: float,
    stop_ids: Sequence[int],
    key: jax.Array | None,
) -> Sampling:
    """Check how tokens shall be drawn; arguments and errors are those of `generate`."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1 or None, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], got {top_p}")
    if temperature > 0 and key is None:
        raise ValueError(f"key: expected a jax.random.key with temperature {temperature}, got None")
    return Sampling(
        jnp.float32(temperature),
        jnp.float32(top_p),
        jnp.asarray(list(stop_ids), jnp.int32),
        jax.random.key(0) if key is None else key,
        greedy=temperature == 0,
        top_k=top_k,
        nucleus=top_p < 1,
    )


def _check_prompts(model, input_ids, lengths, max_new_tokens):
    """Return the prompts and their lengths as numpy arrays."""
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"input_ids: expected integers [b, t], got {ids.dtype} {ids.shape}")
    b, t = ids.shape
    if not b or not t:
        raise ValueError(f"input_ids: expected at least one token, got shape {ids.shape}")
    true = np.full(b, t, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    if true.shape != (b,) or true.min() < 1 or true.max() > t:
        raise ValueError(f"lengths: expected {b} numbers from 1 to {t}, got {true.tolist()}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    positions, vocabulary = model.config.max_positions, model.config.vocab_size
    if true.max() + max_new_tokens > positions:
        raise ValueError(
            f"max_new_tokens: {true.max()} prompt and {max_new_tokens} new tokens exceed the "
            f"model's {positions} positions (max_position_embeddings)"
        )
    read = np.where(np.arange(t)[None, :] < true[:, None], ids, 0)
    if read.min() < 0 or read.max() >= vocabulary:
        raise ValueError(
            f"input_ids: expected ids from 0 to {vocabulary - 1}, got {read.min()} to {read.max()}"
        )
    return read, true
