"""The subcommand `quantize`: convert an unquantized checkpoint to NVFP4."""

import contextlib
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from jax_nvfp4_moe.cli.options import number, read_text
from jax_nvfp4_moe.cli.output import show, to_json
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.quantization.casting import cast_model
from jax_nvfp4_moe.quantization.pipeline import quantize_model

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def quantize_command(
    source: Annotated[
        pathlib.Path, typer.Argument(help="Folder or Hub name of an unquantized checkpoint.")
    ],
    destination: Annotated[
        pathlib.Path, typer.Argument(help="Folder to write; it must be new or empty.")
    ],
    text: Annotated[
        pathlib.Path | None,
        typer.Option(help="Text file for calibration, in UTF-8. Scheme w4a4 needs one."),
    ] = None,
    calibration_tokens: Annotated[
        int, number(help="Number of tokens at the beginning of the text to calibrate with.")
    ] = 4096,
    window: Annotated[
        int, number(help="Number of tokens in a window. Windows are independent.")
    ] = 512,
    scheme: Annotated[
        str | None,
        typer.Option(help="Scheme to write: w4a4 or w4a16. By default w4a4 if there is a text."),
    ] = None,
    format: Annotated[
        str, typer.Option(help="Checkpoint format to write: modelopt or compressed-tensors.")
    ] = "modelopt",
    modules: Annotated[
        str, typer.Option(help="Modules to quantize: all (linear layers and experts) or experts.")
    ] = "all",
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Module to leave unquantized. May have wildcards, and be repeated."),
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(help="How to choose scales: max, search, weighted_search or four_or_six."),
    ] = "max",
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of float tensors that are not quantized; unchanged by default."),
    ] = None,
    shard_gb: Annotated[
        float, number(help="Largest size of a file, in GB.", least=0, most=1e9, above=0)
    ] = 5.0,
    cast: Annotated[
        bool,
        typer.Option("--cast", help="Cast experts in MXFP4 without loss, as in gpt-oss."),
    ] = False,
) -> None:
    """Quantize a checkpoint to NVFP4, and print a summary as one JSON object."""
    shard_bytes = max(1, int(shard_gb * 1e9))
    if cast:
        _check_cast(text, scheme, format, modules, exclude, algorithm, dtype)
        with _cleaning_up():
            result = cast_model(source, destination, shard_bytes=shard_bytes)
        show(to_json(result))
        return
    ids = None
    if text is not None:
        ids = load_tokenizer(source).encode(read_text(text))
        if not 1 <= calibration_tokens <= len(ids):
            raise ValueError(
                f"calibration_tokens: expected 1 to {len(ids)}, the number of tokens in {text}; "
                f"got {calibration_tokens}"
            )
        ids = ids[:calibration_tokens]
    with _cleaning_up():
        result = quantize_model(
            source,
            destination,
            token_ids=ids,
            scheme=scheme,
            format=format,
            modules=modules,  # type: ignore[arg-type] - `quantize_model` checks the value
            exclude=exclude or (),
            algorithm=algorithm,
            window=window,
            dtype=dtype,
            shard_bytes=shard_bytes,
        )
    show(to_json(result))


def _check_cast(text, scheme, format, modules, exclude, algorithm, dtype):
    """Check that no option asks for what a cast does not do."""
    given = {
        "--text": text is not None,
        "--scheme": scheme not in (None, "w4a16"),
        "--format": format != "modelopt",
        "--modules": modules != "all",
        "--exclude": bool(exclude),
        "--algorithm": algorithm != "max",
        "--dtype": dtype is not None,
    }
    if any(given.values()):
        names = ", ".join(name for name, there in given.items() if there)
        raise ValueError(
            f"{names}: expected no such option with --cast, which changes no number and writes "
            "ModelOpt's format with scheme w4a16. Leave out --cast or the others"
        )


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that the block deletes what is incomplete.

    By default, these signals end a process at once. The exit status is 128 plus the signal's
    number, as a shell reports it.
    """

    def leave(number, frame):
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
