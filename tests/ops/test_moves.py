"""Test the kernels that read rows and write tokens on a CPU: bytes, limits, derivatives, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_nvfp4_moe.ops import moves

CPU = jax.devices("cpu")[0]
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int32")


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    with jax.default_device(CPU):
        yield


def random(dtype, *shape):
    return np.random.default_rng(len(shape)).normal(0, 50, shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_table(dtype):
    table, ids = random(dtype, 7, 5), np.array([[3, 0, 6], [6, 2, 3]], np.int32)
    program = jax.jit(moves.read_rows).lower(table, ids)
    assert "nvfp4_read_rows_cpu" in program.as_text()
    np.testing.assert_array_equal(program.compile()(table, ids), table[ids])
    outside = moves.read_rows(jnp.asarray(table), jnp.array([-1, 7, 2**31 - 1]))
    np.testing.assert_array_equal(outside, table[[0, 6, 6]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_come_to_their_positions(dtype):
    entries, values = random(dtype, 2, 3, 6, 4), random(dtype, 2, 4, 3, 4)
    positions = np.array([[5, 0, 2, 6], [1, 2**30, 7, 4]], np.int32)  # 6, 7 and 2^30: not written
    expected = entries.copy()
    for row, token in np.argwhere(positions < 6):
        expected[row, :, positions[row, token]] = values[row, token]
    program = jax.jit(moves.write_tokens, donate_argnums=0).lower(entries, positions, values)
    assert "nvfp4_write_tokens_cpu" in program.as_text()
    given = jnp.asarray(entries)
    address = given.unsafe_buffer_pointer()
    written = program.compile()(given, positions, values)
    np.testing.assert_array_equal(written, expected)
    assert written.unsafe_buffer_pointer() == address
    assert (expected != entries).any()


def test_no_program_converts_the_whole_array():
    """XLA of jax 0.10 makes a float32 copy for its own gather or scatter, and newer ones do not."""
    xla_converts = jax.__version_info__ < (0, 11)

    def count(function, *operands):
        text = jax.jit(function).lower(*operands).compile().as_text()
        return text.count("f32[4096,64]") + text.count("f32[1,2,4096,8]")

    table, ids = jnp.zeros((4096, 64), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    assert not count(moves.read_rows, table, ids)
    assert (count(moves.read_rows_meaning, table, ids) > 0) == xla_converts
    entries, values = (
        jnp.zeros((1, 2, 4096, 8), jnp.bfloat16),
        jnp.zeros((1, 3, 2, 8), jnp.bfloat16),
    )
    assert not count(moves.write_tokens, entries, ids[None], values)
    assert (count(moves.write_tokens_meaning, entries, ids[None], values) > 0) == xla_converts


def test_derivatives_and_batches():
    table, ids = jnp.asarray(random("float32", 7, 5)), jnp.array([3, 3, 0])
    weights = jnp.arange(15.0).reshape(3, 5)
    gradient = jax.grad(lambda table: (moves.read_rows(table, ids) * weights).sum())(table)
    np.testing.assert_array_equal(gradient, jnp.zeros((7, 5)).at[ids].add(weights))
    entries, values = jnp.ones((1, 2, 4, 3)), jnp.asarray(random("float32", 1, 2, 2, 3))
    positions = jnp.array([[2, 9]])

    def squares(entries, values):
        return (moves.write_tokens(entries, positions, values) ** 2).sum()

    found = jax.grad(squares, argnums=(0, 1))(entries, values)
    np.testing.assert_array_equal(found[0], (2 * entries).at[:, :, 2].set(0))
    np.testing.assert_array_equal(found[1], (2 * values).at[:, 1].set(0))
    batched = jax.vmap(moves.read_rows)(jnp.stack([table, -table]), jnp.stack([ids, ids]))
    np.testing.assert_array_equal(batched, jnp.stack([table[ids], -table[ids]]))


@pytest.mark.parametrize("shape", [(0, 5), (7, 0)])
def test_nothing_to_read(shape):
    ids = jnp.zeros(0, jnp.int32)
    assert moves.read_rows(jnp.zeros(shape), ids).shape == (0, shape[1])


@pytest.mark.parametrize(
    ("target", "index", "operand", "message"),
    [
        ("read_rows", 1, np.zeros(3, np.uint32), "ids.*expected"),
        ("read_rows", 0, np.zeros((7, 4), np.float32), "rows.*expected"),
        ("write_tokens", 1, np.zeros((1, 3), np.int32), "values.*expected"),
        ("write_tokens", 2, np.zeros((1, 2, 2, 3), np.int32), "values.*expected"),
    ],
)
def test_wrong_operands_are_named(target, index, operand, message):
    table, entries = np.zeros((7, 5), np.float32), np.zeros((1, 2, 4, 3), np.float32)
    operands, result = {
        "read_rows": ([table, np.zeros(3, np.int32)], (3, 5)),
        "write_tokens": (
            [entries, np.zeros((1, 2), np.int32), np.zeros((1, 2, 2, 3), np.float32)],
            entries.shape,
        ),
    }[target]
    operands[index] = operand
    result = jax.ShapeDtypeStruct(result, jnp.float32)
    call = jax.ffi.ffi_call(f"nvfp4_{target}_cpu", result)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*operands))
