"""Test that each answer equals that of the whole text, while only new tokens are computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.inference.conversation import Conversation
from jax_nvfp4_moe.inference.generation import make_sampling

MODELS = {
    "attention": CHECKPOINTS / "qwen3moe-modelopt-w4a16",
    "delta net": CHECKPOINTS / "qwen3_next-modelopt-w4a16",
    "latent": CHECKPOINTS / "deepseek_v3-direct-modelopt-w4a16",
}
FIRST, SECOND = np.arange(5, 16, dtype=np.int32), np.asarray([3, 9, 4], np.int32)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return nvfp4.load_model(MODELS[request.param], dtype=jnp.float32)


def expected(model, ids, new):
    prompt = jnp.asarray(ids)[None]
    return np.asarray(nvfp4.generate(model, prompt, max_new_tokens=new, stop_ids=()))[0]


def test_turns_equal_the_whole_text(model):
    talk = Conversation(model, max_length=60)
    first = list(talk.answer(FIRST, 6))
    np.testing.assert_array_equal(first, expected(model, FIRST, 6))
    np.testing.assert_array_equal(talk.ids, [*FIRST, *first[:-1]])
    whole = np.concatenate([FIRST, first, SECOND])
    np.testing.assert_array_equal(list(talk.answer(whole, 6)), expected(model, whole, 6))


def test_the_second_turn_reads_the_cache(model):
    """Other values in the cache give another answer."""
    talk = Conversation(model, max_length=60)
    whole = np.concatenate([FIRST, list(talk.answer(FIRST, 6)), SECOND])
    layers = jax.tree.map(lambda x: jnp.full_like(x, 3), talk._cache.layers)
    talk._cache = dataclasses.replace(talk._cache, layers=layers)
    assert list(talk.answer(whole, 6)) != expected(model, whole, 6).tolist()


def test_another_text_begins_anew(model):
    talk = Conversation(model, max_length=60)
    list(talk.answer(FIRST, 6))
    other = FIRST[::-1]
    np.testing.assert_array_equal(list(talk.answer(other, 6)), expected(model, other, 6))


def test_the_same_text_gets_an_answer_again(model):
    """The cache then holds the whole text, so that no token of it would be new."""
    talk = Conversation(model, max_length=60)
    first = list(talk.answer(FIRST, 6))
    whole = np.concatenate([FIRST, first[:-1]])
    np.testing.assert_array_equal(talk.ids, whole)
    np.testing.assert_array_equal(list(talk.answer(whole, 6)), expected(model, whole, 6))


def test_an_answer_may_be_left(model):
    """If the caller leaves an answer early, the tokens drawn so far remain part of the text."""
    talk = Conversation(model, max_length=60)
    answer = talk.answer(FIRST, 12)
    drawn = [next(answer) for _ in range(3)]
    answer.close()
    whole = np.concatenate([FIRST, drawn, SECOND])
    np.testing.assert_array_equal(list(talk.answer(whole, 6)), expected(model, whole, 6))


def test_an_answer_may_be_left_within_a_burst(model, monkeypatch):
    """Tokens that were drawn but not yielded may be part of the next text, or not."""
    monkeypatch.setattr(generation, "_BURST_SECONDS", 1e9)
    free = expected(model, FIRST, 12)
    for known in (2, 3):  # of the first token, two more, and four more
        talk = Conversation(model, max_length=60)
        answer = talk.answer(FIRST, 12)
        drawn = [next(answer) for _ in range(2)]
        answer.close()
        assert drawn == free[:2].tolist()
        np.testing.assert_array_equal(talk.ids, [*FIRST, *free[:2]])
        whole = np.concatenate([FIRST, free[:known], SECOND])
        np.testing.assert_array_equal(list(talk.answer(whole, 6)), expected(model, whole, 6))


def test_an_answer_may_be_interrupted(model, monkeypatch):
    """The interrupted call has taken the memory of the cache."""
    talk = Conversation(model, max_length=60)
    list(talk.answer(FIRST, 6))

    def interrupted(*arguments):
        decode(*arguments)
        raise KeyboardInterrupt

    decode = generation.decode
    monkeypatch.setattr(generation, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(talk.answer(np.concatenate([FIRST, SECOND]), 6))
    monkeypatch.undo()
    np.testing.assert_array_equal(list(talk.answer(FIRST, 6)), expected(model, FIRST, 6))


def test_all_options_of_sampling_are_used():
    model, key = nvfp4.load_model(MODELS["attention"]), jax.random.key(1)
    given = {"temperature": 0.7, "top_k": 3, "top_p": 0.3, "stop_ids": (5, 7), "key": key}
    found, expected = Conversation(model, max_length=60, **given)._sampling, make_sampling(**given)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert (one == other).all()


def test_each_answer_has_its_own_noise():
    """The same text gets another answer; the first answer is that of `generate`, and all repeat."""
    model = nvfp4.load_model(MODELS["attention"], dtype=jnp.float32)
    sampling = {"temperature": 2.0, "key": jax.random.key(3)}

    def answers():
        talk = Conversation(model, max_length=60, **sampling)
        return [list(talk.answer(FIRST, 8)) for _ in range(3)]

    first, second, third = answers()
    assert first != second
    assert second != third
    prompt = jnp.asarray(FIRST)[None]
    generated = nvfp4.generate(model, prompt, max_new_tokens=8, stop_ids=(), **sampling)
    assert first == generated[0].tolist()
    assert answers() == [first, second, third]


def test_stops_and_room():
    model = nvfp4.load_model(MODELS["attention"], dtype=jnp.float32)
    free = list(Conversation(model, max_length=60).answer(FIRST, 8))
    stop = free[3]
    talk = Conversation(model, max_length=60, stop_ids=(stop,))
    assert list(talk.answer(FIRST, 8)) == free[: free.index(stop) + 1]
    full = Conversation(model, max_length=len(FIRST) + 2)
    assert list(full.answer(FIRST, 8)) == free[:2]
    with pytest.raises(
        ValueError, match="text: it has 13 tokens, and a conversation has room for 13"
    ):
        next(full.answer(np.concatenate([FIRST, free[:2]]), 1))
    size = model.config.vocab_size
    for text, new, message in (
        ([], 1, "text: expected at least one token, got none"),
        ([1, size], 1, f"text: expected ids from 0 to {size - 1}, .* got 1 to {size}"),
        ([-1], 1, f"text: expected ids from 0 to {size - 1}"),
        ([1], 0, "max_new_tokens: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            next(full.answer(text, new))
    with pytest.raises(ValueError, match="max_length: expected 1 to 512"):
        Conversation(model, max_length=513)
