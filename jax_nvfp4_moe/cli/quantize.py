"""The subcommand `quantize`: an unquantized checkpoint becomes one in NVFP4."""

import json
import pathlib
from typing import Annotated

import typer

from jax_nvfp4_moe.cli.options import read_text
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.quantization.pipeline import quantize_model


def quantize_command(
    source: Annotated[
        pathlib.Path, typer.Argument(help="Folder or Hub name of an unquantized checkpoint.")
    ],
    destination: Annotated[pathlib.Path, typer.Argument(help="Folder to write; new or empty.")],
    text: Annotated[
        pathlib.Path | None, typer.Option(help="Calibration text, UTF-8; w4a4 needs one.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Leading tokens that are used.")] = 4096,
    window: Annotated[int, typer.Option(help="Tokens in a window, each on its own.")] = 512,
    scheme: Annotated[
        str | None, typer.Option(help="w4a4 or w4a16; w4a4 where there is a text.")
    ] = None,
    format: Annotated[str, typer.Option(help="modelopt or compressed-tensors.")] = "modelopt",
    modules: Annotated[str, typer.Option(help="all or experts.")] = "all",
    exclude: Annotated[
        list[str] | None, typer.Option(help="Module to leave alone; wildcards; repeatable.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="max, search, four_or_six, ...")] = "max",
    dtype: Annotated[
        str | None, typer.Option(help="Of what is not quantized; as it is by default.")
    ] = None,
    shard_gb: Annotated[float, typer.Option(help="Largest file in GB.")] = 5.0,
) -> None:
    """Quantize a checkpoint to NVFP4; print what was done as one JSON object."""
    ids = None
    if text is not None:
        ids = load_tokenizer(source).encode(read_text(text))
        if not 1 <= calibration_tokens <= len(ids):
            raise ValueError(
                f"calibration_tokens: expected 1 to {len(ids)}, the tokens of {text}; got "
                f"{calibration_tokens}"
            )
        ids = ids[:calibration_tokens]
    result = quantize_model(
        source,
        destination,
        token_ids=ids,
        scheme=scheme,
        format=format,
        modules=modules,  # type: ignore[arg-type] - checked there
        exclude=exclude or (),
        algorithm=algorithm,
        window=window,
        dtype=dtype,
        shard_bytes=int(min(max(shard_gb, 0.0), 1e9) * 1e9),
    )
    print(json.dumps(result))
