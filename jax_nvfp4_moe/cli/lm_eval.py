"""The subcommand `lm-eval`: run lm-evaluation-harness on one of our models."""

import sys
from typing import Annotated

import typer

from jax_nvfp4_moe.cli.options import (
    BackendOption,
    DispatchOption,
    DtypeOption,
    Folder,
    SchemeOption,
)

# Settings that make Typer keep unknown options, which are then passed on to the harness.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def lm_eval_command(
    context: typer.Context,
    path: Folder,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "float32",
    backend: BackendOption = None,
    mesh: Annotated[
        str | None, typer.Option(help="Sizes of the mesh axes, such as expert=8,tensor=2.")
    ] = None,
    dispatch: DispatchOption = "psum",
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Largest number of tokens that the model sees; by default 2048, or fewer if the "
            "model has fewer positions."
        ),
    ] = None,
) -> None:
    """Run tasks of lm-evaluation-harness: lm-eval PATH --tasks NAME ...

    All other options are passed on to the command of the harness, such as --tasks, --limit,
    --num_fewshot, --include_path and --output_path. This command needs the extra "eval".
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        from jax_nvfp4_moe.inference.harness import NAME
    except ModuleNotFoundError as error:
        raise ValueError(
            f"lm-eval needs lm-evaluation-harness, which is not installed ({error}). Install it "
            'with: pip install "jax-nvfp4-moe[eval]"'
        ) from None
    given = {
        "path": str(path),
        "scheme": scheme,
        "dtype": dtype,
        "kernel": backend,
        "mesh": mesh,
        "dispatch": dispatch,
        "max_length": max_length,
    }
    arguments = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    sys.argv = ["lm-eval", "run", "--model", NAME, "--model_args", *arguments, *context.args]
    cli_evaluate()
