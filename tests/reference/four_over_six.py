"""Write weights and the bytes of ModelOpt's own recipe for them, `NVFP4_FOUR_OVER_SIX_CFG`.

python -m tests.reference.four_over_six tests/checkpoints/modelopt-rounding

The recipe searches with a Triton kernel, which needs a GPU. `fake_quantize` computes the same in
torch, from modelopt's own scales. Calibration, the choice and the export are modelopt's.
"""

import pathlib
import sys
import unittest.mock

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization import tensor_quant
from modelopt.torch.quantization.nn.modules import tensor_quantizer
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from modelopt.torch.quantization.utils.numeric_utils import E4M3_MAX
from safetensors.torch import save_file

from tests.reference import rounding


def fake_quantize(x, amax, global_amax, quantize_scales, largest, dtype, pass_through):
    """Return what `static_blockwise_fp4_fake_quant` returns, computed in float32 with torch."""
    del pass_through
    assert quantize_scales
    whole = global_amax.float() * (E4M3_MAX / largest) / 6.0
    scale = tensor_quant.scaled_e4m3_impl(amax.float().reshape(-1, 1) / 6.0, whole)
    blocks = x.float().reshape(-1, rounding.BLOCK)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    values = rounding.e2m1(blocks.abs() / scale) * scale
    return torch.where(blocks >= 0, values, -values).reshape(x.shape).to(dtype)


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weight and what modelopt exports for it."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight.clone()
    model = torch.nn.Sequential(linear)
    batch = torch.ones(4, weight.shape[1], dtype=weight.dtype)
    with unittest.mock.patch.object(
        tensor_quantizer, "static_blockwise_fp4_fake_quant", fake_quantize
    ):
        config = {**mtq.NVFP4_FOUR_OVER_SIX_CFG}
        weights = [rule for rule in config["quant_cfg"] if "input" not in str(rule)]
        mtq.quantize(model, {**config, "quant_cfg": weights}, lambda model: model(batch))
    quantizer = model[0].weight_quantizer
    block_scale, scale = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, weight)
    packed, _, _ = NVFP4QTensor.quantize(weight.clone(), 16, block_scale, scale)
    return {
        "values": weight,
        "packed": packed._quantized_data,
        "block_scale": block_scale,
        "global_scale": scale.reshape(()),
    }


def weights() -> dict[str, torch.Tensor]:
    """Return random weights, and weights with zero blocks, outliers and blocks of one value."""
    torch.manual_seed(0)
    normal = torch.randn(32, 128) / 8
    edges = torch.randn(16, 64) * torch.exp2(torch.linspace(-14, 2, 16))[:, None]
    edges[3, 16:32] = 0
    edges[4, :16] = 0.5
    edges[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 8)
    edges[6, 5:30] = 0
    heavy = torch.randn(16, 128) ** 3
    return {
        "normal.float32": normal,
        "normal.bfloat16": normal.bfloat16(),
        "edges.bfloat16": edges.bfloat16(),
        "heavy.bfloat16": heavy.bfloat16(),
    }


def main(folder: str) -> None:
    rows = {
        f"{name}.{part}": tensor.contiguous()
        for name, weight in weights().items()
        for part, tensor in quantize(weight).items()
    }
    versions = {"modelopt": modelopt.__version__, "torch": torch.__version__}
    save_file(rows, pathlib.Path(folder, "four_over_six.safetensors"), versions)


if __name__ == "__main__":
    main(*sys.argv[1:])
