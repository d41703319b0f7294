"""`python -m tests.reference.fp8_blocks --folder references`: FP8 with a scale for each block.

Writes the folder `fp8-blocks`. It holds E4M3 values with each kind of scales that files have, and
transformers' own dequantization of some of their rows in float32 and bfloat16. Needs only torch and
transformers.
"""

import argparse
import json
import pathlib

import safetensors.torch
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

SHAPE = (256, 128)
MX_SHAPE = (8, 96)
ROWS = 8  # rows of the result that are kept


def cases(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return name -> float8_e4m3fn values and their scales."""
    generator = torch.Generator().manual_seed(seed)

    def values(shape):
        noise = 60 * torch.randn(shape, generator=generator)
        return noise.clamp(-448, 448).to(torch.float8_e4m3fn)

    grid = torch.rand((2, 1), generator=generator) * 1e-2 + 1e-4
    exponents = torch.randint(100, 130, (2, 1), generator=generator).to(torch.uint8)
    mx = torch.randint(100, 130, (8, 3), generator=generator).to(torch.uint8)
    return {
        "float32": (values(SHAPE), grid),  # DeepSeek-V3
        "e8m0": (values(SHAPE), exponents.view(torch.float8_e8m0fnu)),  # DeepSeek-V4
        "mxfp8": (values(MX_SHAPE), mx),
    }


def write(seed: int, folder: pathlib.Path) -> None:
    """Write values.safetensors and reference.json."""
    folder.mkdir(parents=True)
    tensors = {}
    decode = Fp8Dequantize(None)._dequantize_one
    for name, (values, scales) in cases(seed).items():
        tensors |= {f"{name}.weight": values, f"{name}.scale": scales}
        for dtype in (torch.float32, torch.bfloat16):
            made = decode(values, scales, dtype)[:: len(values) // ROWS]
            tensors[f"{name}.{str(dtype).removeprefix('torch.')}"] = made.contiguous()
    safetensors.torch.save_file(tensors, folder / "values.safetensors")
    tools = {"transformers": transformers.__version__, "torch": torch.__version__}
    (folder / "reference.json").write_text(json.dumps({"seed": seed, "tools": tools}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.reference.fp8_blocks", description=__doc__
    )
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("references"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write(options.seed, options.folder / "fp8-blocks")
