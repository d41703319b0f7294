"""Errors layer by layer: what rounding costs each layer's experts, on the inputs that it meets.

One model at a time is in memory. The first runs a text and keeps what enters and leaves the routed
experts of each layer; then each scheme's experts get those same inputs, so that no layer answers
for the layers before it.
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

from jax_nvfp4_moe.checkpoint.folder import expand_home
from jax_nvfp4_moe.models.blocks import expert_blocks, experts_path
from jax_nvfp4_moe.models.loading import abstract_model, load_model
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.numerics.tensor import MoEParams
from jax_nvfp4_moe.scheme import Scheme

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """Errors of one layer's routed experts in one scheme, y of the scheme beside y0 of the truth.

    Attributes:
      module: path of the block in the model, such as "layers.3.mlp".
      scheme: name of the scheme.
      nrmse: ``|y - y0| / |y0|``, norms over all rows.
      rows: ``|y[t] - y0[t]| / |y0[t]|`` of each token, float64 ``[t]``; NaN where y0[t] is zero.
    """

    module: str
    scheme: str
    nrmse: float
    rows: np.ndarray

    @property
    def worst_row(self) -> int:
        """Index of the token of largest error; 0 where none has one."""
        return int(np.argmax(np.nan_to_num(self.rows, nan=-1.0)))

    @property
    def worst(self) -> float:
        """Error of that token."""
        return float(self.rows[self.worst_row])


@dataclasses.dataclass(frozen=True)
class _Call:
    """What entered the experts of one layer and what left them, in host memory."""

    x: np.ndarray
    expert_ids: np.ndarray
    expert_weights: np.ndarray
    y: np.ndarray


def available_schemes(path: str | pathlib.Path) -> tuple[str, ...]:
    """Return "w4a16", and "w4a4" where all NVFP4 experts of a checkpoint have input scales.

    Raises:
      CheckpointError: as `load_model`; headers alone are read.
      ValueError: no layer has NVFP4 experts.
    """
    model = abstract_model(path).model
    params = [module.experts.params.get_value() for _, module in expert_blocks(model)]
    quantized = [p for p in params if isinstance(p, MoEParams)]
    if not quantized:
        raise ValueError(f"path: {path} has no layer of NVFP4 experts, of which errors are taken")
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
    """Compare each layer's routed experts with those of a model in float32, on the same inputs.

    Args:
      path: folder of an NVFP4 checkpoint.
      token_ids: integers ``[t]``, one text from its beginning.
      original: folder of the model before quantization: its weights, routing and activations are
        the truth. None takes the weights of `path`, dequantized: what is left is the rounding of
        activations, and the kernel's.
      schemes: as for `load_model`; None for `available_schemes`.
      dtype, backend: of what is compared, as for `load_model`.
      progress: called with a name, gives a context whose value takes layers done and their total.

    Returns:
      Errors of each scheme, layer by layer. Layers without NVFP4 experts are left out.

    Raises:
      CheckpointError: as `load_model`.
      ValueError: token ids are out of range, no layer has NVFP4 experts, or `original` has other
        layers than `path`.
    """
    available = available_schemes(path)  # also refuses what has no NVFP4 experts
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
    return [
        error
        for scheme in schemes
        for error in _measure(path, scheme, calls, dtype, backend, progress)
    ]


def _measure(path, scheme, calls, dtype, backend, progress) -> Iterator[LayerErrors]:
    """Load the model in one scheme and run the recorded calls of its NVFP4 layers."""
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
    y, truth = y.astype(np.float64), truth.astype(np.float64)
    off, size = (np.linalg.norm(rows, axis=-1) for rows in (y - truth, truth))
    rows = np.where(size > 0, off / np.where(size > 0, size, 1.0), np.nan)
    total = np.linalg.norm(size)
    return LayerErrors(name, scheme, float(np.linalg.norm(off) / total if total else 0.0), rows)


def _record(model, ids: np.ndarray) -> dict[str, _Call]:
    """Run ``ids [t]``, and return what the expert blocks were called with."""
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
    """Return what two checkpoints of one model have in common, from headers alone."""
    model = abstract_model(path).model
    found: dict[str, tuple[int, ...]] = {}
    found["vocabulary, hidden"] = model.config.vocab_size, model.config.hidden
    for name, block in expert_blocks(model):
        params = block.experts.params.get_value()
        found[f"experts of {name}"] = (params.num_experts, params.hidden, params.intermediate)
    return found


def check_original(path: str | pathlib.Path, original: str | pathlib.Path) -> None:
    """Check that two checkpoints are of one model, by sizes; headers alone are read.

    Raises:
      CheckpointError: as `load_model`.
      ValueError: vocabularies, widths or experts differ.
    """
    sizes, others = _sizes(path), _sizes(original)
    for name in sorted(sizes.keys() | others.keys()):
        if sizes.get(name) != others.get(name):
            raise ValueError(
                f"original: expected the model that {path} was made of; {name}: "
                f"{others.get(name, 'none')} instead of {sizes.get(name, 'none')}"
            )


def _check_ids(config, token_ids) -> np.ndarray:
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
    """Return a table: one row for each layer, with the figures of all schemes side by side.

    Args:
      errors: as `measure_errors` returns.
      tokens: the text of each token, or None.
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
    at = error.worst_row
    said = "" if tokens is None else f" {tokens[at]!r}"
    return f"{error.nrmse:.2e}", f"{error.worst:.2e}", f"{at}{said}"


def error_report(errors: Sequence[LayerErrors]) -> list[dict[str, Any]]:
    """Return what `measure_errors` found as values for JSON; NaN as None."""
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
    """Draw errors by layer, and how they spread over tokens, into a picture.

    Args:
      errors: as `measure_errors` returns.
      path: file to write; its ending says the kind, such as ".png" or ".svg".
      truth: what `errors` are measured against, for the title.

    Raises:
      ValueError: as `check_plot`.
    """
    check_plot(path)
    path = expand_home(path)
    figure = _matplotlib()(figsize=(10, 4.8), layout="constrained")
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
    figure.savefig(path, dpi=150)


def _draw_scheme(left, right, errors, color, scheme):
    """Draw one scheme: NRMSE, the worst token and the middle half by layer; all tokens sorted."""
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
        said = f"{quantile:.0%}: {value:.1e}"
        right.plot([quantile], [value], "o", color=color, markersize=4)
        right.annotate(
            said, (quantile, value), away, textcoords="offset points", ha=side, color=color,
            fontsize="small",
        )  # fmt: skip


def check_plot(path: str | pathlib.Path) -> None:
    """Check that `plot_errors` can write `path`.

    Raises:
      ValueError: matplotlib is not installed, or knows no such kind of file; or no such folder.
    """
    kinds = _matplotlib()().canvas.get_supported_filetypes()
    path = expand_home(path)
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(f"plot: expected a name ending in .{' or .'.join(kinds)}; got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"plot: expected a folder that exists; got {path.parent}")


def _matplotlib():
    try:
        from matplotlib.figure import Figure  # on demand: optional, and slow to import
    except ImportError as error:
        raise ValueError(
            "plot: matplotlib is not installed; pip install 'jax-nvfp4-moe[plot]'"
        ) from error
    return Figure
