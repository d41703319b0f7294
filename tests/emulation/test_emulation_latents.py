"""Run the suite of `prepare_latents` on its CUDA kernel, compiled for a CPU."""

import pytest
from support.emulation.cuda_emulation import on_device
from support.kernels.axes import axis
from support.kernels.latents_suite import CASES, PAIRS, LatentsSuite

from jax_nvfp4_moe.ops import prepare_latents

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestLatents(LatentsSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self, library):
        prepare = on_device(library, prepare_latents, "latents_cuda")

        def run(call):
            *arrays, q_weight, kv_weight = call.operands
            weights = {"q_weight": q_weight, "kv_weight": kv_weight}
            options = {name: getattr(call.options, name) for name in ("eps", "rope", "interleaved")}
            return prepare(*arrays, **weights, **options)

        return run
