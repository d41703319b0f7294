"""Measure the error that quantization causes in the experts of each layer.

Every layer gets the inputs of the unquantized model, so that its error does not include the errors
of the layers before it. Memory holds one model at a time. First a float32 model runs a text and
records what enters and leaves the routed experts of each layer. Then the experts of each scheme run
on those recorded inputs.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import printable
from jax_nvfp4_moe.figures import drawing
from jax_nvfp4_moe.inference.not_finite import warn_not_finite
from jax_nvfp4_moe.models.loading import abstract_model, load_model
from jax_nvfp4_moe.nn.experts.moe import expert_blocks, experts_path
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.numerics.tensor import MoEParams
from jax_nvfp4_moe.scheme import Scheme

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """The errors of one layer's routed experts in one scheme.

    In the equations, y is the output of the scheme and y0 the output of the float32 model.

    Attributes:
      module: the path of the block in the model, such as "layers.3.mlp".
      scheme: the name of the scheme.
      nrmse: ``|y - y0| / |y0|``, where the norms are over all tokens.
      rows: float64 ``[t]``, ``|y[t] - y0[t]| / |y0[t]|`` for each token. It is NaN if y0[t] is
        zero.
    """

    module: str
    scheme: str
    nrmse: float
    rows: np.ndarray

    @property
    def worst_row(self) -> int:
        """The index of the token with the largest error. It is 0 if no token has an error."""
        return int(np.argmax(np.nan_to_num(self.rows, nan=-1.0)))

    @property
    def worst(self) -> float:
        """The largest error of a token."""
        return float(self.rows[self.worst_row])


@dataclasses.dataclass(frozen=True)
class _Call:
    """What entered the experts of one layer and what left them, in host memory.

    Attributes:
      x: ``[t, h]``, the tokens.
      expert_ids: ``[t, k]``.
      expert_weights: ``[t, k]``.
      y: ``[t, h]``, the output.
    """

    x: np.ndarray
    expert_ids: np.ndarray
    expert_weights: np.ndarray
    y: np.ndarray


def available_schemes(path: str | pathlib.Path) -> tuple[str, ...]:
    """Return the schemes in which the experts of a checkpoint can run.

    They are "w4a16", and also "w4a4" if all NVFP4 experts have input scales. Only headers are read.

    Raises:
      CheckpointError: as for `load_model`.
      ValueError: no layer has NVFP4 experts.
    """
    model = abstract_model(path).model
    params = [module.experts.params.get_value() for _, module in expert_blocks(model)]
    quantized = [p for p in params if isinstance(p, MoEParams)]
    if not quantized:
        raise ValueError(
            "path: expected a checkpoint with NVFP4 experts, whose errors can be measured; "
            f"{printable(path)} has none"
        )
    if all(p.has_input_scales for p in quantized):
        return str(Scheme.W4A16), str(Scheme.W4A4)
    return (str(Scheme.W4A16),)


def measure_errors(
    path: str | pathlib.Path,
    token_ids: Sequence[int] | np.ndarray,
    *,
    original: str | pathlib.Path | None = None,
    schemes: Iterable[str] | None = None,
    dtype: Any = jnp.bfloat16,
    backend: str | None = None,
    progress: Callable[[str], contextlib.AbstractContextManager[Progress | None]] | None = None,
) -> list[LayerErrors]:
    """Compare the routed experts of each layer with those of a float32 model, on the same inputs.

    Args:
      path: the folder of an NVFP4 checkpoint.
      token_ids: int ``[t]``, one text from its beginning.
      original: the folder of the model before quantization. Its weights, routing and activations
        are the truth, so that the errors include the rounding of weights. With None, the
        dequantized weights of `path` are the truth. The errors are then only those of rounding
        activations, and of the kernel.
      schemes: the schemes to measure, as for `load_model`. None takes `available_schemes`.
      dtype: the dtype of the quantized models, as for `load_model`.
      backend: the backend of the quantized models, as for `load_model`.
      progress: called with a label. It returns a context manager whose value, if it is not None, is
        called with the number of finished layers and their total.

    Returns:
      The errors of each scheme, layer by layer. Layers without NVFP4 experts are left out. A
      warning of the logger "jax_nvfp4_moe" says if errors are not finite.

    Raises:
      CheckpointError: as for `load_model`.
      ValueError: a token id is out of range, no layer has NVFP4 experts, or `original` has other
        sizes than `path`.
    """
    available = available_schemes(path)  # raises ValueError if there are no NVFP4 experts
    schemes = available if schemes is None else tuple(schemes)
    if original is not None:
        check_original(path, original)
    truth = load_model(
        path if original is None else original,
        scheme=Scheme.W4A16 if original is None else None,
        dtype=jnp.float32,
        backend="reference",
    )
    calls = _record(truth, _check_ids(truth.config, token_ids))
    del truth
    errors = [
        error
        for scheme in schemes
        for error in _measure(path, scheme, calls, dtype, backend, progress)
    ]
    wrong = [error for error in errors if not math.isfinite(error.nrmse)]
    if wrong:
        warn_not_finite(
            "%d of %d errors are not finite, the first of which is that of %s with scheme %s",
            len(wrong),
            len(errors),
            wrong[0].module,
            wrong[0].scheme,
        )
    return errors


def _measure(path, scheme, calls, dtype, backend, progress) -> Iterator[LayerErrors]:
    """Load the model in one scheme, and yield the errors of its layers on the recorded calls."""
    model = load_model(path, scheme=scheme, dtype=dtype, backend=backend)
    blocks = [(name, block) for name, block in expert_blocks(model) if block.experts.scheme]
    with contextlib.nullcontext() if progress is None else progress(f"layers, {scheme}") as advance:
        for done, (name, block) in enumerate(blocks, 1):
            call = calls[name]
            y = block.experts(jnp.asarray(call.x), call.expert_ids, call.expert_weights)
            yield _compare(name, scheme, np.asarray(y.astype(jnp.float32)), call.y)
            if advance is not None:
                advance(done, len(blocks))


def _compare(name, scheme, y, truth) -> LayerErrors:
    """Return the errors of one layer: `y` beside `truth`, the output of the float32 model."""
    y, truth = y.astype(np.float64), truth.astype(np.float64)
    off, size = (np.linalg.norm(rows, axis=-1) for rows in (y - truth, truth))
    rows = np.where(size > 0, off / np.where(size > 0, size, 1.0), np.nan)
    total = np.linalg.norm(size)
    return LayerErrors(name, scheme, float(np.linalg.norm(off) / total if total else 0.0), rows)


def _record(model, ids: np.ndarray) -> dict[str, _Call]:
    """Run ``ids [t]`` through a model, and return the calls of its expert blocks."""
    return {
        name: _Call(*(np.asarray(array).reshape(-1, array.shape[-1]) for array in entered))
        for name, entered in _run_recorded(model, jnp.asarray(ids)[None, :]).items()
    }


@jax.jit
def _run_recorded(model, ids):
    """Return what enters and leaves the routed experts of each block."""
    with capture(model) as seen:
        model(ids)
    calls = {}
    for name, _ in expert_blocks(model):
        (calls[name],) = seen[experts_path(name)]
    return calls


def _sizes(path) -> dict[str, tuple[int, ...]]:
    """Return the sizes in which two checkpoints of one model agree. Only headers are read."""
    model = abstract_model(path).model
    found: dict[str, tuple[int, ...]] = {}
    found["vocabulary, hidden"] = model.config.vocab_size, model.config.hidden
    for name, block in expert_blocks(model):
        params = block.experts.params.get_value()
        found[f"experts of {name}"] = (params.num_experts, params.hidden, params.intermediate)
    return found


def check_original(path: str | pathlib.Path, original: str | pathlib.Path) -> None:
    """Check by their sizes that two checkpoints are of the same model. Only headers are read.

    Raises:
      CheckpointError: as for `load_model`.
      ValueError: the vocabularies, the hidden sizes or the experts differ.
    """
    sizes, others = _sizes(path), _sizes(original)
    for name in sorted(sizes.keys() | others.keys()):
        if sizes.get(name) != others.get(name):
            raise ValueError(
                f"original: expected the model from which {printable(path)} was quantized; "
                f"{name}: expected {sizes.get(name, 'none')}, got {others.get(name, 'none')}"
            )


def _check_ids(config, token_ids) -> np.ndarray:
    """Return token ids as int32 ``[t]`` after checking them against the model's sizes."""
    ids = np.asarray(token_ids)
    limit, vocabulary = config.max_positions, config.vocab_size
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not 1 <= len(ids) <= limit:
        raise ValueError(
            f"token_ids: expected 1 to {limit} integers [t], got {ids.dtype} {ids.shape}"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(
            f"token_ids: expected ids from 0 to {vocabulary - 1}, got {ids.min()} to {ids.max()}"
        )
    return ids.astype(np.int32)


def error_rows(
    errors: Sequence[LayerErrors], tokens: Sequence[str] | None = None
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table: the names of its columns, one row per layer, and two of summaries.

    Args:
      errors: the result of `measure_errors`.
      tokens: the text of each token. None leaves the texts out.
    """
    schemes = list(dict.fromkeys(error.scheme for error in errors))
    yield "experts", *(f"{s} {of}" for s in schemes for of in ("NRMSE", "worst", "at token"))
    layers: dict[str, dict[str, LayerErrors]] = {}
    for error in errors:
        layers.setdefault(error.module, {})[error.scheme] = error
    for module, found in layers.items():
        yield module, *(cell for s in schemes for cell in _cells(found[s], tokens))
    for of, name in ((np.mean, "mean"), (np.max, "largest")):
        cells = []
        for scheme in schemes:
            some = [error for error in errors if error.scheme == scheme]
            cells += [
                f"{of([e.nrmse for e in some]):.2e}",
                f"{of([e.worst for e in some]):.2e}",
                "",
            ]
        yield name, *cells


def _cells(error, tokens):
    """Return the cells of one layer and one scheme."""
    at = error.worst_row
    said = "" if tokens is None else f" {tokens[at]!r}"
    return f"{error.nrmse:.2e}", f"{error.worst:.2e}", f"{at}{said}"


def error_report(errors: Sequence[LayerErrors]) -> list[dict[str, Any]]:
    """Return the result of `measure_errors` as values for JSON, with None in place of NaN."""
    return [
        {
            "module": error.module,
            "scheme": error.scheme,
            "nrmse": _number(error.nrmse),
            "worst": _number(error.worst),
            "worst_row": error.worst_row,
            "rows": [_number(row) for row in error.rows.tolist()],
        }
        for error in errors
    ]


def _number(value):
    return value if math.isfinite(value) else None


def plot_errors(errors: Sequence[LayerErrors], path: str | pathlib.Path, *, truth: str) -> None:
    """Draw the errors by layer, and their distribution over tokens, and save the picture.

    Args:
      errors: the result of `measure_errors`.
      path: the file to write. Its suffix gives the format, such as ".png" or ".svg".
      truth: what the errors are measured against, for the title.

    Raises:
      ValueError: matplotlib is not installed, or cannot write this kind of file; or the folder
        of `path` does not exist.
    """
    with drawing(path, (10, 4.8)) as figure:
        _draw_errors(figure, errors, truth)


def _draw_errors(figure, errors, truth):
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    for index, scheme in enumerate(dict.fromkeys(error.scheme for error in errors)):
        some = [error for error in errors if error.scheme == scheme]
        _draw_scheme(left, right, some, f"C{index}", scheme)
    modules = list(dict.fromkeys(error.module for error in errors))
    step = -(-len(modules) // 12)
    left.set_xticks(range(0, len(modules), step), modules[::step], rotation=45, ha="right")
    left.set_yscale("log")
    left.set_ylabel("relative error of the experts' output")
    left.set_title("by layer: all tokens together, and their spread")
    left.legend(fontsize="small")
    right.set_xlabel("share of tokens with at most this error")
    right.set_title("by token, in all layers")
    for axes in (left, right):
        axes.grid(True, which="both", alpha=0.2)
    figure.suptitle(f"Error of routed experts against {truth}, each layer on the same inputs")


def _draw_scheme(left, right, errors, color, scheme):
    """Draw one scheme.

    The left axes show for each layer the NRMSE, the worst token, and the range of the middle half
    of the tokens. The right axes show all tokens, sorted by error.
    """
    at = range(len(errors))
    rows = [error.rows[np.isfinite(error.rows)] for error in errors]
    low, high = ([np.quantile(r, q) if len(r) else np.nan for r in rows] for q in (0.25, 0.75))
    worst = [error.worst for error in errors]
    left.fill_between(at, low, high, color=color, alpha=0.2, label=f"{scheme}: half of the tokens")
    left.plot(at, [e.nrmse for e in errors], "o-", color=color, label=f"{scheme}: NRMSE")
    left.plot(at, worst, "v", color=color, mfc="none", label=f"{scheme}: worst token")
    every = np.sort(np.concatenate(rows))
    share = np.arange(1, len(every) + 1) / len(every)
    right.plot(share, every, color=color, label=scheme)
    for quantile, away, side in ((0.5, (6, -12), "left"), (0.99, (-8, 2), "right")):
        value = float(np.quantile(every, quantile)) if len(every) else math.nan
        said = f"{quantile:.0%}: {value:.2g}"
        right.plot([quantile], [value], "o", color=color, markersize=4)
        right.annotate(
            said, (quantile, value), away, textcoords="offset points", ha=side, color=color,
            fontsize="small",
        )  # fmt: skip
