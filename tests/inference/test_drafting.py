"""Drafts change the number of steps, and no token."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS, EXAMPLE
from support.models.drafters import MODES, Oracle

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.inference import drafting, generation, prompt_lookup, step_costs
from jax_nvfp4_moe.inference.conversation import Conversation
from jax_nvfp4_moe.inference.sampling import make_sampling
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer

LENGTHS = np.array([9, 4, 7])
# A mixer of each kind: what its cache holds goes back in another way.
MIXERS = {
    "keys and values": "qwen3_moe-modelopt-mixed-w4a16-kv8",
    "delta net": "qwen3_5_moe-modelopt-w4a16",
}
OTHER_MIXERS = {
    "latents": "deepseek_v3-modelopt-mixed-w4a16-kv8",
    "latents and an indexer": "deepseek_v32-modelopt-w4a16",
    "compressed keys": "deepseek_v4-modelopt-w4a16",
    "sliding windows and sinks": "gpt_oss-modelopt-w4a16",
    "sliding windows": "gemma4-modelopt-w4a16",
    "chunks": "llama4_text-modelopt-w4a16",
    "blocks": "minimax_m3-modelopt-w4a16",
    "Kimi's delta": "kimi_linear-modelopt-w4a16",
    "Mamba-2": "nemotron_h-modelopt-w4a16",
    "short convolution": "lfm2_moe-modelopt-w4a16",
}


@functools.cache
def load(name):
    return nvfp4.load_model(CHECKPOINTS / name, dtype="float32")


@functools.cache
def load_example():
    return nvfp4.load_model(EXAMPLE, dtype="float32"), load_tokenizer(EXAMPLE)


def prompts(model, rows=3):
    shape = (rows, 9)
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=shape, dtype=np.int32)
    return {"input_ids": ids, "lengths": np.resize(LENGTHS, rows)}


@pytest.fixture
def use_oracle(monkeypatch):
    """Return a function that lets `generate` take an `Oracle` as "lookup"."""

    def use(truth, mode):
        oracle = Oracle(truth, mode)
        monkeypatch.setattr(drafting, "DRAFTERS", {**drafting.DRAFTERS, "lookup": oracle})
        jax.clear_caches()  # the name of a drafter is all that compiled programs know of it

    return use


def generate(model, new, **options):
    given = {**prompts(model), "max_new_tokens": new, "stop_ids": (), "stats": True}
    tokens, stats = nvfp4.generate(model, **{**given, **options})
    return np.asarray(tokens), jax.tree.map(np.asarray, stats)


def check_modes(name, modes, use_oracle):
    model, new = load(name), 14
    plain, told = generate(model, new)
    np.testing.assert_array_equal([told.drafted, told.accepted], 0)
    for mode in modes:
        use_oracle(plain, mode)
        drafted, stats = generate(model, new, draft="lookup", draft_tokens=3)
        np.testing.assert_array_equal(drafted, plain, err_msg=mode)
        np.testing.assert_array_equal(stats.lengths, new)
        if mode == "wrong":
            np.testing.assert_array_equal(stats.accepted, 0)
            np.testing.assert_array_equal(stats.steps, new)
        if mode == "right":  # four tokens a step behind the first; the last step has one left
            np.testing.assert_array_equal(stats.steps, 5)
            np.testing.assert_array_equal(stats.accepted, [10, 10, 10])
        if mode == "wrong in the last row":
            assert stats.accepted.tolist() == [10, 10, 0]


@pytest.mark.parametrize("mixer", MIXERS)
def test_tokens_are_those_without_drafts(mixer, use_oracle):
    check_modes(MIXERS[mixer], ["alternating", "wrong in the last row"], use_oracle)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", OTHER_MIXERS)
def test_every_mixer_goes_back(mixer, use_oracle):
    check_modes(OTHER_MIXERS[mixer], ["alternating"], use_oracle)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_counts_of_each_kind_of_drafts(mode, use_oracle):
    check_modes("qwen3moe-modelopt-w4a16", [mode], use_oracle)


def test_a_state_that_does_not_go_back_is_found(use_oracle, monkeypatch):
    """Without going back, the tokens after a wrong draft differ."""
    model = load(MIXERS["delta net"])
    plain, _ = generate(model, 14)
    use_oracle(plain, "alternating")

    def rewind(self, cache, kept, read):
        return type(cache)(cache.layers, cache.lengths - read + kept, cache.max_length)

    monkeypatch.setattr(type(model), "rewind", rewind)
    drafted, _ = generate(model, 14, draft="lookup", draft_tokens=3)
    assert not np.array_equal(drafted, plain)


def test_stop_ids_inside_of_a_draft(use_oracle):
    model = load("qwen3moe-modelopt-w4a16")
    plain, _ = generate(model, 12)
    stop = (int(plain[0, 5]), int(plain[1, 2]))
    plain, expected = generate(model, 12, stop_ids=stop)
    assert (expected.lengths[:2] <= [6, 3]).all()
    use_oracle(plain, "right")
    drafted, stats = generate(model, 12, stop_ids=stop, draft="lookup", draft_tokens=4)
    np.testing.assert_array_equal(drafted, plain)
    np.testing.assert_array_equal(stats.lengths, expected.lengths)
    assert (stats.accepted < stats.lengths).all()
    assert stats.accepted.sum() > 0


@pytest.mark.parametrize("new", [1, 2, 4, 5])
def test_the_last_token_inside_of_a_draft(new, use_oracle):
    model = load("qwen3moe-modelopt-w4a16")
    plain, _ = generate(model, new)
    use_oracle(plain, "right")
    drafted, stats = generate(model, new, draft="lookup", draft_tokens=4)
    np.testing.assert_array_equal(drafted, plain)
    assert drafted.shape[1] == new
    # The prompt yields the first token, and no draft beyond the last one counts.
    np.testing.assert_array_equal(stats.accepted, min(new - 1, 4))


def test_a_full_cache():
    model = load("qwen3moe-modelopt-w4a16")
    most = model.config.max_positions
    ids = np.zeros((1, most - 6), np.int32)
    plain, drafted = (
        nvfp4.generate(model, ids, max_new_tokens=6, stop_ids=(), **options)
        for options in ({}, {"draft": "lookup", "draft_tokens": 5})
    )
    np.testing.assert_array_equal(drafted, plain)


SAMPLED = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "key": jax.random.key(4)}])
@pytest.mark.parametrize("count", [1, "auto"])
def test_lookup_on_the_example(options, count):
    model, tokenizer = load_example()
    texts = ["for i in range(10):\n    print(i)\nfor i in range(", "class A:\n"]
    ids, lengths = tokenizer.encode(texts)
    given = {"lengths": lengths, "max_new_tokens": 40, "stop_ids": (), **options}
    plain = np.asarray(nvfp4.generate(model, ids, **given))
    drafted, stats = nvfp4.generate(
        model, ids, **given, draft="lookup", draft_tokens=count, stats=True
    )
    np.testing.assert_array_equal(drafted, plain)
    # A row that ends inside of a draft has no further token of the last step.
    assert set(np.asarray(stats.steps + stats.accepted).tolist()) <= {40, 41}
    assert (np.asarray(stats.accepted) <= np.asarray(stats.drafted)).all()
    if not options:
        assert np.asarray(stats.accepted).max() > 10
    streamed = list(nvfp4.stream(model, ids, **given, draft="lookup", draft_tokens=count))
    np.testing.assert_array_equal(np.stack(streamed, axis=1), plain)


def test_inside_of_jit():
    model = load("qwen3moe-modelopt-w4a16")
    given = {"max_new_tokens": 9, "stop_ids": ()}
    ids = jnp.asarray(prompts(model)["input_ids"])
    plain = nvfp4.generate(model, ids, **given)
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, ids):
        return nvfp4.generate(nnx.merge(graph, state), ids, **given, draft="lookup", stats=True)

    tokens, stats = run(state, ids)
    np.testing.assert_array_equal(tokens, plain)
    np.testing.assert_array_equal(stats.steps + stats.accepted, 9)


def follow(text, count):
    """Return the draft of `prompt_lookup` by its definition."""
    for size in range(min(prompt_lookup.LONGEST, len(text) - 1), 0, -1):
        suffix = text[-size:]
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == suffix:
                return [text[end + i % (len(text) - end)] for i in range(count)]
    return [prompt_lookup.NOTHING] * count


def test_drafts_follow_the_longest_and_latest_match():
    rng, found = np.random.default_rng(0), 0
    room, count = 40, 5
    rows = [rng.integers(1 + rng.integers(1, 9), size=rng.integers(1, 36)) for _ in range(200)]
    text = np.stack([np.pad(row, (0, room - len(row))) for row in rows]).astype(np.int32)
    memory = prompt_lookup.Memory(jnp.asarray(text), jnp.asarray([*map(len, rows)], jnp.int32))
    drafts, _ = jax.jit(functools.partial(prompt_lookup.propose, None, count=count))(memory)
    for row, draft in zip(rows, np.asarray(drafts).tolist(), strict=True):
        expected = follow(row.tolist(), count)
        assert draft == expected
        found += expected[0] != prompt_lookup.NOTHING
    assert 100 < found < 200


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocab_size: int = 8
    max_positions: int = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dice:
    """A model of one's own, whose logits depend on the last token alone. It counts tokens."""

    table: jax.Array
    config: Sizes = dataclasses.field(default_factory=Sizes, metadata={"static": True})

    def init_cache(self, batch, max_length):
        return jnp.zeros(batch, jnp.int32)

    def __call__(self, input_ids, cache, *, lengths=None):
        read = input_ids.shape[1] if lengths is None else lengths
        return self.table[input_ids], cache + read


class DiceThatGoesBack(nnx.Module):
    """The same model with a cache that goes back, and without lengths."""

    def __init__(self, table):
        self.table, self.config = nnx.Param(table), Sizes()

    def init_cache(self, batch, max_length):
        return jnp.zeros(batch, jnp.int32)

    def __call__(self, input_ids, cache):
        return self.table[...][input_ids], cache + input_ids.shape[1]

    def open_window(self, cache, size):
        return cache

    def rewind(self, cache, kept, read):
        return cache - read + kept


class Careless(DiceThatGoesBack):
    """A model whose calls can neither go back nor take lengths."""

    open_window = rewind = None


def chances(table):
    return np.asarray(jax.nn.softmax(table, axis=-1), np.float64)


@pytest.mark.parametrize("kind", [Dice, DiceThatGoesBack])
def test_a_model_of_ones_own(kind):
    table = jnp.asarray(np.random.default_rng(3).normal(size=(8, 8)), jnp.float32)
    model, ids = kind(table), np.arange(4).reshape(2, 2)
    given = {"max_new_tokens": 20, "stop_ids": ()}
    plain = nvfp4.generate(model, ids, **given)
    drafted, stats = nvfp4.generate(model, ids, **given, draft="lookup", stats=True)
    np.testing.assert_array_equal(drafted, plain)
    assert int(stats.accepted.min()) > 5  # the likeliest token of each token makes a cycle


def chi_square(counts, expected):
    """Return the statistic of Pearson's test."""
    return float(((counts - expected) ** 2 / expected).sum())


def test_sampling_keeps_the_distribution(use_oracle, monkeypatch):
    """Pairs of tokens behind the first follow their chances, of which drafts know nothing."""
    table = jnp.asarray(np.random.default_rng(5).normal(size=(8, 8)), jnp.float32)
    model, rows = DiceThatGoesBack(table), 20_000
    ids = np.zeros((rows, 1), np.int32)
    p = chances(table)
    expected = rows * (p[0] @ np.eye(8))[:, None] * p  # of the first two tokens
    given = {"max_new_tokens": 3, "stop_ids": (), "temperature": 1.0}

    def statistic():
        tokens = nvfp4.generate(
            model, ids, **given, key=jax.random.key(1), draft="lookup", draft_tokens=2
        )
        pairs = np.asarray(tokens)[:, :2]
        counts = np.zeros((8, 8))
        np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
        return chi_square(counts, expected)

    use_oracle(np.tile(np.argmax(p, axis=1)[[0, 1, 2]], (rows, 1)), "right")
    # 63 degrees of freedom: a statistic above 120 has a chance of 2e-5.
    assert statistic() < 120
    # A rule that keeps every draft is found.
    monkeypatch.setattr(
        drafting, "choose", lambda sampling, logits, first: _keep_all(logits, drafted=2)
    )
    jax.clear_caches()
    assert statistic() > 1000


def _keep_all(logits, drafted):
    del drafted
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return tokens, jnp.isfinite(logits).all(axis=-1)


def test_logits_that_are_not_finite_inside_of_a_draft(use_oracle, caplog):
    """The first token that came from such logits is named, as without drafts."""
    table = np.zeros((8, 8), np.float32)
    table[np.arange(8), (np.arange(8) + 1) % 8] = 5
    table[6] = np.nan
    model, ids = DiceThatGoesBack(jnp.asarray(table)), np.asarray([[1], [3]])
    given = {"max_new_tokens": 10, "stop_ids": ()}
    plain = nvfp4.generate(model, ids, **given)
    expected = [record.getMessage() for record in caplog.records]
    assert "row 0 from new token 5 on, row 1 from new token 3 on" in expected[0]
    caplog.clear()
    use_oracle(np.asarray(plain), "right")
    nvfp4.generate(model, ids, **given, draft="lookup", draft_tokens=4)
    assert [record.getMessage() for record in caplog.records] == expected


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"draft": "eagle"}, ValueError, 'draft: expected None or one of "lookup", "mtp"; got'),
        ({"draft": 3}, ValueError, "draft: expected None or one of"),
        ({"draft": "mtp"}, ValueError, r'"mtp" needs drafting layers.*load_model\(path, draft='),
        ({"draft": "lookup", "draft_tokens": 0}, ValueError, "draft_tokens: expected 1 to 16"),
        ({"draft": "lookup", "draft_tokens": 17}, ValueError, "draft_tokens: expected 1 to 16"),
        ({"draft": "lookup", "draft_tokens": 2.5}, TypeError, "draft_tokens: expected an integer"),
        ({"draft_tokens": "many"}, ValueError, 'draft_tokens: expected 1 to 16, or "auto"; got'),
    ],
)
def test_wrong_arguments_are_named(options, kind, message):
    model = Dice(jnp.zeros((8, 8)))
    with pytest.raises(kind, match=message):
        nvfp4.generate(model, np.zeros((1, 2), np.int32), max_new_tokens=3, **options)


def test_a_cache_that_cannot_go_back_is_refused():
    model = Careless(jnp.zeros((8, 8)))
    with pytest.raises(TypeError, match="methods open_window and rewind"):
        nvfp4.generate(model, np.zeros((1, 2), np.int32), max_new_tokens=3, draft="lookup")


def test_no_rows_draft_nothing():
    model = load("qwen3moe-modelopt-w4a16")
    tokens, stats = nvfp4.generate(
        model, np.zeros((0, 3), np.int32), max_new_tokens=4, draft="lookup", stats=True
    )
    assert [tokens.shape, stats.drafted.shape, stats.accepted.shape] == [(0, 4), (0,), (0,)]


def test_drafts_that_do_not_pay_are_left_out(use_oracle):
    """Wrong drafts are tried a few times, and then once in a while."""
    table = jnp.asarray(np.random.default_rng(3).normal(size=(8, 8)), jnp.float32)
    model = DiceThatGoesBack(table)
    ids, given = np.zeros((1, 1), np.int32), {"max_new_tokens": 60, "stop_ids": (), "stats": True}
    plain, _ = nvfp4.generate(model, ids, **given)
    use_oracle(np.asarray(plain), "wrong")
    given |= {"draft": "lookup"}
    _, always = nvfp4.generate(model, ids, **given, draft_tokens=4)
    tokens, seldom = nvfp4.generate(model, ids, **given, draft_tokens="auto")
    np.testing.assert_array_equal(tokens, plain)
    assert int(always.drafted[0]) == 4 * 59
    assert 0 < int(seldom.drafted[0]) < 4 * 20
    use_oracle(np.asarray(plain), "right")
    _, paying = nvfp4.generate(model, ids, **given, draft_tokens="auto")
    assert int(paying.steps[0]) < 16


def test_tries_take_a_hundredth_of_the_time(use_oracle, monkeypatch):
    """Wrong drafts lower the mean of five tokens a step to the cost; tries follow after pauses."""
    model, new, cost = DiceThatGoesBack(jnp.zeros((8, 8))), 600, 1.5
    given = {"max_new_tokens": new, "stop_ids": (), "stats": True}
    ids = np.zeros((1, 1), np.int32)
    use_oracle(np.asarray(nvfp4.generate(model, ids, **given)[0]), "wrong")
    monkeypatch.setattr(step_costs, "_measure", lambda run, state: (state, cost))
    _, stats = nvfp4.generate(model, ids, **given, draft="lookup")
    first = math.ceil(math.log((cost - 1) / 4) / math.log(7 / 8))
    tries = int(stats.drafted[0]) // 4 - first
    assert 0.8 * new / 100 < tries * (cost - 1) <= new / 100


@pytest.mark.parametrize(("cost", "pays"), [(3.9, True), (4.1, False)])
def test_auto_drafts_nothing_where_nearly_all_drafts_would_have_to_be_right(
    use_oracle, monkeypatch, cost, pays
):
    """Four drafts yield five tokens at most, and four fifths of them are four."""
    model = DiceThatGoesBack(jnp.zeros((8, 8)))
    given = {"max_new_tokens": 200, "stop_ids": (), "stats": True}
    ids = np.zeros((1, 1), np.int32)
    plain, _ = nvfp4.generate(model, ids, **given)
    use_oracle(np.asarray(plain), "right")
    measured = []
    monkeypatch.setattr(
        step_costs, "_measure", lambda run, state: measured.append(state) or (state, cost)
    )
    monkeypatch.setattr(step_costs, "_known", {})
    given["draft"] = "lookup"
    for _ in range(2):  # the call that measures, and the next one
        tokens, stats = nvfp4.generate(model, ids, **given)
        np.testing.assert_array_equal(tokens, plain)
        assert (int(stats.drafted[0]) > 0) == pays
        assert len(list(nvfp4.stream(model, ids, max_new_tokens=200, stop_ids=(), draft="lookup")))
    assert len(measured) == 1
    _, stats = nvfp4.generate(model, ids, **given, draft_tokens=4)
    assert int(stats.drafted[0]) > 0, "a number of drafts holds"
    nvfp4.generate(model, np.zeros((2, 1), np.int32), **given)
    assert len(measured) == 2, "another number of rows has a cost of its own"


@pytest.mark.parametrize("draft_tokens", ["auto", 4])
def test_no_step_copies_the_caches(draft_tokens):
    """A branch of `lax.cond` gets copies of the caches; in loops they stay where they are."""
    model = load("qwen3moe-modelopt-w4a16")
    how = make_sampling(0.0, None, 1.0, (), None)
    chosen = drafting.choose_drafting(model, "lookup", draft_tokens)
    given = prompts(model, 1)["input_ids"], None, 20, how, None, chosen
    flat, state = generation.start_decoding(model, *given)
    program = generation.decode.lower(flat, how, state, np.int32(20)).compile().as_text()
    shapes = {entry.shape for entry in jax.tree.leaves(state.cache) if entry.ndim > 2}
    assert shapes
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", program)
    assert shapes.isdisjoint(tuple(map(int, filter(None, one.split(",")))) for one in copied)


def test_the_cost_of_a_step_is_that_of_undisturbed_steps(monkeypatch):
    """A step takes a second, one with drafts two, and each start of a program three.

    Other programs disturb each fourth run.
    """
    now = [0.0]
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: now[0])
    ids = np.zeros((1, 1), np.int32)
    given = ids, None, 200, make_sampling(0.0, None, 1.0, (), None), None
    model = DiceThatGoesBack(jnp.zeros((8, 8)))
    chosen = drafting.choose_drafting(model, "lookup", "auto")
    _, state = generation.start_decoding(model, *given, chosen)

    def run(state, count, calls, disturbed):
        drafts = float(state.cost) == 0
        steps = -(-(int(count) - int(state.count[0])) // (2 if drafts else 1))
        now[0] += 3 + steps * (2 if drafts else 1) + (9 if next(calls) % 4 == disturbed else 0)
        return dataclasses.replace(
            state,
            count=state.count + steps * (2 if drafts else 1),
            steps=state.steps + steps,
            drafted=state.drafted + (4 * steps if drafts else 0),
        )

    for disturbed in range(4):
        calls = itertools.count()
        disturb = functools.partial(run, calls=calls, disturbed=disturbed)
        assert step_costs._measure(disturb, state)[1] == 2


def test_answers_of_a_conversation_are_those_without_drafts():
    """The cache is kept between answers; a short turn, and one that changes the text."""
    model, tokenizer = load_example()
    plain, drafted = (
        Conversation(model, max_length=160, draft=draft) for draft in (None, "lookup")
    )
    text = tokenizer.encode("for i in range(10):\n    print(i)\nfor i in range(")
    for further in ([5], [7, 8, 9]):
        answers = [list(conversation.answer(text, 30)) for conversation in (plain, drafted)]
        assert answers[0] == answers[1]
        np.testing.assert_array_equal(plain.ids, drafted.ids)
        text = [*text, *answers[0], *further]
    assert list(plain.answer(text[:9], 12)) == list(drafted.answer(text[:9], 12))
