"""How the next token is drawn from logits."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int32

# Below this temperature, decoding is greedy, as in vLLM. Logits of float32 that differ at all are
# then hardly ever exchanged, and the largest one is never divided into an infinity.
_COLD = 1e-5
# A higher temperature counts as this one. Its reciprocal, by which XLA may multiply, is a normal
# float32; one that is flushed to 0 would make NaN of the -infinity of a masked token.
_HOT = 1e37


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      temperature: float32 scalar.
      top_p: float32 scalar.
      stop_ids: int32 ``[s]``. A row that draws one of them repeats it from then on.
      key: random key, as `jax.random.key` returns it; None if `greedy`.
      greedy: whether to take the token with the largest logit, which is so below a temperature of
        1e-5; the other options then have no effect, except `stop_ids`. Static.
      top_k: number of largest logits to draw from; None for all. Static.
      nucleus: whether `top_p` is below 1. Static.
    """

    temperature: jax.Array | np.floating
    top_p: jax.Array | np.floating
    stop_ids: jax.Array | np.ndarray
    key: jax.Array | None
    greedy: bool = dataclasses.field(metadata={"static": True})
    top_k: int | None = dataclasses.field(metadata={"static": True})
    nucleus: bool = dataclasses.field(metadata={"static": True})


def choose(
    sampling: Sampling, logits: Float[Array, "b t v"], first: Int32[Array, " b"]
) -> tuple[Int32[Array, "b t"], Bool[Array, "b t"]]:
    """Draw one token from each of the logits.

    The random numbers of a token depend on its row and on its index in the row alone. So a token
    is drawn as it would be without the others, whether or not it was drafted.

    Args:
      sampling: how tokens are drawn.
      logits: logits of t tokens in each row.
      first: number of new tokens in each row before these.

    Returns:
      The tokens, and whether all logits of a token were usable.
    """
    tokens = _draw_tokens(sampling, logits.astype(jnp.float32), first)
    # The drawn token tells whether all logits were usable, without another pass over them: a
    # maximum takes a NaN first, then infinity, and -infinity only if there is nothing else.
    # Sampling takes a maximum too, and neither `top_k` nor `top_p` removes a NaN or infinity.
    drawn = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return tokens, jnp.isfinite(drawn)


def _draw_tokens(sampling, logits, first):
    """Return the tokens of `choose`."""
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = _cool(logits, sampling.temperature)
    if sampling.top_k is not None:
        smallest = lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if sampling.nucleus:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        chances = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances
        smallest = jnp.min(
            jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True
        )
        smallest = jnp.minimum(smallest, ordered[..., :1])  # a denormal `top_p` counts as 0
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.vmap(_draw_row, in_axes=(None, 0, 0, 0))(
        sampling.key, jnp.arange(len(logits), dtype=jnp.int32), first, logits
    )


def _draw_row(key, row, first, logits):
    """Return random tokens of one row ``[t]``."""

    def draw(index, logits):
        of_token = jax.random.fold_in(jax.random.fold_in(key, row), index)
        return jax.random.categorical(of_token, logits)

    indices = first + jnp.arange(len(logits), dtype=jnp.int32)
    return jax.vmap(draw)(indices, logits).astype(jnp.int32)


def _cool(logits: Float[Array, "... v"], temperature) -> Float[Array, "... v"]:
    """Return logits divided by the temperature, after the largest finite one of each row became 0.

    Without that, a low temperature would make several logits infinite. What is not finite stays so.
    """
    finite = jnp.where(jnp.isfinite(logits), logits, -jnp.inf)
    largest = jnp.max(finite, axis=-1, keepdims=True)
    shifted = logits - jnp.where(jnp.isfinite(largest), largest, 0)
    return shifted / jnp.clip(temperature, _COLD, _HOT)


def make_sampling(
    temperature: float,
    top_k: int | None,
    top_p: float,
    stop_ids: Sequence[int],
    key: jax.Array | None,
) -> Sampling:
    """Check the arguments of `generate` that say how tokens are drawn, and return them."""
    heat, share = _number("temperature", temperature), _number("top_p", top_p)
    if heat is not None and not 0 <= heat < float("inf"):
        raise ValueError(f"temperature: expected a finite number, 0 or more; got {heat}")
    top_k = None if top_k is None else whole_number("top_k", top_k)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, or None to keep all tokens; got {top_k}")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], got {share}")
    if heat != 0 and key is None:
        raise ValueError(
            f"key: expected a jax.random.key, because temperature {temperature} draws tokens at "
            "random; got None. Pass a key, or use temperature 0"
        )
    greedy = heat is not None and heat < _COLD
    return Sampling(
        jnp.asarray(temperature, jnp.float32) if heat is None else np.float32(min(heat, _HOT)),
        jnp.asarray(top_p, jnp.float32) if share is None else np.float32(share),
        _check_stop_ids(stop_ids),
        None if greedy else key,
        greedy=greedy,
        top_k=top_k,
        nucleus=share is None or share < 1,
    )


def whole_number(name: str, value: Any) -> int:
    """Return an argument that must be a known integer."""
    try:
        return operator.index(value)
    except TypeError:  # also what JAX raises for a tracer
        pass
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name}: expected an integer that is known while jax.jit traces, got a traced array; "
            "make it a static argument"
        )
    raise TypeError(f"{name}: expected an integer, got {type(value).__name__} {value!r:.80}")


def _number(name: str, value: Any) -> float | None:
    """Return an argument that must be a number, or None if it is traced."""
    if isinstance(value, Tracer):
        return None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return float("inf")
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: expected a number, got {type(value).__name__} {value!r:.80}"
        ) from None


def _check_stop_ids(stop_ids) -> np.ndarray:
    """Return the ids that end a row as int32 ``[s]``."""
    try:
        found = [whole_number("stop_ids", index) for index in stop_ids]
    except TypeError:
        raise TypeError(
            "stop_ids: expected a sequence of known integers, None for those of the model, or () "
            f"for none; got {type(stop_ids).__name__} {stop_ids!r:.80}"
        ) from None
    outside = [index for index in found if not 0 <= index < 2**31]
    if outside:
        raise ValueError(f"stop_ids: expected ids from 0 to {2**31 - 1}, got {outside[0]}")
    return np.asarray(found, np.int32)
