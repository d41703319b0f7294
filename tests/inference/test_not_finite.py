"""Test what is said of logits that are not finite: NaN, infinity, and nothing but -infinity."""

import functools
import json
import logging
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files import letters
from support.files.checkpoint_edits import read_all
from support.files.given import CHECKPOINTS

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.cli import app as cli
from jax_nvfp4_moe.cli.output import to_json
from jax_nvfp4_moe.inference.conversation import Conversation
from jax_nvfp4_moe.inference.generation import State, draw, make_sampling

GIVEN = CHECKPOINTS / "qwen3moe-modelopt-w4a16"
KEY = jax.random.key(0)
SAMPLINGS = {
    "greedy": make_sampling(0.0, None, 1.0, (), None),
    "sampled": make_sampling(0.9, None, 1.0, (), KEY),
    "cold": make_sampling(1e-30, None, 1.0, (), KEY),
    "cool": make_sampling(2e-5, None, 1.0, (), KEY),
    "tiny top_p": make_sampling(0.9, None, 1e-45, (), KEY),
    "top_k": make_sampling(0.9, 3, 1.0, (), KEY),
    "top_p": make_sampling(0.9, None, 0.5, (), KEY),
    "top_k and top_p": make_sampling(2.0, 3, 0.5, (), KEY),
    "top_k of all": make_sampling(2.0, 64, 0.99, (), KEY),
}
NAN, INF = math.nan, math.inf
# What is not finite in the logits of a row: a value, and the indices that have it.
BROKEN = {
    "nan": (NAN, [5]),
    "nan first": (NAN, [0]),
    "all nan": (NAN, range(64)),
    "infinity": (INF, [5]),
    "two infinities": (INF, [3, 63]),
    "all infinite": (INF, range(64)),
    "all -infinite": (-INF, range(64)),
}


def step(sampling, logits, state):
    return jax.jit(draw)(SAMPLINGS[sampling], jnp.asarray(logits), state)


def finite_logits(rows=3):
    return np.random.default_rng(0).normal(0, 3, (rows, 64)).astype(np.float32)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("what", BROKEN)
def test_the_drawn_token_shows_it(sampling, what):
    """Only the broken row is marked, with its first broken step; a later one changes nothing."""
    value, places = BROKEN[what]
    logits = finite_logits()
    broken = logits.copy()
    broken[1, [*places]] = value
    state = step(sampling, logits, State.begin(None, 3, 8))
    assert state.not_finite.tolist() == [-1, -1, -1]
    for _ in range(2):
        state = step(sampling, broken, state)
        assert state.not_finite.tolist() == [-1, 1, -1]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_finite_logits_are_not_marked(sampling):
    """Huge logits, ties, and -infinity for most tokens, as a mask of the vocabulary gives it."""
    logits = finite_logits(4)
    logits[0] *= 1e37
    logits[1] = 0
    logits[2, 1:] = -INF
    logits[3, :40] = np.finfo(np.float32).min
    state = step(sampling, logits, State.begin(None, 4, 8))
    assert state.not_finite.tolist() == [-1] * 4


def test_a_row_that_has_stopped_is_not_marked():
    """What the model computes after the end of a row is not used."""
    sampling = make_sampling(0.0, None, 1.0, (int(finite_logits()[0].argmax()),), None)
    state = draw(sampling, jnp.asarray(finite_logits()), State.begin(None, 3, 8))
    assert state.stopped.tolist() == [True, False, False]
    state = draw(sampling, jnp.full((3, 64), NAN), state)
    assert state.not_finite.tolist() == [-1, 1, 1]


@pytest.fixture(scope="module")
def prompts():
    """Return three prompts."""
    return np.random.default_rng(1).integers(0, 60, (3, 8)).astype(np.int32)


@pytest.fixture(scope="module")
def good():
    return nvfp4.load_model(GIVEN, dtype="float32")


@functools.cache
def _tensors():
    return read_all(GIVEN)


def write_broken(folder, edit):
    """Write a copy of the checkpoint with edited tensors and a tokenizer of letters."""
    tensors = {name: value.copy() for name, value in _tensors().items()}
    edit(tensors)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    for file in GIVEN.glob("*.json"):
        shutil.copy(file, folder)
    letters.write_tokenizer(folder)
    return folder


def break_token(token):
    """Return an edit that makes the embedding of one token NaN."""

    def edit(tensors):
        tensors["model.embed_tokens.weight"][token, 3] = NAN

    return edit


def warnings(caplog):
    """Return the warnings, except those about the tokenizer of the small checkpoint."""
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return [one for one in found if not one.startswith(("tokenizer", "config.json: vocab_size"))]


SAMPLED = {"greedy": {}, "sampled": {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "key": KEY}}


@pytest.mark.parametrize("how", SAMPLED)
def test_a_token_that_breaks_one_row(good, prompts, tmp_path, caplog, how):
    """One row draws a token whose embedding is NaN; the other rows are as before."""
    new = 12
    options = {"max_new_tokens": new, **SAMPLED[how]}
    expected = np.asarray(nvfp4.generate(good, prompts, **options))
    streamed = np.stack([*nvfp4.stream(good, prompts, **options)], axis=1)
    np.testing.assert_array_equal(streamed, expected)
    assert warnings(caplog) == []
    places = [
        (row, at, expected[row, at])
        for row in range(3)
        for at in range(1, new - 1)
        if expected[row, at] not in prompts and (expected == expected[row, at]).sum() == 1
    ]
    row, at, token = places[0]
    model = nvfp4.load_model(write_broken(tmp_path / "m", break_token(token)), dtype="float32")
    found = np.asarray(nvfp4.generate(model, prompts, **options))
    (said,) = warnings(caplog)
    assert f"row {row} from new token {at + 1} on" in said
    assert said.count("row ") == 1
    others = [other for other in range(3) if other != row]
    np.testing.assert_array_equal(found[others], expected[others])
    np.testing.assert_array_equal(found[row, : at + 1], expected[row, : at + 1])
    streamed = np.stack([*nvfp4.stream(model, prompts, **options)], axis=1)
    np.testing.assert_array_equal(streamed, found)
    assert warnings(caplog) == [said]  # once, not in each burst


def test_padding_and_rows_that_stopped_are_not_said(good, tmp_path, caplog):
    """The padding after a shorter prompt, and tokens after a stop, have no meaning."""
    prompts = np.asarray([[1, 2, 3, 4], [9, 8, 7, 7]], np.int32)  # 7 is padding of the second row
    options = {"lengths": np.asarray([4, 2]), "max_new_tokens": 6}
    expected = np.asarray(nvfp4.generate(good, prompts, **options))
    stop = int(expected[0, 1])
    model = nvfp4.load_model(write_broken(tmp_path / "m", break_token(7)), dtype="float32")
    assert 7 not in expected
    nvfp4.generate(model, prompts, **options)
    assert warnings(caplog) == []
    folder = write_broken(tmp_path / "stopped", break_token(stop))
    model = nvfp4.load_model(folder, dtype="float32")
    nvfp4.generate(model, prompts[:1], max_new_tokens=6, stop_ids=[stop])
    assert warnings(caplog) == []
    nvfp4.generate(model, prompts[:1], max_new_tokens=6)
    assert "row 0 from new token 2 on" in warnings(caplog)[0]


def test_long_prompts_and_many_rows(tmp_path, caplog):
    """Prompts in chunks are watched too, and a warning names at most eight rows."""
    model = nvfp4.load_model(write_broken(tmp_path / "m", break_token(5)), dtype="float32")
    prompts = np.full((10, 6), 5, np.int32)
    nvfp4.generate(model, prompts, max_new_tokens=1, prefill_chunk=4)
    (said,) = warnings(caplog)
    assert said.count("from new token 0 on") == 8
    assert "and 2 more rows" in said


def test_a_conversation(tmp_path, caplog):
    model = nvfp4.load_model(write_broken(tmp_path / "m", break_token(5)), dtype="float32")
    talk = Conversation(model, max_length=32)
    first = [*talk.answer([1, 2], 3)]
    assert 5 not in first
    assert warnings(caplog) == []
    assert len([*talk.answer([1, 2, *first, 5], 3)]) == 3
    assert "row 0 from new token 0 on" in warnings(caplog)[0]


def test_a_users_jit_sees_nothing_new(good):
    """A call of the model returns logits and nothing else, under `jax.jit` too."""
    logits = jax.jit(lambda model, ids: model(ids))(good, jnp.asarray([[1, 2]]))
    assert logits.shape == (1, 2, good.config.vocab_size)


def test_evaluate_names_the_windows(tmp_path, caplog):
    model = nvfp4.load_model(write_broken(tmp_path / "m", break_token(5)), dtype="float32")
    ids = np.tile(np.arange(10, 26), 4)
    ids[33] = 5
    found = nvfp4.evaluate(model, ids, window=16, by_window=True)
    (said,) = warnings(caplog)
    assert "in 1 of 4 windows, the first of which is window 2 " in said
    assert [math.isfinite(loss) for loss in found["cross_entropies"]] == [True, True, False, True]
    assert math.isnan(found["mean_cross_entropy"])
    assert math.isnan(found["perplexity"])
    assert math.isnan(found["standard_error"])
    nvfp4.evaluate(model, ids[:32], window=16)
    assert warnings(caplog) == []


def test_errors_of_layers(broken, call, caplog, tmp_path):
    """The experts get NaN, and so give NaN: `inspect --errors` says it, and its JSON has null."""
    (tmp_path / "text.txt").write_text("ABFC")
    how = ("--errors", "--json", "--text", tmp_path / "text.txt", "--scheme", "w4a16")
    status, out = call("inspect", broken, *how)
    found = json.loads(out, parse_constant=pytest.fail)["errors"]
    assert status == 1
    assert [one["nrmse"] for one in found] == [None] * len(found)
    (said,) = warnings(caplog)
    assert f"{len(found)} of {len(found)} errors are not finite" in said


def test_json_has_no_nan():
    value = {"a": NAN, "b": [INF, 1.5, {"c": -INF}], "d": (1, None, "NaN", True)}
    assert json.loads(to_json(value), parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5, {"c": None}],
        "d": [1, None, "NaN", True],
    }


@pytest.fixture
def call(capsys):
    """Return a function that runs the command line here and returns status and stdout."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        return stopped.value.code or 0, capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Return a checkpoint in which the letter F is NaN."""
    return write_broken(tmp_path_factory.mktemp("broken") / "m", break_token(5))


def test_generate_and_chat_exit_with_status_1(broken, call, caplog, monkeypatch):
    how = ("--dtype", "float32", "--max-new-tokens", 2)
    status, out = call("generate", broken, "--prompt", "ABFC", *how)
    assert (status, out[:4]) == (1, "ABFC")
    assert len(warnings(caplog)) == 1
    assert call("generate", broken, "--prompt", "ABCD", *how)[0] == 0
    assert warnings(caplog) == []
    for line, expected in (("ABFC", 1), ("ABCD", 0)):
        lines = iter([line])
        monkeypatch.setattr("builtins.input", lambda _, lines=lines: _next(lines))
        assert call("chat", broken, "--context", 64, *how)[0] == expected
        assert len(warnings(caplog)) == expected
    assert call("generate", broken / "no", "--prompt", "A", *how)[0] == 2


def _next(lines):
    try:
        return next(lines)
    except StopIteration:
        raise EOFError from None


def test_eval_prints_json_and_exits_with_status_1(broken, call, caplog, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("ABCD" * 8 + "ABCF" * 4)
    how = ("--text", text, "--window", 16, "--by-window")
    status, out = call("eval", broken, *how)
    found = json.loads(out, parse_constant=pytest.fail)
    assert status == 1
    assert found["mean_cross_entropy"] is found["perplexity"] is found["standard_error"] is None
    assert found["cross_entropies"][2] is None
    assert all(loss > 0 for loss in found["cross_entropies"][:2])
    assert len(warnings(caplog)) == 1
    assert call("eval", broken, *how, "--max-windows", 2)[0] == 0
    assert warnings(caplog) == []
