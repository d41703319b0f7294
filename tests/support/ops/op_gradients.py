"""Gradients of every op, for tests that transform the ops or divide their rows."""

import jax
import jax.numpy as jnp
import numpy as np
from support.ops.empty_calls import CALLS

SIZES = {"b": 2, "t": 2}
BOUND = 1e-5  # float32 sums in another order
# `prepare`, `chain_calls` and the choice of keys are not differentiable. `quantize_nvfp4` depends
# on all rows, and the group sizes of `grouped_gemm` are those of one device.
OTHERS = {"prepare", "chain_calls", "choose_keys", "quantize_nvfp4", "grouped_gemm"}
CASES = [name for name in CALLS if name.split(" ")[0] not in OTHERS]


def is_float(x):
    """Return whether an array has gradients that can be compared."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def find_rows(name):
    """Return for each operand of a call whether it has rows."""
    return [bool(shape) and isinstance(shape[0], str) for shape, _ in CALLS[name].operands]


class Case:
    """A call with random operands, and its gradient.

    Attributes:
      operands: the arrays.
      rows: for each operand, whether it has rows.
      floats: the operands that have a gradient.
    """

    def __init__(self, name):
        rng, self.call = np.random.default_rng(3), CALLS[name]
        self.operands = [
            jnp.asarray(rng.standard_normal(x.shape)).astype(x.dtype) if is_float(x) else x
            for x in self.call.make(self.call.dtypes[0], SIZES)
        ]
        self.rows = find_rows(name)
        self.floats = [i for i, x in enumerate(self.operands) if is_float(x)]

    def gradient(self, *operands, **how):
        """Return the gradient of a sum over all results."""

        def loss(*operands):
            found = filter(is_float, self.call.results_of(*operands, **how))
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in found)

        return jax.grad(loss, self.floats)(*operands)


def assert_close(actual, expected):
    """Compare gradients. Some may be zeros, such as those of keys that no query chooses."""
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        assert np.abs(got - want).max() <= BOUND * np.abs(want).max()
    assert any(np.asarray(want).any() for want in expected)
