"""Drafts of the drafting layers: what they read, and that they change no token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.drafted import write_drafted

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.inference import token_prediction
from jax_nvfp4_moe.inference.conversation import Conversation
from jax_nvfp4_moe.inference.drafting import choose_drafting
from jax_nvfp4_moe.inference.pair_prefill import start_with_pairs
from jax_nvfp4_moe.inference.sampling import make_sampling

QWEN, NEMOTRON = "qwen3_next-modelopt-w4a16", "nemotron_h-latent-modelopt-w4a16"
DEEPSEEK_V4 = "deepseek_v4-modelopt-w4a16"  # its cache has states, and it reads several streams
DRAFTS = 3


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @functools.cache
    def load(name):
        folder = write_drafted(name, tmp_path_factory.mktemp("drafted") / "folder")
        return nvfp4.load_model(folder, draft="mtp", dtype="float32")

    return load


@jax.jit
def reference(model, hidden, text, length):
    """Return drafts behind the first `length` tokens, whose pairs are all read at once."""
    cache = model.init_draft_cache(1, text.shape[1] + DRAFTS)
    at = {"lengths": length[None] - 1, "logits_at": length[None] - 2}
    logits, hidden, cache = model.draft(hidden[:, :-1], text[:, 1:], cache, **at)
    hidden = jnp.take_along_axis(hidden, at["logits_at"][:, None, None], axis=1)
    drafts = [jnp.argmax(logits, axis=-1)]
    for _ in range(DRAFTS - 1):
        logits, hidden, cache = model.draft(hidden, drafts[-1], cache)
        drafts.append(jnp.argmax(logits, axis=-1))
    return jnp.concatenate(drafts, axis=1)[0]


@pytest.mark.parametrize(
    ("name", "chunk"),
    [(QWEN, 5), (QWEN, 512), pytest.param(DEEPSEEK_V4, 5, marks=pytest.mark.slow)],
)
def test_drafts_are_those_of_the_whole_text(name, chunk, load):
    """Rows keep different numbers of drafts, and the prompt is run in one or several chunks."""
    model = load(name)
    drafting = choose_drafting(model, "mtp", DRAFTS)
    vocabulary, lengths = model.config.vocab_size, np.array([9, 12], np.int32)
    text = np.random.default_rng(1).integers(vocabulary, size=(2, 30), dtype=np.int32)
    hidden = jax.jit(lambda model, text: model(text, with_hidden=True)[1])(model, text)
    ids = np.where(np.arange(12) < lengths[:, None], text[:, :12], 0)
    sampling = make_sampling(0.0, None, 1.0, (), None)
    state = start_with_pairs(model, sampling, ids, lengths, np.int32(20), 32, chunk, drafting)
    # The first new token is that of the text, whatever the model draws.
    first = np.take_along_axis(text, lengths[:, None], axis=1)[:, 0]
    memory = token_prediction.begin(
        state.memory.cache, state.memory.hidden[:, 0], jnp.asarray(first), drafting.window
    )
    known, propose = lengths + 1, jax.jit(token_prediction.propose, static_argnames="count")
    for emitted in ([1, 4], [3, 2], [4, 1]):
        drafts, memory = propose(model, memory, count=DRAFTS)
        for row in range(2):
            expected = reference(model, hidden[row : row + 1], text[row : row + 1], known[row])
            np.testing.assert_array_equal(drafts[row], expected)
        window = np.arange(drafting.window)[None, :]
        new = np.take_along_axis(text, known[:, None] + window, axis=1)
        last = jnp.take_along_axis(hidden, (known[:, None] - 1 + window)[..., None], axis=1)
        count = np.asarray(emitted, np.int32)
        # What was refused must have no effect.
        kept = window < count[:, None]
        new, last = np.where(kept, new, 3), jnp.where(kept[..., None], last, 7.0)
        memory = token_prediction.record(memory, jnp.asarray(new), jnp.asarray(count), last)
        known = known + count


@pytest.mark.parametrize(
    "name",
    [QWEN, *(pytest.param(name, marks=pytest.mark.slow) for name in (NEMOTRON, DEEPSEEK_V4))],
)
def test_tokens_are_those_without_drafts(name, load):
    model = load(name)
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=(3, 9), dtype=np.int32)
    given = {"lengths": np.array([9, 4, 7]), "max_new_tokens": 14, "stop_ids": ()}
    plain = nvfp4.generate(model, ids, **given)
    for count in (2, "auto"):
        drafted, stats = nvfp4.generate(
            model, ids, **given, draft="mtp", draft_tokens=count, stats=True
        )
        np.testing.assert_array_equal(drafted, plain)
        assert int(stats.drafted.min()) > 0
    streamed = list(nvfp4.stream(model, ids, **given, draft="mtp", draft_tokens=2))
    np.testing.assert_array_equal(np.stack(streamed, axis=1), plain)


def test_a_conversation(load):
    model = load(QWEN)
    plain, drafted = (Conversation(model, max_length=64, draft=draft) for draft in (None, "mtp"))
    text = [3, 1, 4, 1, 5]
    for _ in range(2):
        answers = [list(conversation.answer(text, 6)) for conversation in (plain, drafted)]
        assert answers[0] == answers[1]
        text = [*text, *answers[0], 9, 2]
