"""The subcommand `lm-eval`: run lm-evaluation-harness on one of our models."""

import pathlib
import sys
import traceback
from typing import Annotated

import typer

from jax_nvfp4_moe.cli.options import (
    BackendOption,
    DispatchOption,
    DraftOption,
    DraftTokensOption,
    DtypeOption,
    Folder,
    SchemeOption,
    number,
    read_drafting,
)
from jax_nvfp4_moe.parallel.automatic_mesh import AUTO

_PACKAGE = pathlib.Path(__file__).parents[1]
# Settings that make Typer keep unknown options, which are then passed on to the harness.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def lm_eval_command(
    context: typer.Context,
    path: Folder,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "float32",
    backend: BackendOption = None,
    mesh: Annotated[
        str,
        typer.Option(
            help="Sizes of the mesh axes, such as expert=8,tensor=2, or auto for the fewest "
            "devices that have room for the weights."
        ),
    ] = AUTO,
    dispatch: DispatchOption = "psum",
    draft: DraftOption = None,
    draft_tokens: DraftTokensOption = "auto",
    max_length: Annotated[
        int | None,
        number(
            help="Largest number of tokens that the model sees; by default, the positions of the "
            "model."
        ),
    ] = None,
    add_bos_token: Annotated[
        bool | None,
        typer.Option(
            "--add-bos-token/--no-add-bos-token",
            help="Begin each text with bos_token exactly once, or never. By default, texts begin "
            "as the tokenizer begins them.",
        ),
    ] = None,
) -> None:
    """Run tasks of lm-evaluation-harness: lm-eval PATH --tasks NAME ...

    All other options are passed on to the command of the harness, such as --tasks, --limit,
    --num_fewshot, --apply_chat_template, --system_instruction, --fewshot_as_multiturn,
    --gen_kwargs, --batch_size, --include_path and --output_path. This command needs the extra
    "eval".

    The exit status is 2 if the harness does not accept its options, for example because a task is
    not there, and 1 if scores are not finite.
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
        **read_drafting(draft, draft_tokens),
        "max_length": max_length,
        "add_bos_token": add_bos_token,
    }
    arguments = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    # The harness takes batches of one text if its command does not name a size.
    how = ["--batch_size", "auto", "--model_args", *arguments]
    sys.argv = ["lm-eval", "run", "--model", NAME, *how, *context.args]
    try:
        cli_evaluate()
    except Exception as error:
        if not _is_of_the_harness(error):
            raise
        said = " ".join(str(error).split()) or "no message"
        raise ValueError(f"lm-evaluation-harness: {type(error).__name__}: {said}") from error


def _is_of_the_harness(error: Exception) -> bool:
    """Return whether an error comes from the harness and its libraries, and not from our model.

    Their errors are about options, tasks and data sets, which the user can correct.
    """
    _, *frames = traceback.extract_tb(error.__traceback__)  # the first one is this module
    ours = any(pathlib.Path(frame.filename).is_relative_to(_PACKAGE) for frame in frames)
    return not ours and not isinstance(error, BrokenPipeError)
