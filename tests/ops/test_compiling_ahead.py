"""Test that the programs of a load are compiled side by side, before they are called."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.nn.building import filling
from jax_nvfp4_moe.ops.compiling_ahead import Noted, compiling, lower_calls

FOLDER = CHECKPOINTS / "qwen3moe-modelopt-w4a16"
CONVERSIONS = "_to_layout", "_join_matrices", "_allocate", "_write", "_convert_whole"


def scale(x, factor):
    return {"scaled": x["values"] * factor}


class Compilations(logging.Handler):
    """Notes the name of the program, and of the thread, of each compilation."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        message = record.getMessage()
        if message.startswith("Finished XLA compilation of jit("):
            self.found.append((message.split("(")[1].split(")")[0], record.threadName))


@pytest.fixture
def compilations():
    """Compilations, the newest last, of programs that nobody has compiled before."""
    jax.clear_caches()
    handler, logger = Compilations(), logging.getLogger("jax")
    logger.addHandler(handler)
    jax.config.update("jax_log_compiles", True)  # a context would not reach other threads
    yield handler.found
    jax.config.update("jax_log_compiles", False)
    logger.removeHandler(handler)


def test_noted_calls_are_compiled_once_and_in_threads(compilations):
    noted = Noted(jax.jit(scale, static_argnums=1))
    values = {"values": np.arange(6.0, dtype=np.float32)}
    zeros = [lambda size=size: noted({"values": jnp.zeros(size)}, 3) for size in (6, 6, 7)]
    programs = lower_calls(zeros)
    assert len(programs) == 2
    assert not compilations
    with compiling(programs) as wait:
        wait()
        done = list(compilations)
        result = noted(jax.device_put(values), 3)
    assert [name for name, _ in done] == ["scale", "scale"]
    assert all(thread.startswith("ThreadPoolExecutor") for _, thread in done)
    assert compilations == done
    np.testing.assert_array_equal(result["scaled"], 3 * values["values"])


def test_calls_outside_of_lower_calls_are_not_noted():
    noted = Noted(jax.jit(scale, static_argnums=1))
    noted({"values": jnp.zeros(6)}, 3)
    assert lower_calls([]) == []


def test_an_error_of_a_trace_ends_the_notes(compilations):
    noted = Noted(jax.jit(scale, static_argnums=1))
    with pytest.raises(KeyError):
        lower_calls([lambda: noted({}, 3)])
    assert lower_calls([]) == []
    assert not compilations


def conversions(compilations):
    return sorted(one for one in compilations if one[0] in CONVERSIONS)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_load_compiles_its_conversions_in_threads(ahead, compilations, monkeypatch):
    if not ahead:
        monkeypatch.setattr(filling, "lower_conversions", lambda *_: [])
    nvfp4.load_model(FOLDER)
    found = conversions(compilations)
    in_threads = [thread.startswith("ThreadPoolExecutor") for _, thread in found]
    assert in_threads == [ahead] * len(found)
    assert {"_to_layout", "_join_matrices"} < {name for name, _ in found}


def test_a_load_compiles_no_program_twice(compilations, monkeypatch):
    nvfp4.load_model(FOLDER)
    ahead = [name for name, _ in conversions(compilations)]
    jax.clear_caches()
    compilations.clear()
    monkeypatch.setattr(filling, "lower_conversions", lambda *_: [])
    nvfp4.load_model(FOLDER)
    assert ahead == [name for name, _ in conversions(compilations)]
