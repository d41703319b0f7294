"""Time jitted programs on a device, and measure the ceilings of the device."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

_BATCHES, _SLOW_BATCHES = 7, 3
_SLOW_SECONDS = 0.2
_BATCH_SECONDS = 0.02
_FEWEST, _MOST = 1, 20  # executions in flight; beyond about 30, enqueueing waits for the device


def time_program(step: Callable[[Any], Any], state: Any) -> dict[str, float]:
    """Time ``state = step(state)``, one execution after the other without the host in between.

    Executions are enqueued back to back, in a short batch and in a long one. The difference of
    their times leaves out the start of the first execution and the wait for the last one. It is the
    time of the device as long as enqueueing is faster; `host_share` tells whether it is.

    On a CPU the start takes next to no time, and the difference of two noisy times could be
    negative. On a CPU, a long batch is therefore timed alone.

    Args:
      step: jitted function whose argument is donated, so that each execution writes to the same
        addresses (for other addresses, a CUDA graph would be rebuilt).
      state: the argument and result of `step`.

    Returns:
      ``us``: the median of seven batches, or of three batches of a slow program. ``low``, ``high``:
      the fastest and the slowest batch. ``host_share``: the time to enqueue a batch, divided by the
      time to run it.
    """
    state = jax.block_until_ready(step(state))

    def batch(executions):
        nonlocal state
        begin = time.perf_counter()
        for _ in range(executions):
            state = step(state)
        enqueued = time.perf_counter()
        jax.block_until_ready(state)
        return np.array([time.perf_counter() - begin, enqueued - begin])

    once = min(batch(1)[0] for _ in range(2))
    more = int(np.clip(_BATCH_SECONDS / once, _FEWEST, _MOST))
    batches = _BATCHES if once < _SLOW_SECONDS else _SLOW_BATCHES
    short = 0 if jax.default_backend() == "cpu" else _FEWEST
    samples = [(batch(short + more), batch(short)) for _ in range(batches)]
    times = [(long[0] - start[0]) / more * 1e6 for long, start in samples]
    return {
        "us": float(np.median(times)),
        "low": min(times),
        "high": max(times),
        "host_share": float(np.median([long[1] / long[0] for long, _ in samples])),
    }


def measure_copy(gibibytes: float) -> float:
    """Measure the bandwidth of a copy in TB/s; bytes read and bytes written both count."""
    words = int(gibibytes * 2**28)
    flip = jax.jit(lambda x: x ^ jnp.uint32(1), donate_argnums=0)
    return 8 * words / time_program(flip, jnp.zeros(words, jnp.uint32))["us"] * 1e-6


def measure_matmul(side: int, dtype: DTypeLike = jnp.bfloat16) -> float:
    """Measure the rate of a product of two square matrices of `side` rows, in TFLOP/s."""
    state = jax.random.normal(jax.random.key(0), (3, side, side), dtype)
    # XLA chooses a product on a GPU by timing several, unless XLA_FLAGS say otherwise. Without it,
    # the rate would be far below what the device allows.
    on_gpu = jax.default_backend() == "gpu"
    options = {"xla_gpu_autotune_level": 4} if on_gpu else None

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def multiply(state):
        a, b, _ = state
        return a, b, a @ b

    return 2 * side**3 / time_program(multiply, tuple(state))["us"] * 1e-6


def measure_ceilings(gibibytes: float = 4.0, side: int = 8192) -> dict[str, float]:
    """Measure the bandwidth of a copy (bytes read and written) and the rate of a bf16 matmul."""
    return {
        "copy_tb_per_s": measure_copy(gibibytes),
        "matmul_tflop_per_s": measure_matmul(side),
    }
