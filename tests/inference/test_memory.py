"""Test that long texts take bounded memory, by the temporary bytes of the compiled programs.

The temporary bytes of a program are those beside its operands and results. The cache is an operand,
and its result takes the memory of the operand.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.models.synthetic_model import SIZES

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.checkpoint.writing.synthetic import write_synthetic
from jax_nvfp4_moe.inference import prefill
from jax_nvfp4_moe.inference.prefill import SCORE_CHUNK, default_chunk
from jax_nvfp4_moe.models import scores

# The bounds are those of programs for CPUs.
pytestmark = pytest.mark.usefixtures("on_cpu")

SHORT, LONG = 8192, 32768
CHUNK = default_chunk(1)
VOCABULARY = 16384


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a small model with a vocabulary whose logits are larger than all else."""
    folder = tmp_path_factory.mktemp("memory") / "m"
    sizes = dataclasses.replace(SIZES, layers=1, vocab=VOCABULARY)
    write_synthetic(folder, sizes, algorithm="W4A16_NVFP4")
    model = load_model(folder, dtype=jnp.float32)
    model.config = dataclasses.replace(model.config, max_positions=LONG)
    return model


def temporary_bytes(program, *args, **static):
    """Return the temporary bytes of a function that `jax.jit` returned, for given operands."""
    return program.lower(*args, **static).compile().memory_analysis().temp_size_in_bytes


def like(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def cache_of(model, length):
    return jax.eval_shape(lambda: model.init_cache(1, length))


def bytes_of_scores(model, length):
    """Return the temporary bytes of one chunk of a text of `length` tokens."""
    chunk = like(1, SCORE_CHUNK)
    found = like(1, dtype=jnp.float32), like(1, dtype=bool)
    args = cache_of(model, length), chunk, chunk, like(1, SCORE_CHUNK, dtype=bool), like(1), found
    return temporary_bytes(prefill._add_scores, model, *args, num_tokens=None)


def bytes_of_prompt(model, length):
    args = cache_of(model, length), like(1, CHUNK), like(1), like(1, VOCABULARY, dtype=jnp.float32)
    return temporary_bytes(prefill._extend, model, *args, num_tokens=None)


@pytest.mark.parametrize(
    ("measure", "chunk"), [(bytes_of_scores, SCORE_CHUNK), (bytes_of_prompt, CHUNK)]
)
def test_the_memory_of_a_chunk_does_not_grow_with_the_text(model, measure, chunk):
    """Growth is less than a byte for each token of the chunk and each further key."""
    growth = measure(model, LONG) - measure(model, SHORT)
    assert growth < chunk * (LONG - SHORT)


def test_the_logits_of_a_text_are_not_in_memory_together(model, monkeypatch):
    logits = 4 * SCORE_CHUNK * VOCABULARY
    assert bytes_of_scores(model, SHORT) < logits
    monkeypatch.setattr(scores, "_TOGETHER", SCORE_CHUNK)
    prefill._add_scores.clear_cache()
    assert bytes_of_scores(model, SHORT) > logits  # negative control
    prefill._add_scores.clear_cache()
