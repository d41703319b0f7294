"""The subcommand `inspect`: show what a checkpoint contains, or the errors of each scheme."""

import importlib.resources
import logging
import pathlib
from typing import Annotated

import numpy as np
import typer

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, printable
from jax_nvfp4_moe.checkpoint.folder import expand_home, find_folder
from jax_nvfp4_moe.cli.escaping import escape_line
from jax_nvfp4_moe.cli.inspection import any_layer, bytes_report, describe, measure_bytes
from jax_nvfp4_moe.cli.options import (
    BackendOption,
    DtypeOption,
    Folder,
    SchemesOption,
    each_once,
    number,
    read_text,
)
from jax_nvfp4_moe.cli.output import progress_bar, say, show, table, to_json
from jax_nvfp4_moe.cli.pictures import chart_size, draw_bytes
from jax_nvfp4_moe.figures import check_plot, drawing
from jax_nvfp4_moe.inference.tokenizer import has_tokenizer, load_tokenizer
from jax_nvfp4_moe.models.loading import abstract_model
from jax_nvfp4_moe.quantization.layer_errors import (
    error_report,
    error_rows,
    measure_errors,
    plot_errors,
)


def inspect_command(
    path: Folder,
    errors: Annotated[
        bool,
        typer.Option(
            "--errors", help="Measure instead the error of the routed experts in each layer."
        ),
    ] = False,
    original: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Unquantized checkpoint to measure errors against; by default the dequantized "
            "weights."
        ),
    ] = None,
    text: Annotated[
        pathlib.Path | None,
        typer.Option(help="Text file to run, in UTF-8; some Python source code by default."),
    ] = None,
    tokens: Annotated[int, number(help="Largest number of tokens of the text to run.")] = 256,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: modules and bytes, or errors by token.")
    ] = False,
    plot: Annotated[
        pathlib.Path | None,
        typer.Option(help="Also draw bytes by module and format, or errors, to this file."),
    ] = None,
    scheme: SchemesOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
) -> None:
    """Show the layers of a checkpoint with format, size, scheme and backend.

    For each kind of device, the output says which scheme and backend a layer gets, and why. If the
    checkpoint is refused, standard error says why, and the exit status is 2.

    With --errors: measure how much each scheme changes the output of the routed experts in each
    layer. All schemes get the same inputs. The schemes are those of --scheme; by default w4a16, and
    w4a4 if the checkpoint has input scales.
    """
    logging.getLogger("jax_nvfp4_moe").setLevel(logging.WARNING)  # the log would repeat the table
    if plot is not None:
        check_plot(plot)  # a wrong file name must not fail only after minutes of work
    if not errors:
        _only_with_errors(original=original, text=text, backend=backend)
        only, *others = each_once(scheme)
        if others:
            raise ValueError(
                f"--scheme: expected at most one without --errors, got {only}, {others[0]}"
            )
        try:
            load = abstract_model(path, scheme=only, dtype=dtype)
        except CheckpointError as error:
            raise _each_kind_once(error) from error
        _show(path, load, as_json, plot)
        return
    ids, words = _sample(path, text, tokens)
    found = measure_errors(
        path,
        ids,
        original=original,
        schemes=dict.fromkeys(scheme) if scheme else None,
        dtype=dtype,
        backend=backend,
        progress=progress_bar,
    )
    truth = "its dequantized weights" if original is None else expand_home(original).resolve().name
    if plot is not None:
        plot_errors(found, plot, truth=truth)
        say(f"wrote {printable(plot)}")
    if as_json:
        show(to_json({"truth": truth, "tokens": len(ids), "errors": error_report(found)}))
        return
    title = f"errors of routed experts against {truth}, in float32, on {len(ids)} tokens"
    show("\n".join([escape_line(title), "", *table(error_rows(found, words))]))


def _show(path, load, as_json, plot) -> None:
    """Print what a checkpoint contains, and draw it if the user asks for a picture."""
    if plot is not None:
        modules = measure_bytes(load.model)
        with drawing(plot, chart_size(modules)) as figure:
            folder = expand_home(path)
            draw_bytes(figure, modules, folder.resolve().name if folder.is_dir() else str(path))
        say(f"wrote {printable(plot)}")
    show(to_json(bytes_report(path, load)) if as_json else describe(path, load))


def _only_with_errors(**options):
    """Raise `ValueError` if any of these options has a value: they need --errors."""
    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)}: expected together with --errors; add --errors")


def _sample(path, text, tokens) -> tuple[np.ndarray, list[str] | None]:
    """Return the first tokens of a text, and the text of each token.

    If the checkpoint has no tokenizer and the user gives no text, the tokens are random, and None
    stands for their text.
    """
    if text is None and not has_tokenizer(find_folder(path)):
        say(f"{printable(path)} has no tokenizer; the text is {tokens} random token ids")
        size = abstract_model(path).model.config.vocab_size
        return np.random.default_rng(0).integers(0, size, tokens), None
    tokenizer = load_tokenizer(path)
    if text is None:  # a file of this package, which always exists
        source = importlib.resources.files("jax_nvfp4_moe") / "numerics" / "nvfp4.py"
        said = source.read_text(encoding="utf-8")
    else:
        said = read_text(text)
    ids = tokenizer.encode(said)[:tokens]
    return ids, [tokenizer.decode([token]) for token in ids]


def _each_kind_once(error: CheckpointError) -> CheckpointError:
    """Return an error with one sentence for problems that differ in numbers of layers alone."""
    problems = dict.fromkeys(map(any_layer, error.problems))
    return CheckpointError(list(problems), error.where)
