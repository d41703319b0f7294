"""Test generation: the tool's greedy text, independent rows, and one compilation for all calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS, EXAMPLE, EXAMPLE_REFERENCE, reference_facts
from support.models.architecture import run

from jax_nvfp4_moe import generate, load_model
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.inference.generation import stream
from jax_nvfp4_moe.inference.sampling import Sampling, make_sampling
from jax_nvfp4_moe.inference.sampling import choose as choose_tokens
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.models.decoder import Decoder

GREEDY = reference_facts(EXAMPLE_REFERENCE)["mean_cross_entropy"]["w4a16_greedy"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EXAMPLE)


@pytest.fixture(scope="module")
def example():
    return load_model(EXAMPLE, scheme="w4a16", dtype=jnp.float32)


@pytest.fixture(scope="module")
def model():
    """Return a model of two layers, whose programs compile faster than those of the example."""
    return load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16", scheme="w4a16", dtype=jnp.float32)


@pytest.fixture(scope="module")
def prompt(model):
    shape = (1, 14)
    return np.random.default_rng(0).integers(model.config.vocab_size, size=shape, dtype=np.int32)


@pytest.fixture
def traces(monkeypatch):
    """Return a list that collects the shape of `input_ids` in each trace of the model."""
    seen, original = [], Decoder.__call__

    def counted(self, input_ids, *rest, **named):
        seen.append(input_ids.shape)
        return original(self, input_ids, *rest, **named)

    monkeypatch.setattr(Decoder, "__call__", counted)
    jax.clear_caches()
    return seen


def test_the_greedy_text_of_the_tool(example, tokenizer):
    expected, prompt = GREEDY["token_ids"], tokenizer.encode(GREEDY["prompt"])[None]
    new = len(expected) - prompt.shape[1]
    tokens = np.asarray(generate(example, prompt, max_new_tokens=new, stop_ids=()))
    assert tokens.shape == (1, new)
    assert tokens.dtype == np.int32
    assert [*prompt[0], *tokens[0]] == expected
    assert GREEDY["prompt"] + tokenizer.decode(tokens[0]) == GREEDY["text"]


def test_generation_without_a_cache_says_the_same(model, prompt):
    tokens = np.asarray(generate(model, prompt, max_new_tokens=6))
    logits = run(model, np.concatenate([prompt, tokens], axis=1))
    likeliest = np.argmax(logits, axis=-1)[:, prompt.shape[1] - 1 : -1]
    np.testing.assert_array_equal(tokens, likeliest)


def test_no_compilation_for_a_token_or_a_call(traces, model, prompt):
    generate(model, prompt, max_new_tokens=20)
    assert traces == [(1, 32), (1, 1)]
    generate(model, prompt[:, 3:], max_new_tokens=48)
    generate(model, prompt, max_new_tokens=5, stop_ids=())
    assert len(list(stream(model, prompt, max_new_tokens=7))) == 7
    key = jax.random.key(0)
    generate(model, prompt, max_new_tokens=5, temperature=0.5, key=key)
    assert len(traces) == 4  # sampling is another program
    generate(model, prompt, max_new_tokens=9, temperature=0.7, key=jax.random.key(1))
    assert len(traces) == 4


def test_a_model_is_flattened_once_in_a_call(model, prompt):
    """To flatten a large model takes longer than a step. Each call sees the weights of its time."""

    class Counted:
        """A model that counts how often its tree is flattened."""

        def __init__(self, model, flattened):
            self.model, self.flattened = model, flattened

        def __getattr__(self, name):
            return getattr(self.model, name)

        def __call__(self, *arguments, **options):
            return self.model(*arguments, **options)

    def flatten(counted):
        flattened.append(1)
        return (counted.model,), None

    flattened = []
    jax.tree_util.register_pytree_node(
        Counted, flatten, lambda _, children: Counted(*children, flattened)
    )
    counted = Counted(model, flattened)
    expected = generate(model, prompt, max_new_tokens=20)
    for given in ({}, {"prefill_chunk": 4}):
        generate(counted, prompt, max_new_tokens=20, **given)  # traces, which may flatten it too
        flattened.clear()
        tokens = generate(counted, prompt, max_new_tokens=20, **given)
        assert len(flattened) == 1
        np.testing.assert_array_equal(tokens, expected)
    flattened.clear()
    assert len(list(stream(counted, prompt, max_new_tokens=20))) == 20
    assert len(flattened) == 1
    changed = nnx.clone(model)
    changed.embedding.set_value(changed.embedding.get_value()[::-1])
    counted.model = changed
    assert (generate(counted, prompt, max_new_tokens=20) != expected).any()


def test_unequal_prompts_come_out_as_if_alone(model, prompt):
    t = prompt.shape[1]
    lengths = np.array([t, 5, 1])
    batch = np.full((3, t), 7, np.int32)
    for row, length in enumerate(lengths):
        batch[row, :length] = prompt[0, :length]
    together = generate(model, batch, max_new_tokens=12, lengths=lengths)
    for row, length in enumerate(lengths):
        alone = generate(model, prompt[:, :length], max_new_tokens=12)
        np.testing.assert_array_equal(together[row], alone[0])


def test_what_stands_behind_a_prompt_is_not_read(model, prompt):
    padded = np.concatenate([prompt, np.full((1, 9), 1 << 30, np.int32)], axis=1)
    lengths = [prompt.shape[1]]
    np.testing.assert_array_equal(
        generate(model, padded, max_new_tokens=4, lengths=lengths),
        generate(model, prompt, max_new_tokens=4),
    )


def test_a_stop_id_ends_its_row_and_repeats(model, prompt):
    both = np.concatenate([prompt, prompt[:, ::-1]])
    free = np.asarray(generate(model, both, max_new_tokens=10))
    stop = int(free[0, 3])
    tokens = np.asarray(generate(model, both, max_new_tokens=10, stop_ids=[stop]))
    first = list(free[0]).index(stop)
    np.testing.assert_array_equal(tokens[0, : first + 1], free[0, : first + 1])
    assert (tokens[0, first:] == stop).all()
    until = list(free[1]).index(stop) if stop in free[1] else 9
    np.testing.assert_array_equal(tokens[1, : until + 1], free[1, : until + 1])
    alone = list(stream(model, prompt, max_new_tokens=10, stop_ids=[stop]))
    assert len(alone) == first + 1
    ended = generate(model, prompt, max_new_tokens=10, stop_ids=[int(free[0, 0])])
    assert (np.asarray(ended) == free[0, 0]).all()


@pytest.mark.parametrize("stop", [3, None])
def test_the_stop_ids_of_the_model_are_the_default(model, prompt, stop):
    """Each row has a length, with its stop id; `()` never stops."""
    both = np.concatenate([prompt, prompt[:, ::-1]])
    free = np.asarray(generate(model, both, max_new_tokens=10))
    ids = () if stop is None else (511, int(free[0, stop]))
    stopping = nnx.clone(model)
    stopping.stop_ids = ids
    tokens, stats = generate(stopping, both, max_new_tokens=10, stats=True)
    np.testing.assert_array_equal(tokens, generate(model, both, max_new_tokens=10, stop_ids=ids))
    ends = [next((i + 1 for i, t in enumerate(row) if t in ids), 10) for row in free.tolist()]
    assert stop is None or ends[0] < 10
    assert stats.lengths.tolist() == stats.steps.tolist() == ends
    assert (stats.lengths.dtype, stats.steps.dtype) == (jnp.int32, jnp.int32)
    streamed = np.stack(list(stream(stopping, both, max_new_tokens=10)), axis=1)
    np.testing.assert_array_equal(streamed, tokens[:, : max(ends)])
    never = generate(stopping, both, max_new_tokens=10, stop_ids=(), stats=True)
    np.testing.assert_array_equal(never[0], free)
    assert never[1].lengths.tolist() == [10, 10]
    assert len(list(stream(stopping, both, max_new_tokens=10, stop_ids=()))) == 10


def test_lengths_of_no_rows(model):
    none = np.zeros((0, 4), np.int32)
    tokens, stats = generate(model, none, max_new_tokens=3, stats=True)
    assert tokens.shape == (0, 3)
    assert stats.lengths.shape == stats.steps.shape == (0,)


def test_generate_inside_of_jit(model, prompt):
    """Model, prompts, lengths and numbers may be traced; the tokens are those of a plain call."""
    t = prompt.shape[1]
    lengths = np.array([t, 5, 1])
    batch = np.where(np.arange(t) < lengths[:, None], prompt, 7)
    known = {"max_new_tokens": 8, "prefill_chunk": 5, "top_k": 30, "stats": True}

    def run(model, ids, lengths, stop_ids=(3, 5), **drawn):
        return generate(model, ids, lengths=lengths, stop_ids=stop_ids, **drawn, **known)

    inside = jax.jit(run)
    for temperature, top_p in ((0.0, 1.0), (0.9, 0.8)):
        drawn = {"temperature": temperature, "top_p": top_p, "key": jax.random.key(2)}
        expected = run(model, batch, lengths, **drawn)
        found = inside(model, batch, lengths, **drawn)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    closed = jax.jit(lambda: generate(model, batch, lengths=lengths, max_new_tokens=8))()
    # Two stop ids share the programs of the first call; none of them is a token of the text.
    absent = set(range(model.config.vocab_size)) - set(np.asarray(closed).flat)
    drawn |= {"temperature": 0.0, "top_p": 1.0}
    endless = run(model, batch, lengths, stop_ids=(min(absent), max(absent)), **drawn)
    np.testing.assert_array_equal(closed, endless[0])


def test_what_cannot_be_traced_is_said(model, prompt):
    with pytest.raises(ValueError, match=r"stream: .* outside of jax\.jit"):
        jax.jit(lambda ids: list(stream(model, ids, max_new_tokens=3)))(prompt)
    for name, value in (("max_new_tokens", 3), ("top_k", 3), ("stop_ids", jnp.arange(2))):
        with pytest.raises(TypeError, match=f"{name}: expected .* known"):
            jax.jit(lambda value: generate(model, prompt, **{"max_new_tokens": 2, name: value}))(  # noqa: B023
                value
            )
    with pytest.raises(ValueError, match="14 tokens and 1000 new tokens exceed"):
        jax.jit(lambda ids: generate(model, ids, max_new_tokens=1000))(prompt)


def test_a_stream_gives_the_same_tokens(model, prompt):
    arguments = {"max_new_tokens": 9, "temperature": 0.9, "top_k": 20, "key": jax.random.key(3)}
    streamed = np.stack(list(stream(model, prompt, **arguments)), axis=1)
    np.testing.assert_array_equal(streamed, generate(model, prompt, **arguments))


@pytest.mark.parametrize(("seconds", "calls"), [(0, 39), (1e9, 5)])
def test_a_stream_starts_the_loop_for_several_tokens(model, prompt, monkeypatch, seconds, calls):
    """Each burst has up to twice as many tokens as the one before it, while they take no longer."""
    started, decode = [], generation.decode

    def counted(*arguments):
        started.append(arguments[-1])
        return decode(*arguments)

    monkeypatch.setattr(generation, "decode", counted)
    monkeypatch.setattr(generation, "_BURST_SECONDS", seconds)
    tokens = np.stack(list(stream(model, prompt, max_new_tokens=40)), axis=1)
    assert len(started) == calls
    np.testing.assert_array_equal(tokens, generate(model, prompt, max_new_tokens=40))
    stop = int(tokens[0, 9])
    until = tokens[0].tolist().index(stop) + 1
    stopped = list(stream(model, prompt, max_new_tokens=40, stop_ids=[stop]))
    np.testing.assert_array_equal(np.stack(stopped, axis=1), tokens[:, :until])


def test_a_key_decides_the_sample(model, prompt):
    def sample(seed):
        key = jax.random.key(seed)
        return np.asarray(generate(model, prompt, max_new_tokens=16, temperature=1.0, key=key))

    np.testing.assert_array_equal(sample(1), sample(1))
    assert (sample(1) != sample(2)).any()


def test_each_step_has_random_numbers_of_its_own(model, prompt):
    """At this temperature all tokens are about equally likely, so that they hardly ever repeat."""
    hot = {"temperature": 1e6, "key": jax.random.key(0)}
    tokens = np.asarray(generate(model, prompt, max_new_tokens=16, **hot))
    assert len(np.unique(tokens)) > 10


@pytest.mark.parametrize(
    "narrow",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_p": 1e-45},  # a denormal float32
        {"top_p": 5e-324},  # 0 in float32
        {"temperature": 1e-4},
        {"temperature": 1e-38},
        {"temperature": 5e-324},
    ],
)
def test_narrow_sampling_is_greedy(model, prompt, narrow):
    arguments = {"temperature": 1.0, "key": jax.random.key(0)} | narrow
    np.testing.assert_array_equal(
        generate(model, prompt, max_new_tokens=6, **arguments),
        generate(model, prompt, max_new_tokens=6),
    )


MASKED = [-np.inf, 2.0, -np.inf, 2.0, 1.0]
HARD_LOGITS = {
    "small": [0.0, 1e-6, 3e-6, 2e-6, -1.0],
    "large": [3e38, 1.0, 3.4e38, -3.4e38, 0.0],
    "very negative": [-3e38, -2e38, -3.4e38, -np.inf, -2.5e38],
    "equal": [7.0] * 5,
    "all but one masked": [-np.inf, -np.inf, -np.inf, 0.5, -np.inf],
    "masked": MASKED,
}


def draw_tokens(sampling, logits, count):
    """Draw the token with index `count` of each row of logits ``[b, v]``."""
    return choose_tokens(sampling, logits[:, None], jnp.full(len(logits), count, jnp.int32))[0][
        :, 0
    ]


def choose(logits, **options):
    """Draw a token for each of 64 equal rows."""
    given = {"temperature": 1.0, "top_k": None, "top_p": 1.0} | options
    sampling = make_sampling(**given, stop_ids=(), key=jax.random.key(0))
    return np.asarray(draw_tokens(sampling, jnp.tile(jnp.float32(logits), (64, 1)), 0))


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-45, 1e-38, 1e-20, 9e-6])
@pytest.mark.parametrize("name", HARD_LOGITS)
def test_a_tiny_temperature_is_greedy(name, temperature):
    logits = HARD_LOGITS[name]
    np.testing.assert_array_equal(choose(logits, temperature=temperature), np.argmax(logits))


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-3, 1.0, 1e30, 1e39, 1e300])
@pytest.mark.parametrize("narrow", [{}, {"top_k": 4}, {"top_k": 2**40}, {"top_p": 0.99}])
def test_no_temperature_makes_numbers_that_are_not_finite(narrow, temperature):
    """Masked tokens are never drawn, and of equal logits each one is, however large they are."""
    for scale in (1.0, 1e38):
        drawn = set(choose(np.multiply(MASKED, scale), temperature=temperature, **narrow))
        assert {1, 3} <= drawn <= {1, 3, 4}
    assert set(choose([3e38, 3.4e38, 3.4e38, -3.4e38], temperature=2e-5, **narrow)) == {1, 2}


def draws(count, **options):
    """Draw many tokens with probabilities 0.15, 0.5, 0.1 and 0.25, and count each of them."""
    chances = jnp.array([0.15, 0.5, 0.1, 0.25])
    options = {"temperature": 1.0, "top_p": 1.0, "top_k": None} | options
    sampling = Sampling(
        jnp.float32(options["temperature"]),
        jnp.float32(options["top_p"]),
        jnp.zeros(0, jnp.int32),
        jax.random.key(0),
        greedy=False,
        top_k=options["top_k"],
        nucleus=options["top_p"] < 1,
    )
    logits = jnp.broadcast_to(jnp.log(chances), (count, 4))
    return np.bincount(np.asarray(draw_tokens(sampling, logits, 5)), minlength=4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.74}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.76}, [1 / 6, 5 / 9, 0, 5 / 18]),
        # The chances of the three tokens that `top_k` keeps are 0.17, 0.56 and 0.28, so that two of
        # them are enough for 0.8. Of all tokens, three would be needed.
        ({"top_k": 3, "top_p": 0.8}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 9}, [0.15, 0.5, 0.1, 0.25]),
        ({"temperature": 0.5}, [0.0652, 0.7246, 0.0290, 0.1812]),
        # At temperature 2 the chances are 0.2027, 0.3701, 0.1655 and 0.2617, so that three tokens
        # are needed for 0.64. At temperature 1, two would be enough.
        ({"temperature": 2.0, "top_p": 0.64}, [0.2429, 0.4435, 0, 0.3136]),
    ],
)
def test_tokens_come_by_their_chances(options, expected):
    count = 20_000
    # The bound is six standard deviations of a binomial distribution.
    bound = 6 * np.sqrt(np.maximum(np.multiply(expected, np.subtract(1, expected)), 1e-9) / count)
    share = draws(count, **options) / count
    assert (np.abs(share - expected) <= bound + 1e-4).all()


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.875, 3)])
def test_chances_that_add_up_to_exactly_top_p_are_enough(top_p, kept):
    """The chances 1/2, 1/4, 1/8 and 1/8, of which the last two differ by a rounding, are exact."""
    logits = np.log(2) * -np.arange(1, 4, dtype=np.float32)
    logits = jnp.asarray([[*logits, logits[-1] - 3e-7]])
    chances = np.asarray(jax.nn.softmax(logits))[0]
    np.testing.assert_array_equal(chances[:3], [1 / 2, 1 / 4, 1 / 8])
    assert logits[0, 2] != logits[0, 3]
    sampling = make_sampling(1.0, None, top_p, (), jax.random.key(0))
    drawn = draw_tokens(sampling, jnp.broadcast_to(logits, (2000, 4)), 5)
    assert set(np.asarray(drawn).tolist()) == set(range(kept))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        ({"max_new_tokens": 2048}, "14 tokens and 2048 new tokens exceed the model's 2048"),
        ({"max_new_tokens": 2**31 - 1}, "14 tokens and 2147483647 new tokens exceed .* 2048"),
        ({"max_new_tokens": 2**31}, "exceed the model's 2048 positions"),
        ({"max_new_tokens": 2**64}, "exceed the model's 2048 positions"),
        ({"max_new_tokens": 2**31 - 1, "lengths": [1]}, "exceed the model's 2048 positions"),
        ({"max_new_tokens": 2**31 - 1, "prefill_chunk": 4}, "exceed the model's 2048 positions"),
        ({"lengths": [0]}, "lengths: expected 1 integers from 1 to 14"),
        ({"lengths": [15]}, "lengths: expected"),
        ({"lengths": [2**32 + 3]}, "lengths: expected"),
        ({"lengths": [2.5]}, "lengths: expected"),
        ({"lengths": 3}, "lengths: expected"),
        ({"lengths": [3, 3]}, "lengths: expected"),
        ({"temperature": -1.0}, "temperature: expected a finite number, 0 or more"),
        ({"temperature": float("nan")}, "temperature: expected a finite number, 0 or more"),
        ({"temperature": float("inf")}, "temperature: expected a finite number, 0 or more"),
        ({"temperature": 10**400}, "temperature: expected a finite number, 0 or more"),
        ({"temperature": -1e-45}, "temperature: expected a finite number, 0 or more"),
        ({"temperature": 1.0}, "key: expected a jax.random.key"),
        ({"temperature": 1e-38}, "key: expected a jax.random.key"),
        ({"top_k": 0}, "top_k: expected at least 1"),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_p": -1e-45}, "top_p"),
        ({"stop_ids": [2**31]}, "stop_ids: expected ids from 0 to 2147483647, got 2147483648"),
        ({"stop_ids": [3, -1]}, "stop_ids: expected ids from 0 to"),
    ],
)
def test_arguments_out_of_range(example, prompt, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(example, prompt, **({"max_new_tokens": 4} | arguments))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 2.0),
        ("max_new_tokens", None),
        ("prefill_chunk", 2.5),
        ("top_k", 1.5),
        ("temperature", "1"),
        ("top_p", None),
        ("stop_ids", 5),
        ("stop_ids", "end"),
        ("stop_ids", [1.0]),
    ],
)
def test_arguments_of_a_wrong_type(example, prompt, name, value):
    with pytest.raises(TypeError, match=f"{name}: expected"):
        generate(example, prompt, **{"max_new_tokens": 4, name: value})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((1, 0), np.int32), "at least one token"),
        (np.zeros(4, np.int32), r"expected integers \[b, t\]"),
        (np.zeros((1, 4)), "expected integers"),
        (np.full((1, 4), 4096), "expected ids from 0 to 4095"),
        ([[1, 2], [1]], "input_ids: expected integers .* lengths given; got rows"),
    ],
)
def test_prompts_that_are_none(example, ids, message):
    with pytest.raises(ValueError, match=message):
        generate(example, ids, max_new_tokens=1)
