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

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import Backend, Capability, Device, Target


def read_rows(
    table: Shaped[Array, "v h"], ids: Int32[Array, "..."], target: Target | None = None
) -> Shaped[Array, "... h"]:
    """Return ``table[ids]``. Ids beyond an end read the row at that end.

    Args:
      table: array of any dtype.
      ids: indices of rows.
      target: the `Target` to lower for. None (default) lowers for any platform.
    """
    if target is not None and target.platform != "cpu":
        return _read_rows(table, ids)
    return _read_rows_anywhere(table, ids)


@jax.custom_jvp
def _read_rows_anywhere(table, ids):
    run = by_rows(_choose("read_rows", _read_rows), "-, ... -> ... _")
    return run(table, ids)


@_read_rows_anywhere.defjvp
def _read_rows_jvp(primals, tangents):
    return _read_rows_anywhere(*primals), _read_rows(tangents[0], primals[1])


def _read_rows(table, ids):
    return table.at[ids].get(mode="clip")


@jax.custom_jvp
def gather_rows(table: Shaped[Array, "v h"], ids: Int32[Array, "..."]) -> Shaped[Array, "... h"]:
    """Return ``table[ids]`` as `read_rows` does, by XLA's gather, for many wide rows.

    Pairs of 16-bit numbers move as one of 32 bits. XLA gathers number by number: on an H200, 16384
    rows of 12288 numbers take 162 us instead of 259.
    """
    if table.dtype.itemsize != 2 or table.shape[1] % 2:
        return _read_rows(table, ids)
    pairs = lax.bitcast_convert_type(table.reshape(len(table), -1, 2), jnp.uint32)
    rows = lax.bitcast_convert_type(_read_rows(pairs, ids), table.dtype)
    return rows.reshape(*ids.shape, table.shape[1])


@gather_rows.defjvp
def _gather_rows_jvp(primals, tangents):
    return gather_rows(*primals), _read_rows(tangents[0], primals[1])


def _read_rows_cpu(table, ids):
    rows = jax.ShapeDtypeStruct((ids.size, table.shape[1]), table.dtype)
    call = kernel_call("nvfp4_read_rows_cpu", rows)
    return call(table, ids.reshape(-1)).reshape(*ids.shape, table.shape[1])


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
    return write_tokens(*primals), _write_tokens(entries_dot, primals[1], values_dot)


def _write_in_order(entries, positions, values):
    """Write the tokens, and keep the order in which a cache is stored.

    XLA would store the keys of a single row transposed inside its loops, and copy them at each
    call. It gathers what it constrains, so the constraint is a part of what each device runs.
    """
    written = _choose("write_tokens", _write_tokens)(entries, positions, values)
    return with_layout_constraint(written, Layout((0, 1, 2, 3)))


def _write_tokens(entries, positions, values):
    # The heads are indexed too. Without their index, XLA turns the scatter into copies of all
    # entries.
    rows, heads = jnp.arange(len(entries)), jnp.arange(entries.shape[1])
    place = entries.at[rows[:, None, None], heads, positions[:, :, None]]
    # JAX would take a negative index for one that counts from the end.
    return place.set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _write_tokens_cpu(entries, positions, values):
    whole = jax.ShapeDtypeStruct(entries.shape, entries.dtype)
    call = kernel_call(
        "nvfp4_write_tokens_cpu",
        whole,
        input_output_aliases={0: 0},
    )
    return call(entries, positions, values)


MOVES_CPU = Backend(
    name="moves_cpu",
    can=Capability(
        ops=frozenset({"read_rows", "write_tokens"}),
        devices=(Device(frozenset({None})),),
        platform="cpu",
        extension="_nvfp4_cpu",
    ),
    layout=CANONICAL,
    lower={"read_rows": _read_rows_cpu, "write_tokens": _write_tokens_cpu},
    status="executed, measured",
    ffi_targets=("nvfp4_read_rows_cpu", "nvfp4_write_tokens_cpu"),
)


def _choose(op, plain):
    """Return the kernel of `op` where the program is lowered for a CPU, and `plain` elsewhere."""
    if _ffi.why_unavailable(MOVES_CPU.can.extension) is not None:
        return plain
    return functools.partial(lax.platform_dependent, cpu=MOVES_CPU.lower[op], default=plain)
