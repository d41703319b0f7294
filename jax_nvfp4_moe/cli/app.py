"""The command ``jax-nvfp4-moe``.

Commands print results on standard output, and messages and progress on standard error.
"""

import io
import logging
import sys
from collections.abc import Sequence

import typer

from jax_nvfp4_moe.cli.bench import bench_command
from jax_nvfp4_moe.cli.chat import chat_command
from jax_nvfp4_moe.cli.env import env_command
from jax_nvfp4_moe.cli.errors import reporting_errors
from jax_nvfp4_moe.cli.eval import eval_command
from jax_nvfp4_moe.cli.generate import generate_command
from jax_nvfp4_moe.cli.inspect import inspect_command
from jax_nvfp4_moe.cli.lm_eval import CONTEXT, lm_eval_command
from jax_nvfp4_moe.cli.quantize import quantize_command
from jax_nvfp4_moe.parallel import processes as distributed

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

app = typer.Typer(
    name="jax-nvfp4-moe",
    help="NVFP4 mixture-of-experts inference for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for name, command in COMMANDS.items():
    settings = CONTEXT if command is lm_eval_command else {}
    app.command(name, context_settings=settings)(reporting_errors(command))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    An error that the user can correct is printed as one message, and the exit status is 2.

    Args:
      arguments: command line without the name of the program. None takes the arguments of the
        process.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal may not be able to encode the text of a model. Escape such characters, as
        # Python already does on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    given = list(sys.argv[1:] if arguments is None else arguments)
    with distributed.leaving_at_once():
        app(args=given, obj=given)  # `find_devices` reads the arguments from the context
