"""The subcommand `bench`: time one expert layer with random weights on this device."""

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jax_nvfp4_moe.checkpoint.errors import printable, quoted
from jax_nvfp4_moe.cli.devices import list_devices, memory_of
from jax_nvfp4_moe.cli.options import LARGEST, BackendOption, DtypeOption, SchemeOption, number
from jax_nvfp4_moe.cli.output import say, show, table, to_json
from jax_nvfp4_moe.cli.pictures import Cell, Limits, draw_roofline
from jax_nvfp4_moe.cli.timing import measure_copy, measure_matmul, time_program
from jax_nvfp4_moe.figures import check_plot, drawing
from jax_nvfp4_moe.models.loading import find_dtype
from jax_nvfp4_moe.ops.moe import moe_mlp
from jax_nvfp4_moe.ops.preparation import convert, plan_experts
from jax_nvfp4_moe.scheme import Scheme
from jax_nvfp4_moe.testing import random_moe_params, random_routing

_NVFP4_BYTES = 0.5625  # of a weight, with its share of a block scale
_HOST_BOUND = 0.9  # above this share, the time is that of the host and not of the device
# Size of the copy in GiB, and rows of the matrices. Both are larger than the caches, and small
# enough to run in a short time.
_CPU_SIZES, _OTHER_SIZES = (0.5, 1024), (1.0, 8192)


def bench_command(
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens to time, separated by commas.")
    ] = "1,16,64",
    experts: Annotated[int, number(help="Number of experts.")] = 128,
    hidden: Annotated[int, number(help="Width of the tokens.")] = 2048,
    intermediate: Annotated[int, number(help="Width between the two products of an expert.")] = 768,
    top_k: Annotated[int, number(help="Number of experts per token.")] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the measured limits of the device.")
    ] = False,
    plot: Annotated[
        pathlib.Path | None,
        typer.Option(help="Also draw a roofline to this file, such as roofline.png."),
    ] = None,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
) -> None:
    """Time one expert layer on this device.

    The default sizes are those of Qwen3-30B-A3B. The weights are random.
    """
    counts = _positive_numbers("tokens", tokens)
    if plot is not None:
        check_plot(plot)  # a wrong file name must not fail only after minutes of work
    sizes = {"experts": experts, "hidden": hidden, "intermediate": intermediate, "top_k": top_k}
    _check_memory(max(counts), **sizes)
    cells = time_layer(counts, **sizes, scheme=scheme, dtype=dtype, backend=backend)
    for cell in cells:
        if cell.host_share > _HOST_BOUND and jax.default_backend() != "cpu":
            say(f"{cell.tokens} tokens: starting the calls took as long as running them")
    if plot is None and not as_json:
        show("\n".join(table(_rows(cells))))
        return
    limits, device = measure_limits(dtype), jax.devices()[0].device_kind
    if plot is not None:
        title = f"{experts} experts {hidden} > {intermediate}, top {top_k}, {dtype}, on {device}"
        with drawing(plot, (10.0, 5.6)) as figure:
            draw_roofline(figure, cells, limits, title)
        say(f"wrote {printable(plot)}")
    if as_json:
        show(to_json({"device": device, "dtype": dtype, **sizes, **report(cells, limits)}))
    else:
        show("\n".join(table(_rows(cells))))


def _positive_numbers(name, text) -> list[int]:
    """Return the positive numbers in `text`, which commas separate."""
    parts = [part.strip() for part in text.split(",")]
    if all(re.fullmatch("[0-9]{1,10}", part) for part in parts):
        numbers = [int(part) for part in parts]
        if all(1 <= number <= LARGEST for number in numbers):
            return numbers
    raise ValueError(
        f"--{name}: expected numbers from 1 to {LARGEST}, separated by commas; got {quoted(text)}"
    )


def _check_memory(tokens, experts, hidden, intermediate, top_k):
    """Raise `ValueError` if the device cannot hold the layer or its tokens.

    XLA may end the process if it has too little memory.
    """
    weights = _NVFP4_BYTES * 3 * experts * hidden * intermediate
    needed = weights + tokens * (2 * hidden + 4 * experts + 8 * top_k)
    there = memory_of(list_devices()[0])
    if needed > there:
        raise ValueError(
            "--tokens, --experts, --hidden, --intermediate: a layer of these sizes needs more "
            f"than {needed / 2**30:.3g} GiB, and the device has {there / 2**30:.3g} GiB"
        )


def _rows(cells):
    """Yield a table with one row per number of tokens."""
    yield "tokens", "us", "GB/s of weights", "scheme", "backend"
    for cell in cells:
        rate = f"{cell.weight_bytes / cell.us * 1e-3:.1f}"
        yield str(cell.tokens), f"{cell.us:.1f}", rate, cell.scheme, cell.backend


def report(cells: Sequence[Cell], limits: Limits) -> dict[str, Any]:
    """Return measured cells and limits as values for JSON, with the rates of a roofline."""
    return {
        "limits": dataclasses.asdict(limits),
        "rows": [
            dataclasses.asdict(cell)
            | {
                "intensity": cell.intensity,
                "gflop_per_s": cell.gflop_per_s,
                "limit_us": limits.us(cell),
                "of_limit": limits.us(cell) / cell.us,
            }
            for cell in cells
        ],
    }


def time_layer(
    tokens: Sequence[int],
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    top_k: int,
    scheme: str | None = None,
    dtype: str = "bfloat16",
    backend: str | Sequence[str] | None = None,
) -> list[Cell]:
    """Time one expert layer under `jax.jit` for each number of tokens.

    Calls take turns with different tokens and different experts. A layer that is larger than the
    caches is therefore read from memory, as in a model.

    Args:
      tokens: numbers of tokens to time, one after another.
      experts: number of experts.
      hidden: width of the tokens, a multiple of 16.
      intermediate: width between the two products, a multiple of 16.
      top_k: number of experts per token.
      scheme: as for `ops.moe_mlp`; the random weights have input scales.
      dtype: dtype of the tokens. Defaults to "bfloat16".
      backend: as for `ops.moe_mlp`.

    Returns:
      One `Cell` per number of tokens.

    Raises:
      ValueError: an argument is unknown, or a size is not a multiple of 16.
      NoBackendError: no backend can run the layer.
    """
    kind = find_dtype(dtype)
    params = random_moe_params(
        jax.random.key(0), num_experts=experts, hidden=hidden, intermediate=intermediate
    )
    how = {"scheme": scheme, "backend": backend, "dtype": kind, "top_k": top_k}
    plan = plan_experts(params, checkpoint_scheme=Scheme.W4A4, **how)
    params = convert(params, plan.layout)

    # Each call donates the output of the call before, so calls run one after another.
    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def layer(last, x, params, ids, weights):
        del last
        return moe_mlp(x, params, ids, weights, plan=plan)

    cells = []
    for count in tokens:
        calls = _draw_calls(count, experts, hidden, top_k, kind)
        active = float(np.mean([len(np.unique(ids)) for _, ids, _ in calls]))
        turns = itertools.cycle(calls)

        def step(last, turns=turns):
            x, ids, weights = next(turns)
            return layer(last, x, params, ids, weights)

        figures = time_program(step, jnp.zeros((count, hidden), kind))
        read = params.nbytes / experts * active
        cells.append(
            Cell(
                tokens=count,
                us=figures["us"],
                low_us=figures["low"],
                high_us=figures["high"],
                host_share=figures["host_share"],
                weight_bytes=read,
                moved_bytes=read + 2 * count * hidden * kind.itemsize,
                operations=6 * count * top_k * hidden * intermediate,
                scheme=str(plan.scheme),
                backend=plan.backend.name,
            )
        )
    return cells


def _draw_calls(count, experts, hidden, top_k, dtype):
    """Return tokens, expert ids and expert weights of several calls; large calls are fewer."""
    keys = jax.random.split(jax.random.key(1), max(2, min(16, 8192 // count)))
    x = jax.random.normal(jax.random.key(2), (count, hidden), jnp.float32).astype(dtype)
    return [(x, *random_routing(key, count, experts, top_k)) for key in keys]


def measure_limits(dtype: str) -> Limits:
    """Measure what bounds every layer on this device: its memory, and its matrix products.

    The limit of the memory is the bandwidth of a large copy. The limit of the products is the rate
    of a large product by XLA, in `dtype` or in float32, whichever is faster. Some CPUs have no
    16-bit arithmetic, so float32 is faster on them.

    Args:
      dtype: name of the dtype of the layer.
    """
    gibibytes, side = _CPU_SIZES if jax.default_backend() == "cpu" else _OTHER_SIZES
    rates = {name: 1e3 * measure_matmul(side, find_dtype(name)) for name in {dtype, "float32"}}
    best = max(rates, key=rates.__getitem__)
    return Limits(1e3 * measure_copy(gibibytes), rates[best], best)
