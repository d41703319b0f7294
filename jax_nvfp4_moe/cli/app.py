"""The command ``jax-nvfp4-moe``.

Commands print results on standard output, and messages and progress on standard error.
"""

import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

import jax_nvfp4_moe
from jax_nvfp4_moe.cli.bench import bench_command
from jax_nvfp4_moe.cli.chat import chat_command
from jax_nvfp4_moe.cli.env import env_command
from jax_nvfp4_moe.cli.errors import reporting_errors
from jax_nvfp4_moe.cli.escaping import EscapingFormatter
from jax_nvfp4_moe.cli.eval import eval_command
from jax_nvfp4_moe.cli.generate import generate_command
from jax_nvfp4_moe.cli.inspect import inspect_command
from jax_nvfp4_moe.cli.lm_eval import CONTEXT, lm_eval_command
from jax_nvfp4_moe.cli.output import drop_output, say, say_traceback, show
from jax_nvfp4_moe.cli.quantize import quantize_command
from jax_nvfp4_moe.interrupts import restore_interrupts
from jax_nvfp4_moe.parallel import processes as distributed

NAME = "jax-nvfp4-moe"
COMMANDS = {
    "inspect": inspect_command,
    "generate": generate_command,
    "chat": chat_command,
    "eval": eval_command,
    "lm-eval": lm_eval_command,
    "quantize": quantize_command,
    "bench": bench_command,
    "env": env_command,
}
# Typer's base of all errors in a command line. Versions of Typer have it in different modules.
_UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name=NAME,
    help="NVFP4 language models in JAX: mixture-of-experts and dense ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, command in COMMANDS.items():
    settings = CONTEXT if command is lm_eval_command else {}
    app.command(name, context_settings=settings)(reporting_errors(command))


def _show_version(wanted: bool) -> None:
    """Print the version, and end the command."""
    if wanted:
        show(f"{NAME} {jax_nvfp4_moe.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Take the options that stand before the name of a subcommand."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and leave with its exit status.

    An error that the user can correct is printed as one message, and the exit status is 2. After
    Ctrl-C, it is 130.

    Args:
      arguments: command line without the name of the program. None takes the arguments of the
        process.
    """
    restore_interrupts()
    try:
        _prepare_streams()
        _prepare_messages()
        given = list(sys.argv[1:] if arguments is None else arguments)
        with distributed.leaving_at_once():
            sys.exit(_call(given))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _call(arguments: list[str]) -> int:
    """Run a command and return its exit status; what Typer prints gets our form of errors."""
    # `find_devices` reads the arguments from the context.
    command = typer.main.get_command(app)
    try:
        status = command(args=arguments, obj=arguments, standalone_mode=False) or 0
        sys.stdout.flush()
    except _UsageError as error:
        if message := error.format_message():  # empty if the help was printed instead
            where = error.ctx.command_path if error.ctx else NAME
            say(f"error: {message.rstrip('.')}; see {where} --help")
        return error.exit_code
    except typer.Abort:
        return 1
    except OSError as error:  # nobody can read the help or the version
        drop_output()
        if isinstance(error, BrokenPipeError):
            return 1
        say(f"error: {error}")
        return 2
    return status


def _prepare_streams() -> None:
    """Replace standard streams that are closed, and decide what they do with odd characters."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # otherwise the next file that is opened would get this number
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal may not be able to encode the text of a model. Escape such characters, as
        # Python already does on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # `read_argument` refuses what is no text. Python refuses the change if a program that calls
        # `main` has read from standard input before.
        with contextlib.suppress(io.UnsupportedOperation):
            sys.stdin.reconfigure(errors="surrogateescape")


def _prepare_messages() -> None:
    """Send log records, warnings and tracebacks to standard error, with escapes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapingFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = lambda _, error, where: say_traceback(error.with_traceback(where))
