"""The subcommand `lm-eval`: lm-evaluation-harness on one of our models."""

import sys
from typing import Annotated

import typer

from jax_nvfp4_moe.cli.options import BackendOption, DispatchOption, Folder, SchemeOption

# Options that we do not know go to the harness as they are.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def lm_eval_command(
    context: typer.Context,
    path: Folder,
    scheme: SchemeOption = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "float32",
    backend: BackendOption = None,
    mesh: Annotated[
        str | None, typer.Option(help="How to share out the devices: expert=8,tensor=2.")
    ] = None,
    dispatch: DispatchOption = "psum",
    max_length: Annotated[
        int | None, typer.Option(help="Tokens that the model sees; 2048, or what it has.")
    ] = None,
) -> None:
    """Run tasks of lm-evaluation-harness: lm-eval PATH --tasks NAME ...

    All other options are those of the harness's own command, such as --tasks, --limit,
    --num_fewshot, --include_path and --output_path. Needs the extra "eval".
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        from jax_nvfp4_moe.inference.harness import NAME
    except ModuleNotFoundError as error:
        raise ValueError(
            f"lm-eval needs lm-evaluation-harness ({error}): install it with "
            'pip install "jax-nvfp4-moe[eval]"'
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
