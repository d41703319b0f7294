"""Measure the quality of a model as its mean cross-entropy on a text."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_nvfp4_moe.inference.flat_model import flatten_model
from jax_nvfp4_moe.inference.not_finite import warn_not_finite
from jax_nvfp4_moe.inference.prefill import SCORE_CHUNK, score_texts

_BATCH, _BATCH_TOKENS = 4, 8192  # windows, and about their tokens, that are in memory together


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
    """Return the mean cross-entropy of a model on a text, in nats per token.

    The text is divided into windows that do not overlap. The model predicts all tokens of a window
    except the first, and sees no token outside the window::

      mean = -sum log softmax(logits[i])[id[i + 1]] / (windows * (window - 1))

    The sum runs over all positions i of all windows except the last position of each window. A
    window of more than 2048 tokens runs in chunks of 2048, which limits the memory.

    Args:
      model: model from `load_model`.
      token_ids: integers ``[n]``, the token ids of the text.
      window: number of tokens in a window, at least 2. Defaults to 512. A rest of the text that is
        shorter than a window is not used.
      skip_tokens: number of tokens to skip at the beginning of the text. Defaults to 0.
      max_windows: largest number of windows. None (the default) takes all.
      by_window: whether the result also holds the figures of each window. Defaults to False.
      progress: function that is called with the number of finished windows and their total number,
        or None.

    Returns:
      A dictionary. ``mean_cross_entropy`` is in nats per token, and ``perplexity`` is its
      exponential. ``standard_error`` belongs to the mean over windows; see `standard_error`.
      ``windows``, ``window``, ``skip_tokens`` and ``predicted_tokens`` are the numbers behind the
      mean. With `by_window`, the lists ``cross_entropies`` and ``perplexities`` have one entry per
      window.

      If log-probabilities of a window are not finite, neither are its figures and the mean. A
      warning of the logger "jax_nvfp4_moe" then names the windows.

    Raises:
      ValueError: an argument is out of range, an id is not in the vocabulary, or the text is
        shorter than one window.

    Example:
      >>> import importlib.resources
      >>> import jax_nvfp4_moe as nvfp4
      >>> folder = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model = nvfp4.load_model(folder)
      >>> token_ids = nvfp4.load_tokenizer(folder).encode("import numpy as np; " * 20)
      >>> result = nvfp4.evaluate(model, token_ids, window=16, max_windows=4)
      >>> result["windows"], result["predicted_tokens"]
      (4, 60)
      >>> result["perplexity"] > 1
      True

    Source: perplexity over windows of fixed length,
    https://huggingface.co/docs/transformers/perplexity.
    """
    windows = split_windows(model.config, token_ids, window, skip_tokens, max_windows)
    losses: list[float] = []
    flat = flatten_model(model)
    for done, batch in _batches(windows):
        summed = _sum_losses(flat, batch)
        losses += (summed[: len(windows) - done] / (window - 1)).tolist()
        if progress is not None:
            progress(min(done + len(batch), len(windows)), len(windows))
    _warn(losses)
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
    """Return ``exp(cross_entropy)``, or ``exp(709)`` if that would overflow a float64.

    A cross-entropy that is infinite or NaN is returned unchanged.
    """
    return math.exp(min(cross_entropy, 709.0)) if math.isfinite(cross_entropy) else cross_entropy


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean, ``std(values) / sqrt(n)``.

    The standard deviation has ``n - 1`` degrees of freedom. For windows of one text, the standard
    error estimates how much the mean would change on another part of that text. Two models on the
    same windows differ by much less. To compare them, pass the differences of their values.

    Args:
      values: n numbers.

    Returns:
      The standard error, or None if there are fewer than two values. It is NaN if a value is not
      finite.
    """
    if len(values) < 2:
        return None
    if not np.isfinite(values).all():
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def _warn(losses: Sequence[float]) -> None:
    """Log which windows have a cross-entropy that is not finite, if there are any."""
    windows = np.flatnonzero(~np.isfinite(losses)).tolist()
    if windows:
        warn_not_finite(
            "the log-probabilities are not finite in %d of %d windows, the first of which is "
            "window %d (counted from 0)",
            len(windows),
            len(losses),
            windows[0],
        )


def summary_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a table with one row per result, compared with the first result window by window.

    Args:
      results: name -> dictionary that `evaluate` returned with `by_window`. All must be of the same
        windows.
    """
    yield "scheme", "cross-entropy", "std error", "perplexity", "difference to first", "std error"
    first: list[float] | None = None
    for name, result in results.items():
        losses = result["cross_entropies"]
        row = name, *_with_error(losses), f"{result['perplexity']:.4f}"
        more = [] if first is None else [a - b for a, b in zip(losses, first, strict=True)]
        yield (*row, *(_with_error(more) if more else ("", "")))
        first = first or losses


def window_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a table with one row per window: cross-entropy and perplexity of each result.

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
    """Return the mean of `values` and its standard error as text; the error is empty if unknown."""
    error = standard_error(values)
    return f"{np.mean(values):.5f}", "" if error is None else f"{error:.5f}"


def _sum_losses(model, batch) -> np.ndarray:
    """Return the summed cross-entropy of each window, float64 ``[b]``."""
    b, window = batch.shape
    targets = np.pad(batch[:, 1:], ((0, 0), (0, 1)))  # the last token of a window has no target
    counted = np.broadcast_to(np.arange(window) < window - 1, batch.shape)
    lengths = np.full(b, window, np.int32)
    summed, _ = score_texts(model, batch, targets, counted, lengths, SCORE_CHUNK)
    return -np.asarray(summed, np.float64)


def _batches(windows) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the index of the first window of each batch, and the batch.

    The last batch repeats its last window until it has the size of the others, so that all batches
    share one compiled program.
    """
    size = min(_BATCH, len(windows), max(1, _BATCH_TOKENS // windows.shape[1]))
    for start in range(0, len(windows), size):
        batch = windows[start : start + size]
        yield start, np.concatenate([batch, np.repeat(batch[-1:], size - len(batch), axis=0)])


def split_windows(
    config: Any, token_ids, window: int, skip_tokens: int = 0, max_windows: int | None = None
) -> np.ndarray:
    """Return token ids as windows that do not overlap, int32 ``[windows, window]``.

    Args:
      config: configuration of the model, with `max_positions` and `vocab_size`.
      token_ids: as for `evaluate`.
      window: as for `evaluate`.
      skip_tokens: as for `evaluate`.
      max_windows: as for `evaluate`.

    Raises:
      ValueError: an argument is out of range, an id is not in the vocabulary, or the text is
        shorter than one window.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"token_ids: expected integers of shape [n], got {ids.dtype} of shape {ids.shape}"
        )
    limit = config.max_positions
    if not 2 <= window <= limit:
        raise ValueError(
            f"window: expected 2 to {limit} tokens, the positions of the model; got {window}"
        )
    if skip_tokens < 0:
        raise ValueError(f"skip_tokens: expected 0 or more, got {skip_tokens}")
    if max_windows is not None and max_windows < 1:
        raise ValueError(f"max_windows: expected at least 1 or None, got {max_windows}")
    count = (len(ids) - skip_tokens) // window
    count = count if max_windows is None else min(count, max_windows)
    if count < 1:
        raise ValueError(
            f"token_ids: expected at least {window} tokens, one window, after the first "
            f"{skip_tokens}; got {len(ids)} tokens in all"
        )
    kept = ids[skip_tokens : skip_tokens + count * window]
    if kept.min() < 0 or kept.max() >= config.vocab_size:
        raise ValueError(
            f"token_ids: expected ids from 0 to {config.vocab_size - 1}, got "
            f"{kept.min()} to {kept.max()}"
        )
    return kept.astype(np.int32).reshape(count, window)
