"""Options of the commands that run on several devices, in one process or in several."""

import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from jax.sharding import Mesh

from jax_nvfp4_moe.cli.options import number, with_options
from jax_nvfp4_moe.parallel import processes as distributed
from jax_nvfp4_moe.parallel.automatic_mesh import AUTO

_PANEL = "Several processes"
_LONGEST = 1_000_000  # seconds; JAX counts in milliseconds


def find_devices(
    context: typer.Context,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Sizes of the mesh axes, such as expert=8,tensor=2; either may be missing. auto, "
            "the default, takes the fewest devices that have room for the weights. The default of "
            "several processes is all devices along expert."
        ),
    ] = None,
    detect: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Join the other processes that Slurm, Open MPI or Kubernetes started.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="Address host:port of process 0. Requires --processes and --process-id.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    processes: Annotated[
        int | None, number(help="Number of processes.", rich_help_panel=_PANEL)
    ] = None,
    process_id: Annotated[
        int | None,
        number(help="Index of this process, starting at 0.", least=0, rich_help_panel=_PANEL),
    ] = None,
    peer_timeout: Annotated[
        int,
        number(
            help="Seconds after which a silent process counts as dead.",
            least=5,
            most=_LONGEST,
            rich_help_panel=_PANEL,
        ),
    ] = distributed.PEER_TIMEOUT,
    start_timeout: Annotated[
        int,
        number(
            help="Seconds that all processes have to join.", most=_LONGEST, rich_help_panel=_PANEL
        ),
    ] = distributed.START_TIMEOUT,
    supervised: Annotated[int | None, typer.Option(distributed.SUPERVISED, hidden=True)] = None,
) -> Mesh | str:
    """Join the other processes if there are any, and return the mesh to run on.

    In a run of several processes, the process that the user starts becomes a supervisor. Its child
    does the work. The parameters of this function are the options that `over_devices` adds to a
    command.

    Args:
      context: Typer's context, whose object is the list of command-line arguments.
      mesh: sizes of the mesh axes, as for `processes.make_mesh`, or "auto".
      detect: whether to take the addresses of the other processes from a scheduler.
      coordinator: as for `processes.join`.
      processes: as for `processes.join`.
      process_id: as for `processes.join`.
      peer_timeout: as for `processes.join`.
      start_timeout: as for `processes.join`.
      supervised: in a child, the number of the pipe to its supervisor; otherwise None.

    Returns:
      The argument `mesh` of `load_model`.
    """
    others = coordinator, processes, process_id
    if not detect and all(value is None for value in others):
        return AUTO if mesh in (None, AUTO) else distributed.make_mesh(mesh)
    distributed.check_join(*others, peer_timeout, start_timeout)
    if supervised is None:
        command = [sys.executable, "-m", "jax_nvfp4_moe", *map(str, context.obj)]
        sys.exit(distributed.supervise(command, peer_timeout, start_timeout))
    distributed.be_supervised()
    distributed.join(*others, peer_timeout=peer_timeout, start_timeout=start_timeout)
    distributed.report_joined(supervised)
    if not distributed.is_first():  # all processes compute the same result; process 0 prints it
        logging.getLogger("jax_nvfp4_moe").setLevel(logging.WARNING)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return AUTO if mesh == AUTO else distributed.make_mesh(mesh)


def over_devices(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `find_devices` to a command.

    The command receives the mesh, or "auto", as its argument `devices`.
    """
    shared = inspect.signature(find_devices).parameters

    def run(command, **given):
        devices = find_devices(**{name: given.pop(name) for name in shared})
        command(**given, devices=devices)

    return with_options(command, *shared.values(), runs=run, made="devices")
