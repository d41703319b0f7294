"""Compile decoding over two absent GPUs that are connected, with XLA's CUDA compiler.

No kernel runs, and no time is measured.
"""

import pytest
from support.devices.deviceless import read_report, run_program

pytestmark = [pytest.mark.deviceless, pytest.mark.cuda_build, pytest.mark.every_case]


def report(folder, batch, *words):
    """Return the report of deviceless_peers.py."""
    how = {"flags": f"--xla_dump_to={folder}"}
    return read_report(run_program("deviceless_peers.py", "h100", batch, folder, *words, **how))


@pytest.mark.parametrize(("shape", "batch"), [("1x2", 1), ("1x2", 64), ("2x1", 16)])
def test_a_loop_is_one_cuda_graph_without_collectives_of_xla(tmp_path, shape, batch):
    """Before the loop, one collective lets the GPUs start together (`whole_steps.start_together`).

    One chain holds all calls of all layers. Along `tensor`, GPUs exchange the largest of their
    logits. Along `expert`, routers count ids from the first expert of a GPU.
    """
    found = report(tmp_path, batch, shape)
    assert found == {
        "kernels_a_layer": 0,
        "collectives": {"all-reduce": 1},
        "collectives_in_loops": {},
        "in_one_graph": True,
    }


def test_logits_to_sample_from_are_gathered_by_xla(tmp_path):
    """Those of 16 rows are larger than what GPUs add up."""
    found = report(tmp_path, 16, "1x2", "sampled")
    assert found["kernels_a_layer"] == 0
    assert found["collectives"] == {"all-reduce": 1, "all-gather": 1}
    assert found["collectives_in_loops"] == {"all-gather": 1}


def test_without_a_connection_each_sum_is_a_collective(tmp_path):
    """Two sums of each of four layers, and that of the embedding."""
    found = report(tmp_path, 1, "1x2", "plain")
    assert found["collectives"] == {"all-reduce": 2 * 4 + 1, "all-gather": 1}
    assert not found["in_one_graph"]
