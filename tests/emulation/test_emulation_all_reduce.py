"""Run the op of sums over GPUs, its handler and its kernel on one emulated GPU.

The other GPUs have sent their values before. `tests/backends/test_peer_threads.py` runs the kernels
of several GPUs at the same time.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from support.emulation import cuda_emulation

from jax_nvfp4_moe.ops.all_reduce import PeerGroups, all_reduce

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


def make_terms(count, shape, dtype):
    """Return the terms of all ranks. Their sum depends on the order."""
    rng = np.random.default_rng(count)
    size = 10.0 ** rng.integers(-3, 4, (count, *shape))
    return np.asarray(rng.standard_normal((count, *shape)) * size, jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("count", "rank", "shape"),
    [(2, 0, (1, 2048)), (2, 1, (5, 8)), (3, 1, (3, 8, 688)), (8, 7, (16,))],
)
def test_sums_are_those_in_the_order_of_the_ranks(library, count, rank, shape, dtype):
    terms = make_terms(count, shape, dtype)
    name = f"{count} {rank} {shape} {dtype}"
    cuda_emulation.connect_peers(library, name, rank, terms)
    run = cuda_emulation.on_device(library, all_reduce, "all_reduce_cuda")
    found = run(terms[rank], axis_names=(), peers=PeerGroups(name, count))
    expected = terms[0].astype(np.float32)
    for term in terms[1:]:
        expected = expected + term.astype(np.float32)
    np.testing.assert_array_equal(found, expected.astype(terms.dtype))


def test_gpus_that_are_not_connected_are_an_error(library):
    run = cuda_emulation.on_device(library, all_reduce, "all_reduce_cuda")
    with pytest.raises(Exception, match="connect_peers has connected in this process, got 7,8"):
        run(np.ones(16, np.float32), axis_names=(), peers=PeerGroups("7,8", 2))
