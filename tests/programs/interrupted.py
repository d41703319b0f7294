"""Run a command, or functions twice, and interrupt this process by a signal.

The signal is SIGINT, as of Ctrl-C, but SIGTERM for the stage "terminate".

``interrupted.py STAGE ARGUMENT...`` runs the command line. ``interrupted.py calls FOLDER SOURCE
DESTINATION`` calls the function behind the command of each stage. It prints the stage, the result
or that the call was interrupted, and the result of a second call, as one line of JSON.
"""

import functools
import json
import os
import signal
import sys

import numpy as np

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint import export
from jax_nvfp4_moe.checkpoint.safetensors import Tensors
from jax_nvfp4_moe.cli.app import main
from jax_nvfp4_moe.inference import generation

# Stage -> the function that sends the signal, in which of its calls, and which signal. The signal
# comes while threads read a checkpoint, between two tokens, or while a file is written.
STAGES = {
    "load": (Tensors, "read_bytes", 100, signal.SIGINT),
    "generate": (generation, "decode", 3, signal.SIGINT),
    "quantize": (export, "_bytes", 20, signal.SIGINT),
    "terminate": (export, "_bytes", 20, signal.SIGTERM),
}


def interrupt(owner, name, call, number):
    """Make call number `call` of a function send a signal to this process."""
    original, calls = getattr(owner, name), []

    @functools.wraps(original)
    def counted(*given):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(*given)

    setattr(owner, name, counted)


def load(folder):
    """Load a model and return the sum of its embedding, so that two results can be compared."""
    return float(np.asarray(nvfp4.load_model(folder).embedding[...], np.float64).sum())


def generate(folder):
    """Generate tokens one at a time, and return them."""
    tokens = nvfp4.stream(nvfp4.load_model(folder), np.array([[5, 6, 7]]), max_new_tokens=6)
    return [int(token[0]) for token in tokens]


def quantize(source, destination):
    """Quantize a model and return the names of the written files."""
    nvfp4.quantize_model(source, destination)
    return sorted(os.listdir(destination))


def call_twice(stage, call, *arguments):
    """Interrupt the first call of a function, and print the outcome of both calls."""
    interrupt(*STAGES[stage])
    try:
        first = call(*arguments)
    except KeyboardInterrupt:
        first = "interrupted"
    print(json.dumps([stage, first, call(*arguments)]))


if __name__ == "__main__":
    stage, *arguments = sys.argv[1:]
    # A shell starts jobs in the background with SIGINT ignored, which programs inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if stage in STAGES:
        interrupt(*STAGES[stage])
        sys.exit(main(arguments))
    folder, source, destination = arguments
    call_twice("load", load, folder)
    call_twice("generate", generate, folder)
    call_twice("quantize", quantize, source, destination)
