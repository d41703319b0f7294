"""`with_derivative_of`: run a kernel forward, and differentiate the reference."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.numerics.auto_axes import on_auto_axes
from jax_nvfp4_moe.numerics.varying import vary_like, vary_together


def with_derivative_of(
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    rows: str | None = None,
    **options: Any,
):
    """Return a function that computes `kernel` and has the derivatives of `reference`.

    Kernels behind the FFI have no derivative. References are plain JAX and have one.

    Args:
      reference: a differentiable function of arrays and of `options`.
      kernel: a function of the same arguments, with the same results up to rounding. It may be
        `reference` itself.
      rows: the rule of `backends.by_rows`, with an entry for each array given by position, and one
        for all arrays given by name. None (default) for a kernel in operations that XLA shards by
        itself. XLA shards the rows of the reference without a rule.
      **options: arguments of both that are no arrays.

    Returns:
      A function of the arrays, which takes them by position or by name, as both functions do.
    """
    plain = functools.partial(reference, **options)

    def compute(operands, named):
        return vary_like(plain(*operands, **named), (operands, named))

    def forward(*operands):
        return kernel(*operands, **options)

    def forward_named(*operands):
        return kernel(*operands[:-1], **operands[-1], **options)

    @jax.custom_jvp
    def run(operands, named):
        given = (*operands, named) if named else operands
        own = forward_named if named else forward
        y = (own if rows is None else by_rows(own, rows))(*given)
        return vary_like(y, given)

    @run.defjvp
    def differentiate(primals, tangents):
        return run(*primals), jax.jvp(compute, primals, tangents)[1]

    chosen = compute if kernel is reference else run

    def call(operands, named):
        return chosen(*vary_together((operands, named)))

    return lambda *operands, **named: on_auto_axes(call)(operands, named)
