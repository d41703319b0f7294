"""The subcommand `bench`: the time of one expert layer of random weights on this device."""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jax_nvfp4_moe.cli.options import BackendOption, DtypeOption, SchemeOption
from jax_nvfp4_moe.cli.output import table
from jax_nvfp4_moe.models.loading import find_dtype
from jax_nvfp4_moe.ops.moe import moe_mlp
from jax_nvfp4_moe.ops.preparation import convert, plan_experts
from jax_nvfp4_moe.scheme import Scheme
from jax_nvfp4_moe.testing import random_moe_params, random_routing


def bench_command(
    tokens: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,16,64",
    experts: Annotated[int, typer.Option(help="Number of experts.")] = 128,
    hidden: Annotated[int, typer.Option(help="Width of tokens.")] = 2048,
    intermediate: Annotated[int, typer.Option(help="Width of an expert.")] = 768,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
) -> None:
    """Time one expert layer (of Qwen3-30B-A3B's sizes) on this device."""
    counts = _positive_numbers("tokens", tokens)
    rows = layer_times(
        counts,
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        top_k=top_k,
        scheme=scheme,
        dtype=dtype,
        backend=backend,
    )
    print("\n".join(table(rows)))


def _positive_numbers(name, text) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}: expected positive numbers separated by commas, got {text!r}")
    return [int(part) for part in parts]


def layer_times(
    tokens: Sequence[int],
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    scheme: str | None = None,
    dtype: str = "bfloat16",
    backend: str | Sequence[str] | None = None,
) -> Iterator[tuple[str, ...]]:
    """Return a table of one row for each number of tokens: microseconds and GB/s of weights.

    Args:
      tokens: numbers of tokens to time, one after the other.
      experts, hidden, intermediate, top_k: sizes of the layer.
      scheme, dtype, backend: as for `ops.moe_mlp`, of weights with input scales.

    Raises:
      ValueError: an argument is unknown, or a size is no multiple of 16.
      NoBackendError: no backend fits.
    """
    kind = find_dtype(dtype)
    params = random_moe_params(
        jax.random.key(0), num_experts=experts, hidden=hidden, intermediate=intermediate
    )
    how = {"scheme": scheme, "backend": backend, "dtype": kind, "top_k": top_k}
    plan = plan_experts(params, checkpoint_scheme=Scheme.W4A4, **how)
    params = convert(params, plan.layout)

    @jax.jit
    def layer(x, params, ids, weights):
        return moe_mlp(x, params, ids, weights, plan=plan)

    yield "tokens", "us", "GB/s of weights", "scheme", "backend"
    for count in tokens:
        ids, weights = random_routing(jax.random.key(1), count, experts, top_k)
        x = jax.random.normal(jax.random.key(2), (count, hidden), jnp.float32).astype(kind)
        seconds = _median_seconds(lambda x=x, i=ids, w=weights: layer(x, params, i, w))
        read = params.nbytes / experts * len(np.unique(ids))
        rate = f"{read / seconds / 1e9:.1f}"
        yield str(count), f"{seconds * 1e6:.1f}", rate, str(plan.scheme), plan.backend.name


def _median_seconds(call) -> float:
    """Return the median time of one call of several, the first ones left out."""
    jax.block_until_ready(call())
    times = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < 1.0 and len(times) < 200):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))
