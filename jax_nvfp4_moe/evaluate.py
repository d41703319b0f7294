"""Quality in one number: the mean cross-entropy of a model on a text."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_BATCH = 4  # windows that go through the model together


def evaluate(
    model: Callable,
    token_ids,
    *,
    window: int = 512,
    skip_tokens: int = 0,
    max_windows: int | None = None,
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
      progress: called with the windows done and their total.

    Returns:
      ``mean_cross_entropy``, ``windows``, ``window``, ``skip_tokens`` and ``predicted_tokens``.

    Raises:
      ValueError: an argument is out of range, or no whole window is left.
    """
    windows = _windows(model, token_ids, window, skip_tokens, max_windows)
    total = 0.0
    for done, batch in _batches(windows):
        losses = np.asarray(_losses(model, batch), np.float64)
        total += losses[: len(windows) - done].sum()
        if progress is not None:
            progress(min(done + len(batch), len(windows)), len(windows))
    predicted = len(windows) * (window - 1)
    return {
        "mean_cross_entropy": float(total / predicted),
        "windows": len(windows),
        "window": window,
        "skip_tokens": skip_tokens,
        "predicted_tokens": predicted,
    }


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


def _windows(model, token_ids, window, skip_tokens, max_windows):
    """Check the arguments; return int32 ``[windows, window]``."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_ids: expected integers [n], got {ids.dtype} {ids.shape}")
    limit = model.config.max_positions
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
    if kept.min() < 0 or kept.max() >= model.config.vocab_size:
        raise ValueError(
            f"token_ids: expected ids from 0 to {model.config.vocab_size - 1}, got "
            f"{kept.min()} to {kept.max()}"
        )
    return kept.astype(np.int32).reshape(count, window)
