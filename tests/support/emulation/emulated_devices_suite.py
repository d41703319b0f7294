"""Tests of a recurrence over prompts on devices of several sizes, which the emulation pretends."""

from typing import ClassVar

import pytest
from support.emulation.cuda_emulation import HOPPER_SHARED_BYTES, LEAST_SHARED_BYTES, Device
from support.kernels.recurrence_suite import RAGGED, Recurrence, assert_same_bits

from jax_nvfp4_moe.testing import assert_as_accurate_as

AMPERE_SHARED_BYTES = 163 << 10


class DevicesSuite:
    """Small chunks with two stages and with one, and blocks of two warps that compute."""

    recurrence: ClassVar[Recurrence]

    @pytest.mark.parametrize(
        ("multiprocessors", "shared_bytes"),
        [
            (1, AMPERE_SHARED_BYTES),
            (1, LEAST_SHARED_BYTES),
            (132, HOPPER_SHARED_BYTES),
        ],
    )
    @pytest.mark.parametrize(
        "name",
        [
            "full widths, ragged rows",
            "one more token than a chunk",
            RAGGED,
            "narrow rows of unequal length",
        ],
    )
    def test_other_devices(self, run, name, multiprocessors, shared_bytes, monkeypatch):
        own = self.recurrence
        operands, lengths = own.make(name), own.lengths(name)
        device = Device(multiprocessors, shared_bytes)
        found = run(*operands, lengths=lengths, device=device)
        exact = own.exact(*operands, lengths)
        plain = own.plain(operands, monkeypatch, lengths)
        for got, want, yardstick in zip(found, exact, plain, strict=True):
            assert_as_accurate_as(got, yardstick, want)
        if shared_bytes == HOPPER_SHARED_BYTES:  # how a device divides the heads changes no bit
            assert_same_bits(found, run(*operands, lengths=lengths))
