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
