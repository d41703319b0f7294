"""Ctrl-C while the command imports its packages, which takes a second or more.

The package imports this module first. A program that imports the package for itself keeps its own
way to handle signals.
"""

import itertools
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Sequence

_SCRIPT, _MODULE = "jax-nvfp4-moe", "jax_nvfp4_moe"


def leave_at_interrupts() -> None:
    """End this process at Ctrl-C without a traceback, if it runs the command of this package.

    `restore_interrupts` ends that. The exit status is 130, as a shell reports Ctrl-C.
    """
    unchanged = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    in_main_thread = threading.current_thread() is threading.main_thread()
    if unchanged and in_main_thread and _is_command(sys.orig_argv):
        signal.signal(signal.SIGINT, _leave)


def restore_interrupts() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again, if `leave_at_interrupts` has changed that."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command(line: Sequence[str]) -> bool:
    """Return whether Python was started with the script or with ``-m`` and this package."""
    script = [pathlib.Path(word).name for word in line[1:2]]
    return _SCRIPT in script or ("-m", _MODULE) in itertools.pairwise(line)


def _leave(number, frame):
    """End the process without the clean-up of modules that are half imported."""
    os._exit(128 + number)


leave_at_interrupts()
