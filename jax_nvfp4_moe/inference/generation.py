"""Generate text with a compiled prefill and a compiled decoding loop.

The lengths of prompts and of generated text are rounded up. Calls with similar lengths therefore
share compiled programs. The decoding loop runs on the device. `generate` starts it once for all
tokens, and `stream` about fifty times a second, or once per token if a token takes longer.
"""

import dataclasses
import functools
import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Int32

from jax_nvfp4_moe.inference.drafting import (
    Drafting,
    DraftState,
    begin,
    choose_drafting,
    decode_with_drafts,
    shared_tokens,
)
from jax_nvfp4_moe.inference.flat_model import flatten_model, restore_model
from jax_nvfp4_moe.inference.generative_model import (
    GenerativeModel,
    call_options,
    check_leaves,
    check_model,
    read_tokens,
)
from jax_nvfp4_moe.inference.not_finite import warn_rows
from jax_nvfp4_moe.inference.pair_prefill import start_with_pairs
from jax_nvfp4_moe.inference.prefill import (
    NO_GRAPHS,
    PROMPT_STEP,
    count_tokens,
    default_chunk,
    empty_cache,
    padded_length,
    prefill_chunks,
)
from jax_nvfp4_moe.inference.sampling import Sampling, make_sampling, whole_number
from jax_nvfp4_moe.inference.state import State, add_token, draw
from jax_nvfp4_moe.inference.step_costs import find_cost, may_pay
from jax_nvfp4_moe.ops.chain import chain_calls
from jax_nvfp4_moe.parallel.peers import explain_failed_sums
from jax_nvfp4_moe.parallel.whole_steps import (
    find_connected_mesh,
    on_each_device,
    only_largest,
    shards_logits,
    start_together,
)
from jax_nvfp4_moe.scheme import Target

# `stream` starts the loop for as many tokens as take this long. To start a program of a large model
# takes 3 to 5 ms, and a step of Qwen3-30B-A3B 2 ms on an H200.
_BURST_SECONDS = 0.02
NEW_STEP = 64  # the room for new tokens is rounded up to a multiple of this number
# Positions are int32. The room that lengths are rounded up to must fit, too.
_MOST_POSITIONS = 2**31 - 2048
_PROMPTS = "integers [b, t], with shorter prompts padded and their lengths given"
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
class GenerationStats:
    """What `generate` tells about each row beside its tokens.

    A pytree, so a jitted function may return it.

    Attributes:
      lengths: int32 ``[b]``, number of new tokens in each row, its stop id included. What follows
        them in the row repeats the stop id.
      steps: int32 ``[b]``, number of runs of the model from which these tokens were drawn; that of
        the prompt is one of them. Without drafts, every token takes one.
      drafted: int32 ``[b]``, number of tokens that were drafted; 0 without drafts.
      accepted: int32 ``[b]``, number of drafted tokens that were kept. The token that every run
        yields beside them is not counted.

    Example:
      >>> import importlib.resources
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model, tokenizer = nvfp4.load_model(path), nvfp4.load_tokenizer(path)
      >>> ids, lengths = tokenizer.encode(["import jax", "def softmax(x"])
      >>> tokens, stats = nvfp4.generate(
      ...     model, ids, lengths=lengths, max_new_tokens=3, stats=True
      ... )
      >>> stats.lengths.tolist()
      [3, 3]
      >>> tokenizer.decode(tokens, stats.lengths)[1]
      ', axis='
    """

    lengths: jax.Array
    steps: jax.Array
    drafted: jax.Array
    accepted: jax.Array


def generate(
    model: GenerativeModel,
    input_ids: Int32[Array, "b t"],
    *,
    max_new_tokens: int,
    lengths: Int32[Array, " b"] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    draft: str | None = None,
    draft_tokens: int | str = "auto",
    prefill_chunk: int | None = None,
    stats: bool = False,
) -> Any:
    """Generate up to `max_new_tokens` tokens after each prompt.

    At temperature 0, the next token is the one with the largest logit, and so at temperatures
    below 1e-5. Otherwise it is drawn at random::

      next ~ softmax(logits / temperature)

    `top_k` first keeps the tokens with the k largest logits. `top_p` then keeps the smallest set of
    the most probable tokens whose probabilities add up to `top_p` or more. Tokens that tie with the
    last one kept are kept too. No prompt influences the other rows of its batch.

    `generate` may be called inside of ``jax.jit``, for instance to export it. The arrays
    `input_ids`, `lengths` and `key`, the model, `temperature` and `top_p` may then be traced, and
    all other arguments must be known. A trace cannot check values, nor warn of logits that are not
    finite; see `Decoder` for what values out of range do. Outside of ``jax.jit``, on a GPU, the
    loop is one CUDA graph, which is faster.

    With `draft`, a step reads several tokens: the last one of each row, and tokens that were
    drafted to follow it. Drafts that are what the model draws itself are kept, and the model draws
    one further token. So the tokens are the same as without drafts, also at a temperature above 0,
    and there are fewer steps. Kernels may round a token differently if others are read with it, so
    that tokens whose logits nearly tie can differ.

    Args:
      model: model, as `load_model` returns it, or one of your own; see `GenerativeModel`.
      input_ids: prompts, integers ``[b, t]`` from 0 to ``model.config.vocab_size - 1``,
        left-aligned. Numbers after the end of a shorter prompt are ignored. b may be 0; each prompt
        has at least one token, because there is nothing to continue otherwise.
      max_new_tokens: largest number of new tokens in each row, at least 1. With the prompt, they
        must fit the model's positions.
      lengths: number of tokens in each prompt, integers ``[b]`` from 1 to t. None (default) means t
        for every prompt.
      temperature: finite number, 0 or more. Defaults to 0, greedy decoding.
      top_k: number of tokens to draw from, at least 1. None (default) keeps all tokens.
      top_p: probability of the tokens to draw from, in (0, 1]. Defaults to 1, which keeps all
        tokens.
      stop_ids: tokens that end a row. Generation ends early once all rows have ended. None
        (default) takes ``model.stop_ids``, those of the checkpoint. ``()`` never stops.
      key: random key, as `jax.random.key` returns it. Required if the temperature is above 0. None
        by default.
      draft: what drafts tokens. "lookup" takes what followed the last tokens when they occurred
        earlier in the text; it helps where texts repeat themselves. "mtp" runs the model's drafting
        layers, which ``load_model(path, draft="mtp")`` reads. None (default) drafts nothing.
      draft_tokens: number of tokens to draft in a step, from 1 to 16. "auto" (default) takes 4 for
        "lookup" and 3 for "mtp", and runs steps without drafts while those with drafts do not pay.
      prefill_chunk: number of tokens of each prompt that go through the model together. Longer
        prompts are run chunk by chunk, which limits the memory. None (default) means 8192 tokens.
        With more than 8 prompts it means fewer, so that a chunk has at most 65536 tokens in all.
      stats: whether to return a `GenerationStats` too, which has the length of each row. Defaults
        to False.

    Returns:
      The new tokens without the prompts, int32 ``[b, max_new_tokens]``. A row that has ended
      repeats its stop id. With `stats`, a pair of the tokens and a `GenerationStats`.

      If the logits of a row are not finite, its tokens mean nothing. A warning of the logger
      "jax_nvfp4_moe" then names the row and its first such token.

    Raises:
      ValueError: an argument is out of range, or a prompt and its new tokens need more positions
        than ``model.config.max_positions``.
      TypeError: an argument has a wrong type, or the model lacks what `GenerativeModel` describes.

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
    sampling = _choose_sampling(model, temperature, top_k, top_p, stop_ids, key)
    drafting = choose_drafting(model, draft, draft_tokens)
    new = whole_number("max_new_tokens", max_new_tokens)
    input_ids = _integers("input_ids", input_ids, _PROMPTS)
    if _has_no_rows(model, input_ids, lengths, new):
        nothing = jnp.zeros(0, jnp.int32)
        told = GenerationStats(nothing, nothing, nothing, nothing)
        tokens = jnp.zeros((0, new), jnp.int32)
        return (tokens, told) if stats else tokens
    given = model, input_ids, lengths, new, sampling, prefill_chunk, drafting
    with explain_failed_sums():
        if _is_traced(input_ids, lengths, key):
            state = _generate_traced(*given)
        else:
            flat, state = start_decoding(*given)
            if isinstance(state, DraftState):
                state = _find_cost(flat, sampling, state, new)
            if new > 1:  # the prefill has drawn the first token
                state = decode(flat, sampling, state, np.int32(new))
        tokens, told = _fill(state, sampling.stop_ids, new)
        if not isinstance(state.not_finite, Tracer):
            warn_rows(np.asarray(state.not_finite))
    return (tokens, told) if stats else tokens


def stream(
    model: GenerativeModel,
    input_ids: Int32[Array, "b t"],
    *,
    max_new_tokens: int,
    lengths: Int32[Array, " b"] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    draft: str | None = None,
    draft_tokens: int | str = "auto",
    prefill_chunk: int | None = None,
) -> Iterator[np.ndarray]:
    """Generate tokens as `generate` does, and yield them while they are drawn.

    The arguments are checked and the prompts are run when you request the first token. Tokens that
    are drawn within about 20 ms come together. A warning about logits that are not finite comes
    before the first such token. `stream` cannot run inside of ``jax.jit``.

    Args:
      model: as for `generate`.
      input_ids: as for `generate`.
      max_new_tokens: as for `generate`.
      lengths: as for `generate`. Defaults to None.
      temperature: as for `generate`. Defaults to 0.
      top_k: as for `generate`. Defaults to None.
      top_p: as for `generate`. Defaults to 1.
      stop_ids: as for `generate`. Defaults to None, which takes ``model.stop_ids``.
      key: as for `generate`. Defaults to None.
      draft: as for `generate`. Defaults to None.
      draft_tokens: as for `generate`. Defaults to "auto".
      prefill_chunk: as for `generate`. Defaults to None.

    Yields:
      The next token of each row, a NumPy array int32 ``[b]``. A row that has ended repeats its stop
      id. The iterator ends once all rows have ended, or after `max_new_tokens` tokens. Without
      rows it yields nothing.

    Raises:
      ValueError: as for `generate`; or it is called inside of ``jax.jit``.
      TypeError: as for `generate`.

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
    sampling = _choose_sampling(model, temperature, top_k, top_p, stop_ids, key)
    drafting = choose_drafting(model, draft, draft_tokens)
    new = whole_number("max_new_tokens", max_new_tokens)
    input_ids = _integers("input_ids", input_ids, _PROMPTS)
    if _is_traced(input_ids, lengths, key):
        raise ValueError(
            "stream: it yields tokens while the device runs, so it cannot be part of a jitted "
            "function; call it outside of jax.jit, or call generate"
        )
    if _has_no_rows(model, input_ids, lengths, new):
        return
    given = model, input_ids, lengths, new, sampling, prefill_chunk, drafting
    with explain_failed_sums():
        flat, state = start_decoding(*given)
        for _, tokens in decode_in_bursts(flat, sampling, state, new):
            yield from tokens.T


def _choose_sampling(model, temperature, top_k, top_p, stop_ids, key) -> Sampling:
    """Check the model and what says how tokens are drawn."""
    check_model(model)
    found = getattr(model, "stop_ids", ()) if stop_ids is None else stop_ids
    return make_sampling(temperature, top_k, top_p, found, key)


def _is_traced(*arrays) -> bool:
    """Return whether `generate` runs inside of a trace, where it can neither read values nor jit.

    Inside of ``jax.jit`` even new arrays are tracers; inside of ``jax.vmap`` only some are.
    """
    return any(isinstance(x, Tracer) for x in (jnp.zeros(()), *arrays))


def _generate_traced(
    model, input_ids, lengths, new, sampling, chunk, drafting
) -> State | DraftState:
    """Return the state after all new tokens, as a part of the program that is being traced."""
    ids, true = _check_prompts(model, input_ids, lengths, new)
    ids, true = (jnp.asarray(x, jnp.int32) for x in (ids, true))
    chunk = _chunk_size(chunk, len(ids))
    if drafting is None:
        state = _begin_whole(model, sampling, ids, true, new, chunk)
    elif drafting.drafter.NEEDS_HIDDEN:
        room = new + drafting.window
        state = start_with_pairs(model, sampling, ids, true, new, room, chunk, drafting)
    else:
        state = _begin_whole(model, sampling, ids, true, new + drafting.window, chunk)
        state = _begin_from_text(model, state, ids, true, new, drafting)
    return _decode(model, sampling, state, new) if new > 1 else state


def start_decoding(
    model, input_ids, lengths, max_new_tokens, sampling, chunk, drafting: Drafting | None = None
) -> tuple[Any, State | DraftState]:
    """Check the arguments, run the prompts through the model, and draw the first token.

    Args:
      model: as for `generate`.
      input_ids: as for `generate`.
      lengths: as for `generate`.
      max_new_tokens: as for `generate`.
      sampling: the `Sampling`.
      chunk: the argument `prefill_chunk` of `generate`.
      drafting: how tokens are drafted; None for no drafts.

    Returns:
      The model as a `FlatModel`, and the state, for `decode` or `decode_in_bursts`.
    """
    ids, true_lengths = _check_prompts(model, input_ids, lengths, max_new_tokens)
    chunk, flat = _chunk_size(chunk, len(ids)), flatten_model(model)
    check_leaves(model, flat.arrays)
    if drafting is not None and not may_pay(flat.structure, true_lengths.shape, drafting):
        drafting = None
    room = round_up(max_new_tokens + (drafting.window if drafting else 0), NEW_STEP)
    prompt = ids, true_lengths
    if drafting is None:
        return flat, _start_plainly(model, flat, sampling, *prompt, room, chunk)
    most = np.int32(max_new_tokens)
    if drafting.drafter.NEEDS_HIDDEN:
        return flat, start_with_pairs(flat, sampling, *prompt, most, room, chunk, drafting)
    state = _start_plainly(model, flat, sampling, *prompt, room, chunk)
    padded = pad_prompts(ids)
    return flat, begin_from_text(flat, state, padded, true_lengths, most, drafting)


def _start_plainly(model, flat, sampling, ids, lengths, room, chunk):
    """Run prompts through the model, and draw the first token."""
    (b, t) = ids.shape
    if "lengths" not in call_options(model):  # it takes no padding
        return _prefill_whole(flat, sampling, ids, lengths, room, chunk)
    if t > chunk:
        cache = empty_cache(flat, b, padded_length(t, chunk) + room)
        logits, cache = prefill_chunks(flat, cache, ids, lengths, chunk)
        return _begin(sampling, logits, cache, room)
    padded = pad_prompts(ids)
    size = count_tokens(lengths, padded.shape[1])
    return _prefill(flat, sampling, padded, lengths, room, num_tokens=size)


def pad_prompts(ids):
    """Return prompts with zeros up to a multiple of `PROMPT_STEP` tokens."""
    b, t = ids.shape
    padded = np.zeros((b, round_up(t, PROMPT_STEP)), np.int32)
    padded[:, :t] = ids
    return padded


def _begin_from_text(model, state, ids, lengths, most, drafting):
    """Return the `DraftState` after the first token, with a drafter that reads the text alone."""
    model, drafter = restore_model(model), drafting.drafter
    memory = drafter.begin(ids, lengths, state.tokens.shape[1] + drafting.window)
    memory = drafter.record(memory, state.tokens[:, :1], jnp.ones_like(lengths), None)
    return begin(model, state, memory, most, drafting)


# Nothing is donated: jax.jit hands on the arrays of the cache that do not change.
begin_from_text = jax.jit(_begin_from_text, static_argnames="drafting", compiler_options=NO_GRAPHS)


def _chunk_size(chunk, rows) -> int:
    """Return the number of tokens of each row in a chunk; `chunk` is that of the caller."""
    chunk = default_chunk(rows) if chunk is None else whole_number("prefill_chunk", chunk)
    if chunk < 1:
        raise ValueError(f"prefill_chunk: expected at least 1, got {chunk}")
    return chunk


@functools.partial(jax.jit, static_argnames=("room", "num_tokens"), compiler_options=NO_GRAPHS)
def _prefill(model, sampling, padded, lengths, room, num_tokens):
    """Run padded prompts through the model and draw the first token."""
    model = restore_model(model)
    lengths = start_together(model, lengths)
    b, t = padded.shape
    cache = model.init_cache(b, t + room)
    logits, cache = read_tokens(model, padded, cache, lengths, num_tokens)
    return draw(sampling, logits, State.begin(cache, b, room))


def _begin_whole(model, sampling, ids, lengths, room, chunk):
    """Run prompts through a model chunk by chunk, in one program, and draw the first token."""
    model = restore_model(model)
    lengths = start_together(model, lengths)
    b, t = ids.shape
    cache, logits = model.init_cache(b, t + room), None
    for start in range(0, t, chunk):
        part = ids[:, start : start + chunk]
        counts = jnp.clip(lengths - start, 0, part.shape[1])
        new, cache = read_tokens(model, part, cache, counts)
        logits = new if logits is None else jnp.where(counts[:, None] > 0, new, logits)
    return draw(sampling, logits, State.begin(cache, b, room))


_prefill_whole = jax.jit(
    _begin_whole, static_argnames=("room", "chunk"), compiler_options=NO_GRAPHS
)


@functools.partial(jax.jit, static_argnames="room", donate_argnames="cache")
def _begin(sampling, logits, cache, room):
    """Draw the first token after a chunked prefill."""
    cache = lax.optimization_barrier(cache)
    return draw(sampling, logits, State.begin(cache, logits.shape[0], room))


def _decode(model, sampling, state, limit):
    """Draw tokens until each row has `limit` new tokens, or until all rows have stopped."""
    model = restore_model(model)
    limit = start_together(model, limit)
    if isinstance(state, DraftState):
        read = functools.partial(_read, **state.drafting.read_options)
        propose = state.drafting.propose
        if _runs_alone_on_a_gpu(model):
            read, propose = chain_calls(read), chain_calls(propose)
        return decode_with_drafts(model, sampling, state, limit, read, propose)

    def more(state):
        return (state.count < limit) & ~state.stopped.all()

    def step(state):
        last = lax.dynamic_slice_in_dim(state.tokens, state.count - 1, 1, axis=1)
        found, cache = read(model, last, state.cache)
        state = dataclasses.replace(state, cache=cache)
        if largest_alone:
            token, logit = (each[:, 0] for each in found)
            return add_token(sampling, token, jnp.isfinite(logit), state)
        return draw(sampling, found[:, 0].astype(jnp.float32), state)

    read, connected = _read, find_connected_mesh(model)
    largest_alone = connected is not None and sampling.greedy and shards_logits(model)
    if connected is not None:
        own = only_largest(_read, connected) if largest_alone else _read
        read = on_each_device(chain_calls(own), connected)
    elif _runs_alone_on_a_gpu(model):
        read = chain_calls(_read)
    return lax.while_loop(more, step, state)


@functools.partial(jax.jit, donate_argnames="state", compiler_options=_ONE_GRAPH)
def decode(model, sampling, state, limit):
    """Run `_decode` as a program of its own."""
    return _decode(model, sampling, state, limit)


def _find_cost(model, sampling, state: DraftState, limit: int) -> DraftState:
    """Return the state with the measured cost of a step with drafts; see `step_costs`."""

    def run(state, count):
        return decode(model, sampling, state, np.int32(min(count, limit)))

    return find_cost(model.structure, run, state, limit)


def decode_in_bursts(
    model, sampling, state, limit: int
) -> Iterator[tuple[State | DraftState, np.ndarray]]:
    """Draw tokens as `decode` does, a few at a time.

    Args:
      model: a `FlatModel`.
      sampling: the `Sampling`.
      state: the state after the prompt, as `start_decoding` returns it. Its arrays are donated: do
        not use them again.
      limit: largest number of new tokens of each row, at least 1.

    Yields:
      The state, whose arrays are donated when the next one is requested, and the tokens that are
      new in it, int32 ``[b, n]`` with n at least 1.
    """
    done, burst, begin = 0, 1, time.perf_counter()
    if isinstance(state, DraftState):
        state = _find_cost(model, sampling, state, limit)
    while True:
        tokens, count = _drawn_tokens(state)
        stopped, first = jax.device_get((state.stopped, state.not_finite))
        seconds = (time.perf_counter() - begin) / (count - done)
        warn_rows(np.where(first >= done, first, -1))  # earlier bursts warned of the others
        yield state, tokens[:, done:count]
        done = count
        if done >= limit or stopped.all():
            return
        burst = max(1, min(2 * burst, int(_BURST_SECONDS / seconds)))
        begin = time.perf_counter()
        state = decode(model, sampling, state, np.int32(min(done + burst, limit)))


def _read(model, ids, cache, **options):
    """Return the logits after new tokens, and the cache with them."""
    return model(ids, cache, **options)


def _runs_alone_on_a_gpu(model) -> bool:
    """Return whether the kernels of `model` run on one GPU. Only there do chains save time."""
    target = getattr(getattr(model, "norm", None), "target", None) or Target.current()
    meshes = (getattr(model, name, None) for name in ("expert_mesh", "rows_mesh"))
    return target.platform == "cuda" and all(mesh is None for mesh in meshes)


def _drawn_tokens(state) -> tuple[np.ndarray, int]:
    """Return the new tokens of all rows, and their number, on the host."""
    if isinstance(state, DraftState):
        return shared_tokens(state)
    tokens, count = jax.device_get((state.tokens, state.count))
    return tokens, int(count)


@functools.partial(jax.jit, static_argnames="length")
def _fill(state, stop_ids, length):
    """Return the first `length` tokens of each row, and the `GenerationStats` of all rows.

    The last token of each row is repeated to the end. Tokens are missing only if all rows have
    stopped. The last token of each row is then a stop id.
    """
    count = jnp.broadcast_to(state.count, len(state.tokens))[:, None]
    last = jnp.take_along_axis(state.tokens, count - 1, axis=1)
    drawn = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :] < count
    tokens = jnp.where(drawn, state.tokens, last)[:, :length]
    stops = jnp.isin(tokens, stop_ids)
    first = jnp.argmax(stops, axis=1).astype(jnp.int32)
    lengths = jnp.where(stops.any(axis=1), first + 1, jnp.int32(length))
    if isinstance(state, DraftState):
        told = GenerationStats(lengths, state.steps, state.drafted, state.accepted)
    else:
        nothing = jnp.zeros_like(lengths)
        told = GenerationStats(lengths, lengths, nothing, nothing)
    return tokens, told


def round_up(n: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `n`."""
    return -(-n // step) * step


def _has_no_rows(model, input_ids, lengths, max_new_tokens) -> bool:
    """Return whether the batch has no prompts, and check the arguments if so."""
    if np.shape(input_ids)[:1] != (0,):
        return False
    _check_prompts(model, input_ids, lengths, max_new_tokens)
    return True


def _check_prompts(model, input_ids, lengths, max_new_tokens) -> tuple[Any, Any]:
    """Return the prompts and their lengths, with zeros after each prompt.

    They are NumPy arrays, or traced arrays, whose values nothing can check. If the model takes no
    lengths, the prompts are cut to their common length.
    """
    ids = _integers(
        "input_ids", input_ids, "integers [b, t]; pad shorter prompts, and pass lengths"
    )
    if ids.ndim != 2:
        raise ValueError(f"input_ids: expected integers [b, t], got {ids.dtype} {ids.shape}")
    b, t = ids.shape
    if b and not t:
        raise ValueError(
            "input_ids: expected at least one token in each row, because there is nothing to "
            f"continue otherwise; got shape {ids.shape}"
        )
    true = _check_lengths(lengths, b, t)
    known = not isinstance(true, Tracer)
    _check_room(int(true.max(initial=0)) if known else 1, max_new_tokens, model.config)
    if "lengths" not in call_options(model):
        ids, true = _cut_to_common(model, ids, true)
    real = np.arange(ids.shape[1])[None, :] < true[:, None]
    if isinstance(ids, Tracer) or not known:
        return jnp.where(real, ids, jnp.zeros((), ids.dtype)), true
    read, vocabulary = np.where(real, ids, 0), model.config.vocab_size
    if read.size and (read.min() < 0 or read.max() >= vocabulary):
        raise ValueError(
            f"input_ids: expected ids from 0 to {vocabulary - 1}, the model's vocabulary; got "
            f"{read.min()} to {read.max()}"
        )
    return read, true


def _integers(name, values, expected) -> Any:
    """Return an array of integers, traced or in NumPy."""
    if isinstance(values, Tracer):
        found = values
    else:
        try:
            found = np.asarray(values)
        except ValueError:  # rows of different lengths
            raise ValueError(f"{name}: expected {expected}; got rows of other lengths") from None
    if not jnp.issubdtype(found.dtype, np.integer) and found.size:
        raise ValueError(f"{name}: expected {expected}; got {found.dtype} {found.shape}")
    return found


def _check_lengths(lengths, b, t):
    """Return the number of tokens in each prompt, int32 ``[b]``."""
    if lengths is None:
        return np.full(b, t, np.int32)
    expected = f"{b} integers from 1 to {t}"
    true = _integers("lengths", lengths, expected)
    if true.shape != (b,):
        raise ValueError(f"lengths: expected {expected}, got {true.dtype} {true.shape}")
    if isinstance(true, Tracer):
        return true.astype(jnp.int32)
    if ((true < 1) | (true > t)).any():
        raise ValueError(f"lengths: expected {expected}, got {true.tolist()}")
    return true.astype(np.int32)


def _check_room(longest, max_new_tokens, config) -> None:
    """Check that a prompt and its new tokens fit the model's positions."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    positions = min(operator.index(config.max_positions), _MOST_POSITIONS)
    if longest + max_new_tokens > positions:
        raise ValueError(
            f"max_new_tokens: a prompt of {longest} tokens and {max_new_tokens} new tokens "
            f"exceed the model's {positions} positions by its config.json. Shorten the "
            "prompt, or ask for fewer new tokens"
        )


def _cut_to_common(model, ids, true):
    """Return prompts that all have the same length, without what follows them."""
    if isinstance(true, Tracer) or (len(true) and (true != true[0]).any()):
        found = "traced lengths" if isinstance(true, Tracer) else true.tolist()
        raise ValueError(
            f"lengths: {type(model).__name__} takes no argument `lengths`, so it expects prompts "
            f"of one known length; got {found}. See nvfp4.GenerativeModel"
        )
    return (ids[:, : true[0]] if len(true) else ids), true
