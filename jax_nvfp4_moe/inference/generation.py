"""Generate text with a compiled prefill and a compiled decoding loop.

The lengths of prompts and of generated text are rounded up. Calls with similar lengths therefore
share compiled programs. The decoding loop runs on the device. `generate` starts it once for all
tokens, and `stream` about fifty times a second, or once per token if a token takes longer.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.inference.flat_model import flatten_model, restore_model
from jax_nvfp4_moe.inference.not_finite import warn_rows
from jax_nvfp4_moe.inference.prefill import (
    NO_GRAPHS,
    count_tokens,
    default_chunk,
    empty_cache,
    padded_length,
    prefill_chunks,
)
from jax_nvfp4_moe.ops.chain import chain_calls
from jax_nvfp4_moe.scheme import Target

# `stream` starts the loop for as many tokens as take this long. To start a program of a large model
# takes 3 to 5 ms, and a step of Qwen3-30B-A3B 2 ms on an H200.
_BURST_SECONDS = 0.02
PROMPT_STEP = 32  # prompts are padded to a multiple of this number of tokens
NEW_STEP = 64  # the room for new tokens is rounded up to a multiple of this number
# Compile the whole loop into one CUDA graph. By default XLA makes a graph of the loop's body: after
# each token, the host then reads whether the loop continues, and the GPU waits for the host.
# The first option lists XLA's default kinds of commands and WHILE. The second one is necessary
# because the graph has a single command, the loop, which is below XLA's default minimum. Devices
# other than GPUs ignore both options.
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
      temperature: float32 scalar.
      top_p: float32 scalar.
      stop_ids: int32 ``[s]``. A row that draws one of them repeats it from then on.
      key: random key, as `jax.random.key` returns it; None if `greedy`.
      greedy: whether to take the token with the largest logit; the other options then have no
        effect, except `stop_ids`. Static.
      top_k: number of largest logits to draw from; None for all. Static.
      nucleus: whether `top_p` is below 1. Static.
    """

    temperature: Any
    top_p: Any
    stop_ids: Any
    key: jax.Array | None
    greedy: bool = dataclasses.field(metadata={"static": True})
    top_k: int | None = dataclasses.field(metadata={"static": True})
    nucleus: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of the decoding loop.

    Attributes:
      cache: cache of the model. It holds the prompt and all new tokens except the last one.
      tokens: the new tokens, int32 ``[b, room]``; zeros from index `count` on.
      count: number of new tokens so far, int32 scalar.
      stopped: bool ``[b]``, True for rows that have drawn a stop id.
      not_finite: int32 ``[b]``, the index of the first new token that was drawn from logits that
        were not finite; -1 if there is none.
    """

    cache: Any
    tokens: jax.Array
    count: jax.Array
    stopped: jax.Array
    not_finite: jax.Array

    @classmethod
    def begin(cls, cache: Any, rows: int, room: int) -> "State":
        """Return the state before the first new token.

        Args:
          cache: cache of the model, which holds the prompt.
          rows: number of rows b.
          room: largest number of new tokens.
        """
        tokens = jnp.zeros((rows, room), jnp.int32)
        stopped, never = jnp.zeros(rows, jnp.bool_), jnp.full(rows, -1, jnp.int32)
        return cls(cache, tokens, jnp.int32(0), stopped, never)


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
    prefill_chunk: int | None = None,
) -> Int32[Array, "b new"]:
    """Generate up to `max_new_tokens` tokens after each prompt.

    At temperature 0, the next token is the one with the largest logit. Otherwise it is drawn at
    random::

      next ~ softmax(logits / temperature)

    `top_k` first keeps the tokens with the k largest logits. `top_p` then keeps the smallest set of
    the most probable tokens whose probabilities add up to `top_p` or more. Tokens that tie with the
    last one kept are kept too. No prompt influences the other rows of its batch.

    Args:
      model: model, as `load_model` returns it.
      input_ids: prompts, integers ``[b, t]`` from 0 to ``model.config.vocab_size - 1``,
        left-aligned. Numbers after the end of a shorter prompt are ignored. b may be 0; each prompt
        has at least one token, because there is nothing to continue otherwise.
      max_new_tokens: largest number of new tokens in each row, at least 1.
      lengths: number of tokens in each prompt, integers ``[b]`` from 1 to t. None (default) means t
        for every prompt.
      temperature: finite number, 0 or more. Defaults to 0, greedy decoding.
      top_k: number of tokens to draw from, at least 1. None (default) keeps all tokens.
      top_p: probability of the tokens to draw from, in (0, 1]. Defaults to 1, which keeps all
        tokens.
      stop_ids: tokens that end a row. Generation ends early once all rows have ended. Defaults to
        none.
      key: random key, as `jax.random.key` returns it. Required if the temperature is above 0. None
        by default.
      prefill_chunk: number of tokens of each prompt that go through the model together. Longer
        prompts are run chunk by chunk, which limits the memory. None (default) means 8192 tokens.
        With more than 8 prompts it means fewer, so that a chunk has at most 65536 tokens in all.

    Returns:
      The new tokens without the prompts, int32 ``[b, max_new_tokens]``. A row that has ended
      repeats its stop id.

      If the logits of a row are not finite, its tokens mean nothing. A warning of the logger
      "jax_nvfp4_moe" then names the row and its first such token.

    Raises:
      ValueError: an argument is out of range, or a prompt and its new tokens need more positions
        than ``model.config.max_positions``.

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
    if _has_no_rows(model, input_ids, lengths, max_new_tokens):
        return jnp.zeros((0, max_new_tokens), jnp.int32)
    flat, state = start_decoding(model, input_ids, lengths, max_new_tokens, sampling, prefill_chunk)
    if max_new_tokens > 1:  # the prefill has drawn the first token
        state = decode(flat, sampling, state, np.int32(max_new_tokens))
    filled = _fill(state, max_new_tokens)
    warn_rows(np.asarray(state.not_finite))
    return filled


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
    prefill_chunk: int | None = None,
) -> Iterator[np.ndarray]:
    """Generate tokens as `generate` does, and yield them while they are drawn.

    The arguments are checked and the prompts are run when you request the first token. Tokens that
    are drawn within about 20 ms come together. A warning about logits that are not finite comes
    before the first such token.

    Args:
      model: as for `generate`.
      input_ids: as for `generate`.
      max_new_tokens: as for `generate`.
      lengths: as for `generate`. Defaults to None.
      temperature: as for `generate`. Defaults to 0.
      top_k: as for `generate`. Defaults to None.
      top_p: as for `generate`. Defaults to 1.
      stop_ids: as for `generate`. Defaults to none.
      key: as for `generate`. Defaults to None.
      prefill_chunk: as for `generate`. Defaults to None.

    Yields:
      The next token of each row, a NumPy array int32 ``[b]``. A row that has ended repeats its stop
      id. The iterator ends once all rows have ended, or after `max_new_tokens` tokens. Without
      rows it yields nothing.

    Raises:
      ValueError: as for `generate`.

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
    if _has_no_rows(model, input_ids, lengths, max_new_tokens):
        return
    flat, state = start_decoding(model, input_ids, lengths, max_new_tokens, sampling, prefill_chunk)
    for _, tokens in decode_in_bursts(flat, sampling, state, max_new_tokens):
        yield from tokens.T


def start_decoding(model, input_ids, lengths, max_new_tokens, sampling, chunk):
    """Check the arguments, run the prompts through the model, and draw the first token.

    Args:
      model: as for `generate`.
      input_ids: as for `generate`.
      lengths: as for `generate`.
      max_new_tokens: as for `generate`.
      sampling: the `Sampling`.
      chunk: the argument `prefill_chunk` of `generate`.

    Returns:
      The model as a `FlatModel`, and the `State`, for `decode` or `decode_in_bursts`.
    """
    ids, true_lengths = _check_prompts(model, input_ids, lengths, max_new_tokens)
    b, t = ids.shape
    chunk = default_chunk(b) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"prefill_chunk: expected at least 1, got {chunk}")
    flat, room = flatten_model(model), round_up(max_new_tokens, NEW_STEP)
    if t > chunk:
        cache = empty_cache(flat, b, padded_length(t, chunk) + room)
        logits, cache = prefill_chunks(flat, cache, ids, true_lengths, chunk)
        return flat, _begin(sampling, logits, cache, room)
    padded = np.zeros((b, round_up(t, PROMPT_STEP)), np.int32)
    padded[:, :t] = ids
    size = count_tokens(true_lengths, padded.shape[1])
    return flat, _prefill(flat, sampling, padded, true_lengths, room, num_tokens=size)


@functools.partial(jax.jit, static_argnames=("room", "num_tokens"), compiler_options=NO_GRAPHS)
def _prefill(model, sampling, padded, lengths, room, num_tokens):
    """Run padded prompts through the model and draw the first token."""
    model = restore_model(model)
    b, t = padded.shape
    cache = model.init_cache(b, t + room)
    how = {"lengths": lengths, "logits_at": lengths - 1, "num_tokens": num_tokens}
    logits, cache = model(padded, cache, **how)
    return draw(sampling, logits[:, 0], State.begin(cache, b, room))


@functools.partial(jax.jit, static_argnames="room", donate_argnames="cache")
def _begin(sampling, logits, cache, room):
    """Draw the first token after a chunked prefill."""
    cache = lax.optimization_barrier(cache)
    return draw(sampling, logits, State.begin(cache, logits.shape[0], room))


@functools.partial(jax.jit, donate_argnames="state", compiler_options=_ONE_GRAPH)
def decode(model, sampling, state, limit):
    """Draw tokens until each row has `limit` new tokens, or until all rows have stopped."""
    model = restore_model(model)

    def more(state):
        return (state.count < limit) & ~state.stopped.all()

    def step(state):
        last = lax.dynamic_slice_in_dim(state.tokens, state.count - 1, 1, axis=1)
        logits, cache = read(model, last, state.cache)
        return draw(sampling, logits[:, 0], dataclasses.replace(state, cache=cache))

    read = chain_calls(_read) if _runs_alone_on_a_gpu(model) else _read
    return lax.while_loop(more, step, state)


def decode_in_bursts(model, sampling, state, limit: int) -> Iterator[tuple[State, np.ndarray]]:
    """Draw tokens as `decode` does, a few at a time.

    Args:
      model: a `FlatModel`.
      sampling: the `Sampling`.
      state: the `State` after the prompt. Its arrays are donated: do not use them again.
      limit: largest number of new tokens of each row, at least 1.

    Yields:
      The `State`, whose arrays are donated when the next one is requested, and the tokens that are
      new in it, int32 ``[b, n]`` with n at least 1.
    """
    done, burst, begin = 0, 1, time.perf_counter()
    while True:
        tokens, count, stopped, first = jax.device_get(
            (state.tokens, state.count, state.stopped, state.not_finite)
        )
        seconds = (time.perf_counter() - begin) / (count - done)
        warn_rows(np.where(first >= done, first, -1))  # earlier bursts warned of the others
        yield state, tokens[:, done:count]
        done = int(count)
        if done >= limit or stopped.all():
            return
        burst = max(1, min(2 * burst, int(_BURST_SECONDS / seconds)))
        begin = time.perf_counter()
        state = decode(model, sampling, state, np.int32(min(done + burst, limit)))


def _read(model, ids, cache):
    """Return the logits after new tokens, and the cache with them."""
    return model(ids, cache)


def _runs_alone_on_a_gpu(model) -> bool:
    """Return whether the kernels of `model` run on one GPU. Only there do chains save time."""
    target = getattr(getattr(model, "norm", None), "target", None) or Target.current()
    meshes = (getattr(model, name, None) for name in ("expert_mesh", "rows_mesh"))
    return target.platform == "cuda" and all(mesh is None for mesh in meshes)


def draw(sampling, logits, state):
    """Add the next token of each row to `state`; a stopped row repeats its last token."""
    token = _choose(sampling, logits, state.count)
    # The drawn token tells whether all logits were usable, without another pass over them: a
    # maximum takes a NaN first, then infinity, and -infinity only if there is nothing else.
    # Sampling takes a maximum too, and neither `top_k` nor `top_p` removes a NaN or infinity.
    drawn = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    new = ~jnp.isfinite(drawn) & ~state.stopped & (state.not_finite < 0)
    first = jnp.where(new, state.count, state.not_finite)
    last = lax.dynamic_slice_in_dim(state.tokens, jnp.maximum(state.count - 1, 0), 1, axis=1)[:, 0]
    token = jnp.where(state.stopped, last, token)
    stops = (token[:, None] == sampling.stop_ids[None, :]).any(axis=-1)
    tokens = lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.count, axis=1)
    return State(state.cache, tokens, state.count + 1, state.stopped | stops, first)


def _choose(sampling: Sampling, logits: Float[Array, "b v"], count) -> Int32[Array, " b"]:
    """Draw one token for each row; `count` is the number of new tokens so far."""
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
    assert sampling.key is not None, "make_sampling expects a key unless greedy"
    key = jax.random.fold_in(sampling.key, count)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="length")
def _fill(state, length):
    """Return the first `length` tokens, with the last one of each row repeated to the end.

    Tokens are missing only if all rows have stopped. The last token of each row is then a stop id.
    """
    last = lax.dynamic_slice_in_dim(state.tokens, state.count - 1, 1, axis=1)
    drawn = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :] < state.count
    return jnp.where(drawn, state.tokens, last)[:, :length]


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
    """Check the arguments of `generate` that say how tokens are drawn, and return them."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a finite number, 0 or more; got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, or None to keep all tokens; got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], got {top_p}")
    if temperature > 0 and key is None:
        raise ValueError(
            f"key: expected a jax.random.key, because temperature {temperature} draws tokens at "
            "random; got None. Pass a key, or use temperature 0"
        )
    return Sampling(
        np.float32(temperature),
        np.float32(top_p),
        np.asarray(list(stop_ids), np.int32),
        key if temperature > 0 else None,
        greedy=temperature == 0,
        top_k=top_k,
        nucleus=top_p < 1,
    )


def _has_no_rows(model, input_ids, lengths, max_new_tokens) -> bool:
    """Return whether the batch has no prompts, and check the arguments if so."""
    if np.shape(input_ids)[:1] != (0,):
        return False
    _check_prompts(model, input_ids, lengths, max_new_tokens)
    return True


def _check_prompts(model, input_ids, lengths, max_new_tokens):
    """Return the prompts and their lengths as NumPy arrays, with zeros after each prompt."""
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"input_ids: expected integers [b, t], got {ids.dtype} {ids.shape}")
    b, t = ids.shape
    if b and not t:
        raise ValueError(
            "input_ids: expected at least one token in each row, because there is nothing to "
            f"continue otherwise; got shape {ids.shape}"
        )
    true = np.full(b, t, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    if true.shape != (b,) or ((true < 1) | (true > t)).any():
        raise ValueError(f"lengths: expected {b} integers from 1 to {t}, got {true.tolist()}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    positions, vocabulary = model.config.max_positions, model.config.vocab_size
    longest = true.max(initial=0)
    if longest + max_new_tokens > positions:
        raise ValueError(
            f"max_new_tokens: a prompt of {longest} tokens and {max_new_tokens} new tokens "
            f"exceed the model's {positions} positions by its config.json. Shorten the "
            "prompt, or ask for fewer new tokens"
        )
    read = np.where(np.arange(t)[None, :] < true[:, None], ids, 0)
    if read.size and (read.min() < 0 or read.max() >= vocabulary):
        raise ValueError(
            f"input_ids: expected ids from 0 to {vocabulary - 1}, the model's vocabulary; got "
            f"{read.min()} to {read.max()}"
        )
    return read, true
