"""Read rows of a table, and write tokens into a cache, on a CPU by kernels that copy bytes.

On a CPU, XLA of jax 0.10 gathers and scatters numbers of less than 32 bits in float32. It converts
the whole array first, and after a scatter it converts the result back. With these operations, each
call of `generate` would make a float32 copy of the embedding, which is 1.2 GB for Qwen3-30B-A3B.
Each step would convert the keys and values of all layers. Other platforms take XLA's gather and
scatter.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int32, Shaped

from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CPU, Backend, Kernel
from jax_nvfp4_moe.ops.running import find_plan, lower_anywhere
from jax_nvfp4_moe.scheme import Target


def read_rows(
    table: Shaped[Array, "v h"], ids: Int32[Array, "..."], target: Target | None = None
) -> Shaped[Array, "... h"]:
    """Return ``table[ids]``. Ids beyond an end read the row at that end.

    Args:
      table: array of any dtype.
      ids: indices of rows.
      target: the `Target` to lower for. None (default) lowers for any platform.
    """
    facts = {"dtype": table.dtype.name}
    if target is None:
        lower = lower_anywhere("read_rows", **facts)
    else:
        lower = find_plan("read_rows", target=target, **facts).lower
    return read_rows_meaning(table, ids) if lower is read_rows_meaning else _read(lower, table, ids)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _read(lower, table, ids):
    return by_rows(lower, "-, ... -> ... _")(table, ids)


@_read.defjvp
def _read_jvp(lower, primals, tangents):
    return _read(lower, *primals), read_rows_meaning(tangents[0], primals[1])


def read_rows_meaning(table, ids):
    """Read rows as XLA does."""
    return table.at[ids].get(mode="clip")


@jax.custom_jvp
def gather_rows(table: Shaped[Array, "v h"], ids: Int32[Array, "..."]) -> Shaped[Array, "... h"]:
    """Return ``table[ids]`` as `read_rows` does, by XLA's gather, for many wide rows.

    Pairs of 16-bit numbers move as one of 32 bits. XLA gathers number by number: on an H200, 16384
    rows of 12288 numbers take 162 us instead of 259.
    """
    if table.dtype.itemsize != 2 or table.shape[1] % 2:
        return read_rows_meaning(table, ids)
    pairs = lax.bitcast_convert_type(table.reshape(len(table), -1, 2), jnp.uint32)
    rows = lax.bitcast_convert_type(read_rows_meaning(pairs, ids), table.dtype)
    return rows.reshape(*ids.shape, table.shape[1])


@gather_rows.defjvp
def _gather_rows_jvp(primals, tangents):
    return gather_rows(*primals), read_rows_meaning(tangents[0], primals[1])


def _read_rows_cpu(ffi_target, table, ids):
    rows = jax.ShapeDtypeStruct((ids.size, table.shape[1]), table.dtype)
    return kernel_call(ffi_target, rows)(table, ids.reshape(-1)).reshape(*ids.shape, table.shape[1])


@jax.custom_jvp
def write_tokens(
    entries: Shaped[Array, "b m s d"],
    positions: Int32[Array, "b t"],
    values: Shaped[Array, "b t m d"],
) -> Shaped[Array, "b m s d"]:
    """Return a cache with the keys or the values of new tokens at their positions.

    Args:
      entries: keys or values in the cache, of any dtype. If the caller donates the array, it is
        changed in place.
      positions: position of each token, all different in a row. Tokens at positions below 0 and of
        s or more are dropped.
      values: keys or values of the new tokens, in the dtype of `entries`.
    """
    return by_rows(_write_in_order, "b, b, b -> b")(entries, positions, values)


@write_tokens.defjvp
def _write_tokens_jvp(primals, tangents):
    entries_dot, _, values_dot = tangents
    return write_tokens(*primals), write_tokens_meaning(entries_dot, primals[1], values_dot)


def _write_in_order(entries, positions, values):
    """Write the tokens, and keep the order in which a cache is stored.

    XLA would store the keys of a single row transposed inside its loops, and copy them at each
    call. It gathers what it constrains, so the constraint is a part of what each device runs.
    """
    written = lower_anywhere("write_tokens", dtype=entries.dtype.name)(entries, positions, values)
    return with_layout_constraint(written, Layout((0, 1, 2, 3)))


def write_tokens_meaning(entries, positions, values):
    """Write tokens as XLA does."""
    # The heads are indexed too. Without their index, XLA turns the scatter into copies of all
    # entries.
    rows, heads = jnp.arange(len(entries)), jnp.arange(entries.shape[1])
    place = entries.at[rows[:, None, None], heads, positions[:, :, None]]
    # JAX would take a negative index for one that counts from the end.
    return place.set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _write_tokens_cpu(ffi_target, entries, positions, values):
    whole = entries
    return kernel_call(ffi_target, whole, input_output_aliases={0: 0})(entries, positions, values)


MOVES_CPU = Backend(
    "moves_cpu",
    {
        "read_rows": Kernel(_read_rows_cpu, "nvfp4_read_rows_cpu"),
        "write_tokens": Kernel(_write_tokens_cpu, "nvfp4_write_tokens_cpu"),
    },
    (CPU,),
    dtypes=None,
    status="executed, measured",
)


BACKENDS = (MOVES_CPU,)
OF_XLA = {"read_rows": read_rows_meaning, "write_tokens": write_tokens_meaning}
