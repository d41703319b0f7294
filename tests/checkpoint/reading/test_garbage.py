"""Test that the collector of garbage is paused, and goes on as it was."""

import gc

import pytest

from jax_nvfp4_moe.checkpoint.reading.garbage import paused_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled):
    if not enabled:
        gc.disable()
    try:
        with paused_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError, match="wrong"), paused_collection():
            raise ValueError("wrong")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_what_was_made_meanwhile_is_old():
    gc.unfreeze()
    try:
        with paused_collection():
            made = [[] for _ in range(100_000)]
        assert len(gc.get_objects(generation=0)) < len(made)
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as the tests' configuration does


def test_objects_that_the_process_froze_stay_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused_collection():
        pass
    assert gc.get_freeze_count() >= frozen > 0
