"""Quality in one number: the mean cross-entropy of a model on a text."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_BATCH = 4  # windows that go through the model together


def evaluate(
    model: Any,
    token_ids,
    *,
    window: int = 512,
    skip_tokens: int = 0,
    max_windows: int | None = None,
    by_window: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the mean cross-entropy, in nats a token, over windows that do not overlap.

    Window w holds ids ``w * window`` to ``(w + 1) * window - 1`` after the skipped ones. Each is
    on its own: the model sees nothing before it, and predicts all its tokens but the first, so
    ``mean = -sum log softmax(logits[i])[id[i + 1]] / (windows * (window - 1))``.

    Args:
      model: as `load_model` returns.
      token_ids: integers ``[n]``.
      window: tokens in a window, at least 2; a rest shorter than it is left out.
      skip_tokens: leading tokens to leave out.
      max_windows: at most so many windows; None for all.
      by_window: whether the result holds each window's own mean too.
      progress: called with the windows done and their total.

    Returns:
      ``mean_cross_entropy``; ``perplexity``, its exponential; ``standard_error`` of the mean over
      windows, see `standard_error`; ``windows``, ``window``, ``skip_tokens`` and
      ``predicted_tokens``. With `by_window` also the lists ``cross_entropies`` and
      ``perplexities``.

    Raises:
      ValueError: an argument is out of range, or no whole window is left.
    """
    windows = split_windows(model.config, token_ids, window, skip_tokens, max_windows)
    losses: list[float] = []
    for done, batch in _batches(windows):
        summed = np.asarray(_losses(model, batch), np.float64)
        losses += (summed[: len(windows) - done] / (window - 1)).tolist()
        if progress is not None:
            progress(min(done + len(batch), len(windows)), len(windows))
    mean = float(np.mean(losses))
    result = {
        "mean_cross_entropy": mean,
        "perplexity": perplexity(mean),
        "standard_error": standard_error(losses),
        "windows": len(windows),
        "window": window,
        "skip_tokens": skip_tokens,
        "predicted_tokens": len(windows) * (window - 1),
    }
    if by_window:
        result |= {"cross_entropies": losses, "perplexities": [*map(perplexity, losses)]}
    return result


def perplexity(cross_entropy: float) -> float:
    """Return ``exp(cross_entropy)``, and ``exp(709)`` where that is beyond a float64."""
    return math.exp(min(cross_entropy, 709.0))


def standard_error(values: Sequence[float]) -> float | None:
    """Return ``std(values) / sqrt(n)`` with ``n - 1`` degrees of freedom; None of less than two.

    Of windows of one text it says how far another part of that text would move the mean. Two models
    on the same windows differ by much less: take the standard error of their differences.
    """
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def summary_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Return a table of one row for each result, beside the first: a difference window by window.

    Args:
      results: name -> what `evaluate` returns with `by_window`, all of the same windows.
    """
    yield "scheme", "cross-entropy", "+-", "perplexity", "over the first", "+-"
    first: list[float] | None = None
    for name, result in results.items():
        losses = result["cross_entropies"]
        row = name, *_with_error(losses), f"{result['perplexity']:.4f}"
        more = [] if first is None else [a - b for a, b in zip(losses, first, strict=True)]
        yield (*row, *(_with_error(more) if more else ("", "")))
        first = first or losses


def window_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Return a table of one row for each window: cross-entropy and perplexity of each result.

    Args:
      results: as for `summary_rows`.
    """
    yield "window", "first token", *(f"{name} {of}" for name in results for of in ("nats", "ppl"))
    (some, *_) = results.values()
    for index in range(some["windows"]):
        figures = (
            f"{result[of][index]:.5f}"
            for result in results.values()
            for of in ("cross_entropies", "perplexities")
        )
        yield str(index), str(some["skip_tokens"] + index * some["window"]), *figures


def _with_error(values):
    error = standard_error(values)
    return f"{np.mean(values):.5f}", "" if error is None else f"{error:.5f}"


@jax.jit
def _losses(model, batch):
    """Return the summed cross-entropy of each window, float32 ``[b]``."""
    logits = model(batch)[:, :-1]
    chosen = jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).sum(axis=-1)


def _batches(windows) -> Iterator[tuple[int, np.ndarray]]:
    """Return how many windows came before, and batches of one size, the last filled up."""
    size = min(_BATCH, len(windows))
    for start in range(0, len(windows), size):
        batch = windows[start : start + size]
        yield start, np.concatenate([batch, np.repeat(batch[-1:], size - len(batch), axis=0)])


def split_windows(
    config: Any, token_ids, window: int, skip_tokens: int = 0, max_windows: int | None = None
) -> np.ndarray:
    """Return ids in windows that do not overlap, int32 ``[windows, window]``.

    Args:
      config: of the model; has max_positions and vocab_size.
      token_ids, window, skip_tokens, max_windows: as for `evaluate`.

    Raises:
      ValueError: an argument is out of range, or no whole window is left.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_ids: expected integers [n], got {ids.dtype} {ids.shape}")
    limit = config.max_positions
    if not 2 <= window <= limit:
        raise ValueError(f"window: expected 2 to {limit}, the model's positions; got {window}")
    if skip_tokens < 0:
        raise ValueError(f"skip_tokens: expected 0 or more, got {skip_tokens}")
    if max_windows is not None and max_windows < 1:
        raise ValueError(f"max_windows: expected at least 1 or None, got {max_windows}")
    count = (len(ids) - skip_tokens) // window
    count = count if max_windows is None else min(count, max_windows)
    if count < 1:
        raise ValueError(
            f"token_ids: {len(ids)} tokens less {skip_tokens} skipped hold no window of {window}"
        )
    kept = ids[skip_tokens : skip_tokens + count * window]
    if kept.min() < 0 or kept.max() >= config.vocab_size:
        raise ValueError(
            f"token_ids: expected ids from 0 to {config.vocab_size - 1}, got "
            f"{kept.min()} to {kept.max()}"
        )
    return kept.astype(np.int32).reshape(count, window)
