"""The options of commands that run over several devices, in one process or in many."""

import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from jax.sharding import Mesh

from jax_nvfp4_moe.cli.options import with_options
from jax_nvfp4_moe.parallel import processes as distributed

_PANEL = "Several processes"


def find_devices(
    context: typer.Context,
    mesh: Annotated[
        str | None,
        typer.Option(help="How to share out the devices: expert=8,tensor=2, or one of them."),
    ] = None,
    detect: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="One of several processes, as Slurm, Open MPI or Kubernetes started them.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(help="host:port of process 0, with the next two.", rich_help_panel=_PANEL),
    ] = None,
    processes: Annotated[int | None, typer.Option(help="How many.", rich_help_panel=_PANEL)] = None,
    process_id: Annotated[
        int | None, typer.Option(help="Which, from 0.", rich_help_panel=_PANEL)
    ] = None,
    peer_timeout: Annotated[
        int,
        typer.Option(help="Seconds until a silent one counts as dead.", rich_help_panel=_PANEL),
    ] = distributed.PEER_TIMEOUT,
    start_timeout: Annotated[
        int, typer.Option(help="Seconds to come together.", rich_help_panel=_PANEL)
    ] = distributed.START_TIMEOUT,
    supervised: Annotated[int | None, typer.Option(distributed.SUPERVISED, hidden=True)] = None,
) -> Mesh | None:
    """Join the other processes where there are any; return the mesh to run over, None for none.

    The process that the user started becomes the parent of one that does the work. The parameters
    are the options; `over_devices` gives them to a command.

    Args:
      context: has the arguments of the command line as its object.
      mesh: as for `distributed.make_mesh`.
      detect, supervised: whether to look for a scheduler, and the number of the parent's pipe.
      coordinator, processes, process_id, peer_timeout, start_timeout: as for `distributed.join`.
    """
    others = coordinator, processes, process_id
    if not detect and all(value is None for value in others):
        return None if mesh is None else distributed.make_mesh(mesh)
    distributed.check_join(*others, peer_timeout, start_timeout)
    if supervised is None:
        command = [sys.executable, "-m", "jax_nvfp4_moe", *map(str, context.obj)]
        sys.exit(distributed.supervise(command, peer_timeout, start_timeout))
    distributed.be_supervised()
    distributed.join(*others, peer_timeout=peer_timeout, start_timeout=start_timeout)
    distributed.report_joined(supervised)
    if not distributed.is_first():  # all compute the same; one speaks
        logging.getLogger("jax_nvfp4_moe").setLevel(logging.WARNING)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return distributed.make_mesh(mesh)


def over_devices(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `find_devices`; it gets what they say as `devices`."""
    shared = inspect.signature(find_devices).parameters

    def run(command, **given):
        devices = find_devices(**{name: given.pop(name) for name in shared})
        command(**given, devices=devices)

    return with_options(command, *shared.values(), runs=run, made="devices")
