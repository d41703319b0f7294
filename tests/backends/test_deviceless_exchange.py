"""Test the order and number of the kernels that XLA compiles for experts on four absent GPUs.

No kernel runs, and no time is measured. `deviceless_exchange.py` reads the scheduled program.
"""

import jax
import pytest
from support.devices.deviceless import read_report, run_program

pytestmark = [pytest.mark.deviceless, pytest.mark.every_case]
LAST = {"psum": "all-reduce", "all_to_all": "all-to-all", "ragged": "ragged-all-to-all"}


def report(*words):
    """Return the report of deviceless_exchange.py."""
    return read_report(run_program("deviceless_exchange.py", "h100", *words))


@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize("dispatch", LAST)
def test_the_shared_expert_runs_while_outputs_are_on_their_way(dispatch, tokens):
    """Its GEMMs lie between the start and the end of the last collective, which is asynchronous."""
    found = report(dispatch, tokens)
    assert found["collectives"][-1] == [LAST[dispatch], True]
    assert found["shared"] == [2, 2]


@pytest.mark.parametrize("dispatch", LAST)
def test_so_it_is_with_the_latency_hiding_scheduler(dispatch):
    """The order is the same under this scheduler.

    It is for sizes at which XLA's own order runs one of the GEMMs first, to save memory.
    """
    found = report(dispatch, 64, "hide")
    assert found["collectives"][-1] == [LAST[dispatch], True]
    assert found["shared"] == [2, 2]


@pytest.mark.parametrize("dispatch", LAST)
def test_the_order_is_the_barriers_doing(dispatch):
    """Without the barrier, XLA merged the first GEMM with the router's, which ran first.

    XLA of jax 0.11 and newer does not.
    """
    overlaps = 1 if jax.__version_info__ < (0, 11) else 2
    assert report(dispatch, 4096, "joined")["shared"] == [overlaps, 2]


@pytest.mark.parametrize(("tokens", "kernels"), [(4, [1, 2]), (64, [2, 2]), (4096, [2, 2])])
def test_few_kernels_send_rows(tokens, kernels):
    """Count kernels from the router to the collective, and from there to the experts.

    Sorting the rows by counting took 9, 8 and 10 kernels before the collective.
    """
    assert report("all_to_all", tokens)["sending"] == kernels
