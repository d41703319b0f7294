"""The subcommand `eval`: mean cross-entropy and perplexity of a model on a text."""

import pathlib
import time
from typing import Annotated

import typer
from jax.sharding import Mesh

from jax_nvfp4_moe.cli.options import (
    BackendOption,
    DispatchOption,
    DtypeOption,
    Folder,
    SchemesOption,
    each_once,
    number,
    read_text,
)
from jax_nvfp4_moe.cli.output import progress_bar, report, show, table, to_json
from jax_nvfp4_moe.cli.process_options import over_devices
from jax_nvfp4_moe.inference.evaluation import evaluate, summary_rows, window_rows
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.models.loading import load_model
from jax_nvfp4_moe.nn.explanation import find_plans
from jax_nvfp4_moe.quantization.layer_errors import check_original


@over_devices
def eval_command(
    *,
    devices: Mesh | str,
    path: Folder,
    text: Annotated[pathlib.Path, typer.Option(help="Text file to predict, in UTF-8.")],
    window: Annotated[
        int, number(help="Number of tokens in a window. Windows are independent.")
    ] = 512,
    skip_tokens: Annotated[
        int, number(help="Number of tokens to skip at the beginning of the text.", least=0)
    ] = 0,
    max_windows: Annotated[
        int | None, number(help="Largest number of windows; all by default.")
    ] = None,
    by_window: Annotated[
        bool, typer.Option("--by-window", help="Also report the figures of each window.")
    ] = False,
    original: Annotated[
        pathlib.Path | None,
        typer.Option(help="Unquantized checkpoint of the same model, to compare with."),
    ] = None,
    scheme: SchemesOption = None,
    dtype: DtypeOption = "float32",
    backend: BackendOption = None,
    dispatch: DispatchOption = "psum",
) -> None:
    """Print the mean cross-entropy and the perplexity on a text, as one JSON object per scheme.

    The default dtype is float32, as in the published figures of quantization tools. Figures that
    are not finite are null in JSON, and the exit status is 1.
    """
    how = {"dtype": dtype, "mesh": devices, "dispatch": dispatch}
    runs = [(path, {"scheme": one, "backend": backend, **how}) for one in each_once(scheme)]
    if original is not None:
        check_original(path, original)
        runs.insert(0, (original, how))
    ids = load_tokenizer(path).encode(read_text(text))
    windows = {"window": window, "skip_tokens": skip_tokens, "max_windows": max_windows}
    results = {}
    for folder, options in runs:
        used, result = _evaluate(folder, options, ids, windows)
        name = "original" if folder is original else options["scheme"] or used or "not quantized"
        results[name] = result
        shown = {"path": str(folder), "scheme": used, **result}
        hidden = () if by_window else ("cross_entropies", "perplexities")
        show(to_json({k: v for k, v in shown.items() if k not in hidden}))
    if by_window:
        report("\n".join(table(window_rows(results))))
    if len(results) > 1:
        report("\n".join(table(summary_rows(results))))


def _evaluate(folder, options, ids, windows):
    """Load a model, and return its schemes and the result of `evaluate`.

    The schemes are None if the model has no NVFP4 modules. The model is freed on return, so that
    only one model is in memory at a time.
    """
    model = load_model(folder, **options)
    used = sorted({str(plan.scheme) for _, plan in find_plans(model)})
    label = " and ".join(used)
    start = time.perf_counter()
    with progress_bar(f"windows, {label or folder.name}") as progress:
        result = evaluate(model, ids, **windows, by_window=True, progress=progress)
    tokens = result["windows"] * result["window"]
    report(f"{tokens} tokens, {tokens / (time.perf_counter() - start):.0f} tokens/s")
    return label or None, result
