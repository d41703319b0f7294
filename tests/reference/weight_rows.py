"""Write rows of weights and what ModelOpt makes of them; needs torch.

python -m tests.reference.weight_rows BF16_CHECKPOINT tests/checkpoints/modelopt-rounding

"trained" holds the first rows of some experts of tiny-python-moe, with the global scale of the
whole matrix. "awkward" holds zero blocks, negative zeros, ties, and blocks beyond the range of
scales.
"""

import pathlib
import sys

import modelopt
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file

TRAINED = ((0, 0, "gate"), (2, 5, "up"), (4, 15, "down"))


def rounded(name, values, scale):
    packed, block_scale, scale = NVFP4QTensor.quantize(values.clone(), 16, None, scale)
    return {
        f"{name}.values": values.contiguous(),
        f"{name}.packed": packed._quantized_data,
        f"{name}.block_scale": block_scale,
        f"{name}.global_scale": scale,
    }


def awkward():
    torch.manual_seed(0)
    x = torch.randn(12, 64) * torch.exp2(torch.linspace(-24, 4, 12))[:, None]
    x[3, 16:32] = 0
    x[4, :16] = -0.0
    x[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 8)
    x[6, 5:30] = 0
    return x


def main(source, folder):
    tensors, rows = {}, {}
    for path in sorted(pathlib.Path(source).glob("model*.safetensors")):
        tensors |= load_file(path)
    for layer, expert, part in TRAINED:
        w = tensors[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"]
        scale = w.abs().max().float() / 2688
        rows |= rounded(f"trained.{layer}.{expert}.{part}", w[:16].clone(), scale)
    rows |= rounded("awkward.bf16", awkward().bfloat16(), torch.tensor(1.0))
    rows |= rounded("awkward.own", awkward(), None)
    rows |= rounded("awkward.large", awkward().bfloat16(), torch.tensor(1e-3))
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    versions = {"modelopt": modelopt.__version__, "torch": torch.__version__}
    save_file(rows, folder / "rows.safetensors", versions)


if __name__ == "__main__":
    main(*sys.argv[1:])
