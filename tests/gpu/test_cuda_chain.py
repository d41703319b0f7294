"""Decode with chains of calls on a GPU: the bits are those of separate calls."""

import concurrent.futures
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files.given import CHECKPOINTS
from support.models.architecture import EACH_MIXER
from support.ops.shared_expert_block import HIDDEN, make_layer, run_layers

from jax_nvfp4_moe import Target, generate, load_model, ops
from jax_nvfp4_moe.backends.chains import emission
from jax_nvfp4_moe.inference import generation

pytestmark = pytest.mark.gpu

STEPS = 24
FP8_CACHES = ("qwen3_moe-ct-w4a4-kv8", "qwen3_moe-modelopt-mixed-w4a16-kv8")


# XLA chooses its own products by timing them, and may choose others for the same product of another
# program. Their sums differ in the last bit. Without timing, it chooses by the shape. It may also
# fuse its own operations in another way, and a fused kernel has other multiply-adds, exponentials
# and orders of sums. Without fusions, each operation is a kernel of its own.
SAME_OPERATIONS = {
    "xla_gpu_autotune_level": 0,
    "xla_disable_hlo_passes": "priority-fusion,multi_output_fusion",
}


@pytest.fixture(autouse=True)
def own_programs():
    """Compile both programs of a test in this process.

    `generate` has no option for XLA's operations. A program from the cache of another process may
    have other ones.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@functools.partial(jax.jit, compiler_options=SAME_OPERATIONS)
def read(model, ids, cache):
    return model(ids, cache)


@functools.partial(jax.jit, compiler_options=SAME_OPERATIONS)
def read_in_chains(model, ids, cache):
    return ops.chain_calls(generation._read)(model, ids, cache)


def decode(model, step, batch):
    """Return the logits of all steps, after a prompt that `read` reads."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.config.vocab_size, (STEPS + 1, batch, 1), np.int32)
    prompt = rng.integers(0, model.config.vocab_size, (batch, 9), np.int32)
    _, cache = read(model, prompt, model.init_cache(batch, 9 + STEPS + 1))
    logits = []
    for new in ids:
        new_logits, cache = step(model, new, cache)
        logits.append(new_logits)
    return np.asarray(jnp.stack(logits)), cache


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("folder", [*EACH_MIXER, "qwen3_5_moe-modelopt-w4a16"])
def test_chains_have_the_bits_of_calls(folder, batch):
    assert_chains_have_the_bits_of_calls(load_model(CHECKPOINTS / folder), batch)


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("folder", FP8_CACHES)
def test_chains_with_an_fp8_cache_have_the_bits_of_calls(folder, batch):
    model = load_model(CHECKPOINTS / folder, scheme="checkpoint")
    assert model.init_cache(1, 8).layers[0]["k"].dtype == jnp.float8_e4m3fn
    assert_chains_have_the_bits_of_calls(model, batch)


def assert_chains_have_the_bits_of_calls(model, batch):
    (got, cache), (expected, other) = (
        decode(model, step, batch) for step in (read_in_chains, read)
    )
    np.testing.assert_array_equal(got, expected)
    for one, two in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_step_is_a_few_calls():
    model = load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    cache, ids = model.init_cache(1, 32), jnp.zeros((1, 1), jnp.int32)
    alone, chained = (
        len(re.findall("custom_call @nvfp4", f.lower(model, ids, cache).as_text()))
        for f in (read, read_in_chains)
    )
    assert chained <= len(model.layers) + 1
    assert alone >= 4 * chained


@pytest.mark.parametrize("folder", ["qwen3moe-modelopt-w4a16", "qwen3_5_moe-modelopt-w4a16"])
def test_generate_runs_chains_in_a_graph(folder):
    """Many runs of the same graph give the tokens of single steps."""
    model = load_model(CHECKPOINTS / folder)
    prompt = np.arange(5, dtype=np.int32)[None]
    expected, cache = read(model, prompt, model.init_cache(1, 64))
    token, tokens = jnp.argmax(expected[:, -1:], axis=-1), []
    for _ in range(STEPS):
        tokens.append(int(token[0, 0]))
        logits, cache = read(model, token.astype(jnp.int32), cache)
        token = jnp.argmax(logits, axis=-1)
    for _ in range(20):
        assert generate(model, prompt, max_new_tokens=STEPS, stop_ids=())[0].tolist() == tokens


@pytest.fixture(scope="module")
def layers():
    """Four layers with shared experts."""
    return [make_layer(seed, Target.current()) for seed in range(4)]


def make_tokens(rows, seed=0):
    return jax.random.normal(jax.random.key(seed), (rows, HIDDEN), jnp.bfloat16)


@jax.jit
def run_alone(x, layers):
    return run_layers(x, layers, Target.current())


def run_beside(x, layers):
    """Run the layers in one chain, in which the shared experts are branches."""
    return ops.chain_calls(lambda x: run_layers(x, layers, Target.current()))(x)


ROWS = [1, 3, 16, 64]


def test_shared_experts_are_branches(layers, monkeypatch):
    """The tests below run branches at all."""
    found, find = [], emission.find_forks
    monkeypatch.setattr(emission, "find_forks", lambda *a: found.append(find(*a)) or found[-1])
    for rows in ROWS:
        jax.eval_shape(run_beside, make_tokens(rows), layers)
    assert [len(branches) for branches in found] == [len(layers)] * len(ROWS)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("run", [run_beside, jax.jit(run_beside)], ids=["eager", "jit"])
def test_branches_have_the_bits_of_calls(layers, run, rows):
    x = make_tokens(rows)
    expected = np.asarray(run_alone(x, layers))
    for _ in range(50):
        np.testing.assert_array_equal(run(x, layers), expected)


# Experts of three rows need no sort, and leave nothing. From 1056 rows on, norms do not overlap.
@pytest.mark.parametrize("rows", [3, 16, 64, 1100])
def test_norms_that_sum_over_experts_have_the_bits_of_calls(layers, rows):
    run = functools.partial(run_layers, target=Target.current(), shared=False)
    x = make_tokens(rows)
    expected = np.asarray(jax.jit(run)(x, layers))
    in_chain = jax.jit(lambda x, layers: ops.chain_calls(lambda x: run(x, layers))(x))
    for _ in range(20):
        np.testing.assert_array_equal(in_chain(x, layers), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_branches_in_a_loop_have_the_bits_of_calls(layers, rows):
    """The whole loop is one CUDA graph, as that of `generate`."""

    def loop(run):
        def steps(x, layers):
            return jax.lax.fori_loop(0, 50, lambda _, x: run(x, layers), x)

        return jax.jit(steps, compiler_options=generation._ONE_GRAPH)

    x = make_tokens(rows)
    expected = np.asarray(loop(run_alone)(x, layers))
    beside = loop(run_beside)
    for _ in range(20):
        np.testing.assert_array_equal(beside(x, layers), expected)


@pytest.mark.parametrize("run", [run_beside, jax.jit(run_beside)], ids=["eager", "jit"])
def test_branches_of_several_threads_have_the_bits_of_calls(layers, run):
    """Each thread takes a side stream and events of its own."""
    tokens = [make_tokens(rows, seed) for seed, rows in enumerate((1, 2, 4, 8))]
    expected = [np.asarray(run_alone(x, layers)) for x in tokens]

    def repeat(index):
        for _ in range(50):
            np.testing.assert_array_equal(run(tokens[index], layers), expected[index])

    with concurrent.futures.ThreadPoolExecutor(len(tokens)) as pool:
        for future in [pool.submit(repeat, index) for index in range(len(tokens))]:
            future.result()


@pytest.mark.parametrize(
    "folder",
    [
        "deepseek_v3-modelopt-mixed-w4a16-kv8",
        "deepseek_v4-modelopt-w4a16",  # its branches begin at the start of a chain
        "qwen3_5_moe-modelopt-w4a16",
    ],
)
def test_generate_with_branches_gives_the_tokens_without(folder, monkeypatch):
    model = load_model(CHECKPOINTS / folder)
    prompt = np.arange(8, dtype=np.int32).reshape(2, 4)
    found = [
        np.asarray(generate(model, prompt, max_new_tokens=STEPS, stop_ids=())) for _ in range(5)
    ]
    monkeypatch.setattr(generation, "chain_calls", lambda function: function)
    jax.clear_caches()  # otherwise `generate` would run the program that it has compiled
    expected = np.asarray(generate(model, prompt, max_new_tokens=STEPS, stop_ids=()))
    jax.clear_caches()
    for tokens in found:
        np.testing.assert_array_equal(tokens, expected)
