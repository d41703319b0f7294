"""`GenerativeModel`: what a model needs so that `generate` and `stream` can run it."""

import inspect
import operator
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

# Further arguments of a model that `generate` passes if the model has them.
_OPTIONS = ("lengths", "logits_at", "num_tokens")
_SIZES = ("vocab_size", "max_positions")


class GenerativeConfig(Protocol):
    """The sizes of a `GenerativeModel`.

    Attributes:
      vocab_size: number of token ids.
      max_positions: largest number of tokens of a row, with the prompt.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def max_positions(self) -> int:
        """Largest number of tokens of a row, with the prompt."""
        ...


@runtime_checkable
class GenerativeModel(Protocol):
    """What a model needs so that `generate` and `stream` can run it.

    `load_model` returns such models. A model of your own needs no base class, only these methods::

      cache = model.init_cache(batch, max_length)
      logits, cache = model(input_ids, cache)      # [b, t] -> [b, t, vocab]

    The model is a pytree: an `nnx.Module`, or a class that is registered with
    `jax.tree_util.register_dataclass`. The cache is a pytree of arrays, of any structure. A call
    returns a new cache with the same structure, shapes and dtypes, and changes neither the model
    nor the old one. `generate` jits the calls.

    A model may also have an attribute `stop_ids`, a tuple of the ids that end a text, which
    `generate` takes by default. Its calls may take these keyword arguments, which `generate` passes
    if the signature names them:

    * `lengths`, int32 ``[b]``: number of true tokens in each row, from 0 to t. What follows them is
      padding, and has no effect on the cache. Without this argument, the prompts of a batch must
      have the same length, and prompts of another length compile another program.
    * `logits_at`, int32 ``[b]``: one index into t for each row. The logits are then those of that
      position alone, ``[b, 1, vocab]``.
    * `num_tokens`: a Python integer or None, at least the number of true tokens of all rows.

    To draft tokens, the cache must be able to go back. A model may have two methods for that::

      cache = model.open_window(cache, size)
      cache = model.rewind(cache, kept, read)

    The first is called once, on the cache of the prompts; later calls read up to `size` tokens at
    once. The second returns the cache as if the last call had read the first `kept`, int32 ``[b]``,
    of its `read` tokens. A model without them needs calls that take `lengths`, and is run twice.

    Attributes:
      config: an object with `vocab_size` and `max_positions`, such as a dataclass.

    Example:
      >>> import dataclasses
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> @dataclasses.dataclass(frozen=True)
      ... class Sizes:
      ...     vocab_size: int = 16
      ...     max_positions: int = 32
      >>> class Successor(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.config, self.stop_ids = Sizes(), (9,)
      ...         self.moe = nvfp4.NVFP4MoE(4, 16, 16, top_k=2, rngs=rngs)
      ...     def init_cache(self, batch, max_length):
      ...         return jnp.zeros(batch, jnp.int32)  # this model only counts its tokens
      ...     def __call__(self, input_ids, cache):
      ...         x = jax.nn.one_hot(input_ids + 1, 16)
      ...         y = self.moe(x.reshape(-1, 16).astype(jnp.bfloat16)).reshape(x.shape)
      ...         return 100 * x + y.astype(jnp.float32), cache + input_ids.shape[1]
      >>> model = Successor(nnx.Rngs(0))
      >>> isinstance(model, nvfp4.GenerativeModel)
      True
      >>> tokens = nvfp4.generate(model, jnp.asarray([[5, 6]]), max_new_tokens=5)
      >>> tokens.tolist()
      [[7, 8, 9, 9, 9]]
    """

    @property
    def config(self) -> GenerativeConfig:
        """Sizes of the model."""
        ...

    def init_cache(self, batch: int, max_length: int) -> Any:
        """Return an empty cache for `batch` rows of up to `max_length` tokens."""
        ...

    def __call__(self, input_ids: Any, cache: Any, /) -> Any:
        """Return logits ``[b, t, vocab]`` of new tokens ``[b, t]``, and the cache with them."""
        ...


def check_model(model: object) -> None:
    """Check that a model has what `generate` needs.

    Raises:
      TypeError: something is missing. The message names all of it.
    """
    config = getattr(model, "config", None)
    missing = ["__call__(input_ids, cache)"] if not callable(model) else []
    if not callable(getattr(model, "init_cache", None)):
        missing.append("init_cache(batch, max_length)")
    missing += [f"config.{name}" for name in _SIZES if not _is_integer(getattr(config, name, None))]
    if missing:
        raise TypeError(
            "model: expected what nvfp4.GenerativeModel describes, as load_model returns it; "
            f"{type(model).__name__} has no {', no '.join(missing)}"
        )


def check_leaves(model: object, leaves: Sequence[object]) -> None:
    """Check that the leaves of a model's tree are arrays.

    Raises:
      TypeError: one is something else, so that `jax.jit` cannot take the model.
    """
    for leaf in leaves:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise TypeError(
                f"model: expected a pytree of arrays, such as an nnx.Module; {type(model).__name__}"
                f" holds {'itself' if leaf is model else type(leaf).__name__} as a leaf. Register "
                "the class with jax.tree_util.register_dataclass"
            )


def _is_integer(value) -> bool:
    try:
        return operator.index(value) >= 0
    except TypeError:
        return False


def call_options(model: Any) -> tuple[str, ...]:
    """Return the names of the further arguments that a model takes."""
    parameters = inspect.signature(model).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return _OPTIONS
    return tuple(name for name in _OPTIONS if name in parameters)


def read_tokens(
    model: Any,
    ids: Int32[Array, "b t"],
    cache: Any,
    lengths: Int32[Array, " b"],
    num_tokens: int | None = None,
) -> tuple[Float[Array, "b vocab"], Any]:
    """Run new tokens through a model; call it inside of a trace.

    Args:
      model: a `GenerativeModel`.
      ids: the tokens, left-aligned.
      cache: cache of the model.
      lengths: number of true tokens in each row, from 0 to t; all are t if the model does not take
        them.
      num_tokens: the argument of that name, for models that take it.

    Returns:
      The float32 logits after the last token of each row, which mean nothing for a row without
      tokens, and the cache with the tokens.

    Raises:
      TypeError: the model returns something else than logits and a cache like the one that it got.
    """
    last = jnp.maximum(lengths - 1, 0)
    values = dict[str, Any](lengths=lengths, logits_at=last, num_tokens=num_tokens)
    given = {name: values[name] for name in call_options(model)}
    logits, after = _pair(model, model(ids, cache, **given))
    t = 1 if "logits_at" in given else ids.shape[1]
    expected = (ids.shape[0], t, model.config.vocab_size)
    if logits.shape != expected:
        raise TypeError(
            f"model: expected logits {expected} from {type(model).__name__} for input_ids "
            f"{ids.shape}{' and logits_at' * ('logits_at' in given)}, got {logits.shape}"
        )
    _check_cache(model, cache, after)
    if "logits_at" not in given:
        logits = jnp.take_along_axis(logits, last[:, None, None], axis=1)
    return logits[:, 0].astype(jnp.float32), after


def _pair(model, result):
    """Return logits and cache, as a call with a cache returns them."""
    if not isinstance(result, tuple) or len(result) != 2 or not hasattr(result[0], "shape"):
        raise TypeError(
            f"model: expected a pair of logits and cache from {type(model).__name__} called with a "
            f"cache, got {type(result).__name__}"
        )
    return result


def _check_cache(model, before, after) -> None:
    """Check that a call returns a cache like the one that it got, as a compiled loop needs it."""
    old, new = (jax.tree_util.tree_flatten_with_path(cache) for cache in (before, after))
    if old[1] != new[1]:
        problem = f"structure {old[1]}, got {new[1]}"
    else:
        pairs = zip(old[0], new[0], strict=True)
        found = [(p, _kind(x), _kind(y)) for (p, x), (_, y) in pairs if _kind(x) != _kind(y)]
        if not found:
            return
        path, was, is_now = found[0]
        place = jax.tree_util.keystr(path)
        problem = f"{was} at {f'cache{place}' if place else 'it'}, got {is_now}"
    raise TypeError(
        f"model: expected {type(model).__name__} to return a cache like that of init_cache, with "
        f"{problem}"
    )


def _kind(leaf) -> str:
    """Return dtype and shape of a leaf."""
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
