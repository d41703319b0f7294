"""Test that chains of calls compute what the calls compute, and that calls are joined correctly."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.numpy_weights import random_tensor

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe import ops
from jax_nvfp4_moe.backends.chains import emission
from jax_nvfp4_moe.backends.chains.calls import Call, Value
from jax_nvfp4_moe.ops.dense import DENSE_CPU
from jax_nvfp4_moe.ops.records import RECORDS

# Chains of GPUs have tests of their own; these have the calls of CPUs.
pytestmark = pytest.mark.usefixtures("on_cpu")

CUDA = nvfp4.Target("cuda", (9, 0))
KEY = jax.random.key(0)


WIDE, NARROW = random_tensor(1, 96, 64), random_tensor(2, 64, 96)
X = np.random.default_rng(0).standard_normal((4, 64)).astype(jnp.bfloat16)


def linear(x, matrix):
    return ops.linear(x, matrix, backend="moe_w4a16_cpu")


def two(x):
    """Two calls: the second reads a reshaped result of the first."""
    return linear(linear(x, WIDE).reshape(2, 2, 96), NARROW).reshape(4, 64)


def branches(x):
    """A result is read twice, and another one is a result of the function."""
    inside = linear(x, WIDE)
    return linear(inside, NARROW), linear(inside, NARROW).reshape(-1), inside


def interrupted(x):
    """Another operation on a result divides the calls into two chains."""
    return two(two(x) + 1)


def beside(x):
    """An operation on operands of the function alone divides nothing."""
    inside = linear(x, WIDE)
    return linear(inside, NARROW), x * 2


def nested(x):
    """Functions inside of the function are entered. The program has `two` once."""
    return jax.jit(two)(jax.jit(two)(x))


def held(x):
    """A result inside of the chain is read after other calls have written theirs."""
    inside = linear(x, WIDE)
    return linear(linear(inside, NARROW), WIDE), linear(inside, NARROW)


def plain(x):
    """The second call has no attributes."""
    matrix = jax.random.normal(KEY, (32, 96), jnp.float32).astype(jnp.bfloat16)
    inside = linear(x.astype(jnp.float32), WIDE)
    return DENSE_CPU.lower["dense"](inside, matrix, None, jnp.float32)


def experts(x):
    params = nvfp4.testing.random_moe_params(KEY, num_experts=4, hidden=64, intermediate=32)
    ids = jnp.array([[0, 1], [3, -1], [2, 2], [1, 0]], jnp.int32)
    y = ops.moe_mlp(x, params, ids, jnp.ones((4, 2)), backend="moe_w4a16_cpu")
    return linear(y, WIDE)


def single(x):
    return linear(x, WIDE)


def calls_of(function, *operands):
    """Return the names of the custom calls of ours in the program."""
    text = jax.jit(function).lower(*operands).as_text()
    return re.findall(r"custom_call @(nvfp4_\w+)\(", text)


@pytest.mark.parametrize(
    ("function", "calls", "chains"),
    [
        (two, 2, 1),
        (branches, 3, 1),
        (interrupted, 4, 2),
        (beside, 2, 1),
        (nested, 2, 1),
        (held, 4, 1),
        (plain, 2, 1),
        (experts, 2, 1),
        (single, 1, 0),
    ],
)
def test_results_have_the_same_bits(function, calls, chains):
    chained = ops.chain_calls(function)
    assert len(calls_of(function, X)) == calls
    joined = [name for name in calls_of(chained, X) if name == "nvfp4_call_chain_cpu"]
    assert len(joined) == chains
    for got, expected in zip(
        jax.tree.leaves(jax.jit(chained)(X)), jax.tree.leaves(jax.jit(function)(X)), strict=True
    ):
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)


def test_values_in_the_same_memory_are_seen(monkeypatch):
    """The comparison above fails if a result overwrites another one that is still needed."""
    # Workspaces, which have tables of indices, stay apart from the results.
    monkeypatch.setattr(emission, "_first_gap", lambda n, taken: 0 if n < 1024 else 1024)
    got, expected = (jax.jit(f)(X)[1] for f in (ops.chain_calls(held), held))
    assert not np.array_equal(got, expected)


def test_arguments_and_results_may_be_trees():
    def function(tree, *, factor=1):
        return {"y": two(tree["x"]) * factor, "none": None}

    got = jax.jit(ops.chain_calls(function))({"x": X, "unused": jnp.zeros(3)})
    np.testing.assert_array_equal(got["y"], two(X))
    assert got["none"] is None


def test_functions_without_calls_stay_as_they_are():
    def function(x, key):
        drawn = jax.random.normal(key, x.shape)
        return jax.lax.cond(x.sum() > 0, lambda x: x, lambda x: -x, x) + drawn, jnp.float32(3)

    got = jax.jit(ops.chain_calls(function))(jnp.ones(3), KEY)
    for mine, expected in zip(got, jax.jit(function)(jnp.ones(3), KEY), strict=True):
        np.testing.assert_array_equal(mine, expected)


def heads(qkv, positions, keys, values, **options):
    return ops.prepare_heads(
        qkv, positions, keys, values, target=CUDA, backend="heads_cuda", **options
    )


CACHE = jax.ShapeDtypeStruct((1, 1, 8, 64), jnp.bfloat16)
HEADS = (jax.ShapeDtypeStruct((1, 1, 256), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1), jnp.int32))


def attend(q, keys, values, positions):
    return ops.attention(q, keys, values, positions, target=CUDA, backend="attention_cuda")


def test_a_chain_updates_its_operands_in_place():
    def step(qkv, positions, keys, values):
        q, keys, values = heads(qkv, positions, keys, values)
        return attend(q, keys, values, positions), keys, values

    text = jax.jit(ops.chain_calls(step)).lower(*HEADS, CACHE, CACHE).as_text()
    assert len(re.findall(r"custom_call @nvfp4", text)) == 1
    pairs = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", text)
    assert len(set(pairs)) == 2


def test_a_chain_updates_reshaped_operands_in_place():
    def step(qkv, positions, keys, values):
        q, keys, values = heads(qkv, positions, keys[:, 0], values[:, 0])
        return attend(q, keys, values, positions), keys[:, None], values[:, None]

    caches = (jax.ShapeDtypeStruct((1, *CACHE.shape), CACHE.dtype),) * 2
    text = jax.jit(ops.chain_calls(step)).lower(*HEADS, *caches).as_text()
    assert len(re.findall(r"custom_call @nvfp4", text)) == 1
    pairs = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", text)
    assert len(set(pairs)) == 2


def test_values_inside_of_a_chain_are_not_updated_in_place():
    """A second write to the same cache begins another chain."""

    def step(qkv, positions, keys, values):
        _, keys, values = heads(qkv, positions, keys, values)
        return heads(qkv, positions + 1, keys, values)

    found = calls_of(ops.chain_calls(step), *HEADS, CACHE, CACHE)
    assert found == ["nvfp4_prepare_heads_cuda"] * 2


def test_what_was_overwritten_is_not_read_by_the_same_chain():
    def step(qkv, positions, keys, values):
        q, new_keys, new_values = heads(qkv, positions, keys, values)
        y = attend(q, new_keys, new_values, positions)
        return attend(y, keys, values, positions), new_keys, new_values

    found = calls_of(ops.chain_calls(step), *HEADS, CACHE, CACHE)
    assert found == ["nvfp4_call_chain_cuda", "nvfp4_attention_cuda"]


def test_a_chain_holds_latent_attention():
    def step(q, latents, positions):
        options = {"value_width": 64, "target": CUDA, "backend": "latent_attention_cuda"}
        y = ops.attention(q, latents, None, positions, **options)
        x = y.reshape(1, 64)
        return ops.add_rms_norm(x, None, jnp.ones(64), eps=1e-6, target=CUDA, backend="norm_cuda")

    latents = jax.ShapeDtypeStruct((1, 1, 300, 80), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((1, 1, 1, 80), jnp.bfloat16)
    assert calls_of(ops.chain_calls(step), q, latents, HEADS[1]) == ["nvfp4_call_chain_cuda"]


def test_a_convolution_ends_a_chain():
    """Its `widths` are an array, which JAX cannot hash as an attribute of a chain."""

    def step(x, positions, past, taps):
        normal, _ = ops.add_rms_norm(
            x, None, jnp.ones(64), eps=1e-6, target=CUDA, backend="norm_cuda"
        )
        options = {"widths": (32, 32), "target": CUDA, "backend": "convolution_cuda"}
        parts, _ = ops.causal_convolution(normal[None], positions, past, weight=taps, **options)
        return linear(parts[0][0].astype(jnp.bfloat16), weight_of_32), parts

    weight_of_32 = random_tensor(3, 64, 32)
    x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    past = jax.ShapeDtypeStruct((1, 3, 64), jnp.bfloat16)
    taps = jax.ShapeDtypeStruct((64, 4), jnp.bfloat16)
    found = calls_of(ops.chain_calls(step), x, positions, past, taps)
    assert "nvfp4_causal_convolution_cuda" in found
    assert "nvfp4_call_chain_cuda" not in found


def test_calls_of_two_platforms_are_not_joined():
    def step(q, keys, values, positions):
        return linear(attend(q, keys, values, positions).reshape(1, 64), WIDE)

    q = jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)
    found = calls_of(ops.chain_calls(step), q, CACHE, CACHE, HEADS[1])
    assert found == ["nvfp4_attention_cuda", "nvfp4_grouped_gemm_w4a16_cpu"]


@pytest.mark.parametrize("seed", range(5))
def test_values_that_are_needed_at_once_share_no_memory(seed):
    rng = np.random.default_rng(seed)
    values, calls = [], []
    for _ in range(30):
        results = [Value((int(rng.integers(0, 3000)),), jnp.uint8) for _ in range(2)]
        some = rng.choice(len(values), 2) if values else ()
        operands = [(values[index], values[index].shape) for index in some]
        calls.append(Call("target", {}, operands, results, {}))
        values += results
    kept = set(values[::7])
    offsets, size = emission._place_scratch(calls, kept)
    assert offsets.keys() == set(values) - kept
    assert size < sum(value.nbytes for value in offsets)  # memory is shared at all
    needed = {
        value: [i for i, c in enumerate(calls) if value in {*c.results, *dict(c.operands)}]
        for value in offsets
    }
    for one, two_ in ((a, b) for a in offsets for b in offsets if a is not b):
        apart = needed[one][-1] < needed[two_][0] or needed[two_][-1] < needed[one][0]
        before = offsets[one] + one.nbytes <= offsets[two_]
        after = offsets[two_] + two_.nbytes <= offsets[one]
        assert apart or before or after
        assert offsets[one] % 256 == 0
        assert offsets[one] + one.nbytes <= size


def test_numbers_of_dtypes_are_those_of_xla():
    with open(f"{jax.ffi.include_dir()}/xla/ffi/api/c_api.h", encoding="utf-8") as header:
        text = header.read()
    codes = dict(re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", text))
    names = {"PRED": "bool", "BF16": "bfloat16", "F8E4M3FN": "float8_e4m3fn"}
    for short, long in (("S", "int"), ("U", "uint"), ("F", "float")):
        names |= {f"{short}{bits}": f"{long}{bits}" for bits in (8, 16, 32)}
    found = {names[code]: int(number) for code, number in codes.items() if code in names}
    assert found.items() >= emission.DATA_TYPES.items()


X_BUFFER = (0, 0, 11, 2, 4, 64)
WEIGHT_BUFFER = (0, 1, 16, 2, 32, 64)
Y_BUFFER = (1, 0, 11, 2, 4, 32)
FAULTS = {
    "target": ({"target": "nvfp4_other"}, "unknown target nvfp4_other"),
    "count": ({"buffers": (9, 1, 0, *X_BUFFER)}, "do not fit"),
    "negative": ({"buffers": (-1, 1, 0, *X_BUFFER)}, "do not fit"),
    "place": ({"buffers": (2, 1, 0, 7, *X_BUFFER[1:], *WEIGHT_BUFFER, *Y_BUFFER)}, "do not fit"),
    "operand": (
        {"buffers": (2, 1, 0, 0, 5, *X_BUFFER[2:], *WEIGHT_BUFFER, *Y_BUFFER)},
        "do not fit",
    ),
    "shape": (
        {"buffers": (2, 1, 0, *X_BUFFER[:4], 4, 63, *WEIGHT_BUFFER, *Y_BUFFER)},
        "do not fit",
    ),
    "scratch": (
        {"buffers": (2, 1, 0, *X_BUFFER, *WEIGHT_BUFFER, 2, 1, *Y_BUFFER[2:])},
        "do not fit",
    ),
    "cut": ({"buffers": (2, 1, 0, *X_BUFFER, *WEIGHT_BUFFER, *Y_BUFFER[:-1])}, "do not fit"),
    "empty": ({"buffers": ()}, "expected int64 numbers"),
    "attributes": ({"attributes": "text"}, "expected a dictionary"),
    "own": ({"attributes": {"isa": "none"}}, "isa"),
}


def run_dense(**changes):
    """Run a chain whose only call multiplies by a dense matrix."""
    parts = {
        "attributes": {"isa": "auto"},
        "buffers": (2, 1, 0, *X_BUFFER, *WEIGHT_BUFFER, *Y_BUFFER),
        "target": "nvfp4_dense_cpu",
    } | changes
    parts["buffers"] = np.array(parts["buffers"], np.int64)
    shapes = [jax.ShapeDtypeStruct((4, 32), jnp.float32), jax.ShapeDtypeStruct((512,), jnp.uint8)]
    call = jax.ffi.ffi_call("nvfp4_call_chain_cpu", shapes)
    matrix = jax.random.normal(KEY, (32, 64), jnp.bfloat16)
    attributes = {f"call_000000_{name}": value for name, value in parts.items()}
    x = X.astype(np.float32)
    alone = DENSE_CPU.lower["dense"](x, matrix, None, jnp.float32)
    return np.asarray(call(x, matrix, **attributes)[0]), np.asarray(alone)


def test_a_chain_by_hand():
    assert any("nvfp4_call_chain_cpu" in record.ffi_targets for record in RECORDS)
    y, expected = run_dense()
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_descriptions_are_refused(name):
    changes, message = FAULTS[name]
    with pytest.raises(Exception, match=message):
        run_dense(**changes)
