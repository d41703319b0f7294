"""Test the gradient of every op against central differences of its own results.

The results are those of the kernel of this device, so that a derivative of another function than
the kernel computes is caught too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.op_gradients import CASES, Case, is_float

# The derivative of a rounding is taken for the identity, or keys and values are stored in FP8: a
# difference sees the steps instead.
ROUNDED = {
    "attention to keys in FP8",
    "linear with rounded activations",
    "moe_mlp with a scale for each token",
    "prepare_heads with an FP8 cache",
}
# Root mean squares of the changes of values, which are about 1 themselves.
STEPS = [2.0**-power for power in range(2, 13)]
TERMS = 64  # terms of the sums in an op
CONTROL = 2.0**-5  # relative error of a derivative that must be caught


def weigh(results):
    """Return factors for all results, which do not depend on them."""
    return [np.cos(np.arange(y.size, dtype=np.float64)).reshape(y.shape) for y in results]


class Differences:
    """The derivative of a weighted sum of the results of an op along a direction.

    Attributes:
      case: the op and its operands.
      gradient: the gradient of the sum, by the package.
    """

    def __init__(self, name):
        self.case = Case(name)
        self._run = jax.jit(lambda *operands: self._results(*operands))

        def total(*operands):
            results = self._results(*operands)
            factors = weigh(results)
            return sum(
                jnp.sum(y.astype(jnp.float32) * jnp.asarray(c, jnp.float32))
                for y, c in zip(results, factors, strict=True)
            )

        found = jax.jit(jax.grad(total, self.case.floats))(*self.case.operands)
        self.gradient = [np.asarray(one, np.float64) for one in found]

    def _results(self, *operands):
        return [y for y in self.case.call.results_of(*operands) if is_float(y)]

    def at(self, direction, step):
        """Return the sum at a point, in float64, and the largest error of it by rounding."""
        moved = list(self.case.operands)
        for place, way in zip(self.case.floats, direction, strict=True):
            moved[place] = (moved[place].astype(jnp.float32) + step * way).astype(
                moved[place].dtype
            )
        total = error = 0.0
        for y, c in zip((run := self._run(*moved)), weigh(run), strict=True):
            wide = c * np.asarray(y, np.float64)
            total += wide.sum()
            error += TERMS * 2**-24 * np.abs(wide).sum()
            if y.dtype == jnp.bfloat16:  # six standard deviations of roundings by 2^-8 at most
                error += 6 * 2**-8 * np.sqrt(np.square(wide).sum() / 3)
        return total, error

    def along(self, direction):
        """Return the central difference of the best step, and a bound of its error.

        Twice the step has four times the error of truncation. The difference of both is therefore
        more than the error of the smaller step. A quarter of the difference of twice these steps
        must confirm it.
        """
        found = []
        for step in STEPS:
            (ahead, one), (behind, other) = (self.at(direction, way) for way in (step, -step))
            found.append(((ahead - behind) / (2 * step), (one + other) / (2 * step)))
        bounds = []
        for (widest, _), (wide, more), (near, noise) in zip(
            found, found[1:], found[2:], strict=False
        ):
            truncation = max(abs(near - wide), abs(wide - widest) / 4)
            bounds.append((truncation + noise + more, near))
        bound, difference = min(bounds)
        return difference, bound


@functools.cache
def differences(name):
    return Differences(name)


def scaled(direction):
    """Return a direction whose entries have a root mean square of 1."""
    count = sum(one.size for one in direction)
    size = np.sqrt(sum(np.square(one).sum() for one in direction) / count)
    return [np.float32(one / size) for one in direction]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDED])
def test_gradients_are_central_differences(name):
    """Along the gradient, where a wrong factor shows, and along a random direction."""
    op = differences(name)
    steepest = scaled(op.gradient)
    rng = np.random.default_rng(0)
    random = scaled([rng.standard_normal(one.shape) for one in op.gradient])
    for direction in (steepest, random):
        expected, bound = op.along(direction)
        derivative = sum(np.sum(g * d) for g, d in zip(op.gradient, direction, strict=True))
        assert abs(derivative - expected) <= bound
        if direction is steepest:  # the bound would catch a factor that is wrong
            assert bound < CONTROL * abs(derivative)
