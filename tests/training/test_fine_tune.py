"""Test the example that fine-tunes: its text, its options, and that what it writes has learned."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.examples import fine_tune

# One short program for all runs: a rank, a batch and a length.
SHORT = ["--rank", "4", "--batch", "4", "--length", "48", "--targets", "q_proj", "v_proj", "o_proj"]


@pytest.fixture(autouse=True)
def usual_promotion():
    """Promote as usual: optax needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def pairs(text):
    return {line.partition(" | ")[2] for line in text.splitlines() if line.startswith("#:")}


def test_the_held_out_functions_are_not_learned():
    learned = fine_tune.write_functions(200, held_out=False)
    tested = fine_tune.write_functions(40, held_out=True)
    assert len(pairs(learned)) > 100
    assert len(pairs(tested)) > 20
    assert not pairs(learned) & pairs(tested)
    assert learned == fine_tune.write_functions(200, held_out=False)
    prompt = fine_tune.PROMPT.splitlines()[0].partition(" | ")[2]
    assert prompt not in pairs(fine_tune.write_functions(2000, held_out=False))


def test_a_few_steps_lower_the_held_out_loss(tmp_path, capsys):
    """The written checkpoint has the loss of the trained model, because it was trained for it."""
    found = fine_tune.main([*SHORT, "--steps", "8", "--output", str(tmp_path)])
    assert found["trained"] < found["before"] - 0.3
    assert found["merged"] == pytest.approx(found["trained"], abs=1e-2)
    printed = capsys.readouterr().out
    assert printed.count("held-out loss") == 10  # before, after each of eight steps, and merged
    assert "Before:" in printed
    assert "After:" in printed
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert len(config["target_modules"]) == 3 * 5
    tokenizer = nvfp4.load_tokenizer(fine_tune.CHECKPOINT)
    text = fine_tune.write_functions(16, held_out=True)
    rows = fine_tune.make_rows(tokenizer, text, 48)
    written = fine_tune.measure(nvfp4.load_model(tmp_path / "merged"), rows)
    assert written == pytest.approx(found["merged"], abs=1e-5)


@pytest.mark.slow
def test_options_and_own_texts(tmp_path):
    """Without a held-out file the end of the text is held out; nothing is written by default."""
    text = tmp_path / "text.py"
    text.write_text(fine_tune.write_functions(60, held_out=False))
    small = fine_tune.main([*SHORT, "--steps=2", "--learning-rate=1e-6", f"--text={text}"])
    assert small["trained"] == pytest.approx(small["before"], abs=0.02)
    plain = fine_tune.main([*SHORT, "--steps=2", f"--text={text}", "--no-merge-aware"])
    assert plain["trained"] < small["trained"]
    assert plain["merged"] != plain["trained"]
    assert [path.name for path in tmp_path.iterdir()] == ["text.py"]


def test_the_loss_of_all_rows_counts_each_row_once():
    """Nine rows do not fill their batches of four."""
    model = nvfp4.load_model(fine_tune.CHECKPOINT)
    rows = np.random.default_rng(0).integers(4096, size=(9, 7), dtype=np.int32)
    each = nnx.jit(lambda model, row: fine_tune.loss(model, row))
    expected = np.mean([float(each(model, row[None])) for row in rows])
    assert fine_tune.measure(model, rows, batch=4) == pytest.approx(expected, rel=2**-7)


def test_a_text_that_is_too_short():
    tokenizer = nvfp4.load_tokenizer(fine_tune.CHECKPOINT)
    with pytest.raises(ValueError, match="text: expected at least 48 tokens, got 3"):
        fine_tune.make_rows(tokenizer, "a b c", 48)
