"""Time vLLM's Marlin NVFP4 expert layer. `moe.py` starts this program.

It runs the whole layer from the op library of a vLLM 0.25.1 wheel, ``vllm/_moe_C*.so``: sort by
expert, GEMM, activation, GEMM, and the sum over experts. The Python code of vLLM is not needed.
Weights are random bytes in the ranges that Marlin's preparation gives. One fused kernel computes
the activation.

For Hopper, the library has Marlin's GEMMs only as PTX for compute_80. The first call compiles them,
which takes about fifteen seconds. A library that was stripped of its PTX cannot run them.
"""

import math

import contestant
import torch
import triton
import triton.language as tl
from moe_cases import Case, draw_ids
from peers.torch_timing import time_graph

FLOAT4_E2M1F = 562949953487106  # vLLM's id of this scalar type
LOWEST_SCALE, HIGHEST_SCALE = 0x88, 0xC0  # bytes of prepared block scales
GLOBAL_SCALE = 2.0**-60
BLOCK_SIZES = (8, 16, 32, 48, 64)


@triton.jit
def _activate(x, y, width, gated: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    if gated:
        gate = tl.load(x + row * 2 * width + column, inside).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, inside).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
    else:
        value = tl.maximum(tl.load(x + row * width + column, inside).to(tl.float32), 0.0)
        value = value * value
    tl.store(y + row * width + column, value.to(tl.bfloat16), inside)


def choose_block(tokens: int, case: Case) -> int:
    """Return the number of rows of a tile, by vLLM's rule."""
    per_expert = tokens * case.top_k / case.experts
    return next((size for size in BLOCK_SIZES if per_expert / size < 0.9), BLOCK_SIZES[-1])


class Layer:
    """The weights of one case."""

    def __init__(self, case: Case):
        self.case = case
        rows = case.gate_up_rows
        e, h, i = case.experts, case.hidden, case.intermediate
        self.gate_up = _codes(e, h // 16, rows * 2)
        self.down = _codes(e, i // 16, h * 2)
        self.gate_up_scale = _scales(e, h // 16, rows)
        self.down_scale = _scales(e, i // 16, h)
        self.global_scale = torch.full((e,), GLOBAL_SCALE, device="cuda")
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.workspace = torch.zeros(multiprocessors * 4, dtype=torch.int, device="cuda")

    def time(self, tokens: int) -> dict[str, float]:
        case = self.case
        ids = [torch.from_numpy(call).cuda() for call in draw_ids(case, tokens)]
        xs = [_normal(tokens, case.hidden) for _ in ids]
        buffers = Buffers(case, tokens, choose_block(tokens, case))
        buffers.output.fill_(math.nan)  # if a GEMM does not run, the output must not look finite

        def launch():
            for x, chosen in zip(xs, ids, strict=True):
                self._call(x, chosen, buffers)

        figures = time_graph(launch, len(ids))
        return figures | {"finite": bool(torch.isfinite(buffers.output).all())}

    def _call(self, x, ids, buffers):
        case, tokens = self.case, x.shape[0]
        torch.ops._moe_C.moe_align_block_size(
            ids,
            case.experts,
            buffers.block,
            buffers.sorted_ids,
            buffers.expert_ids,
            buffers.padded,
            None,
        )
        weights = self.gate_up, self.gate_up_scale
        self._product(x, buffers.up, *weights, buffers, top_k=case.top_k, weighted=False)
        expert_mesh = tokens * case.top_k, triton.cdiv(case.intermediate, 1024)
        _activate[expert_mesh](buffers.up, buffers.active, case.intermediate, case.gated, 1024)
        weights = self.down, self.down_scale
        self._product(buffers.active, buffers.out, *weights, buffers, top_k=1, weighted=True)
        slots = buffers.out.view(tokens, case.top_k, case.hidden)
        torch.ops._moe_C.moe_sum(slots, buffers.output)

    def _product(self, x, y, codes, scales, buffers, *, top_k, weighted):
        (m, k), n = x.shape, y.shape[1]
        none = None
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x,
            y,
            codes,
            none,  # bias
            scales,
            none,  # scales of the activations
            self.global_scale,
            none,  # zero points
            none,  # group index
            none,  # permutation
            self.workspace,
            buffers.sorted_ids,
            buffers.expert_ids,
            buffers.padded,
            buffers.weights,
            buffers.block,
            top_k,
            weighted,
            FLOAT4_E2M1F,
            m,
            n,
            k,
            True,  # this device has all of k
            False,  # no atomic addition
            True,  # float32 reduction
            False,  # zero points are not floats
            -1,  # threads along k, along n, and blocks per multiprocessor: Marlin chooses
            -1,
            -1,
        )


class Buffers:
    """The routing tables, intermediate results and output for one number of tokens."""

    def __init__(self, case: Case, tokens: int, block: int):
        slots = tokens * case.top_k
        most = slots + case.experts * (block - 1)
        most = min(slots * block, most) if slots < case.experts else most
        self.block = block
        self.sorted_ids = torch.empty(most, dtype=torch.int32, device="cuda")
        self.expert_ids = torch.empty(math.ceil(most / block), dtype=torch.int32, device="cuda")
        self.padded = torch.empty(1, dtype=torch.int32, device="cuda")
        self.weights = torch.full((tokens, case.top_k), 1 / case.top_k, device="cuda")
        self.up, self.active, self.out, self.output = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for shape in (
                (slots, case.gate_up_rows),
                (slots, case.intermediate),
                (slots, case.hidden),
                (tokens, case.hidden),
            )
        )


def _codes(*shape):
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")


def _scales(*shape):
    raw = torch.randint(LOWEST_SCALE, HIGHEST_SCALE, shape, dtype=torch.uint8, device="cuda")
    return raw.view(torch.float8_e4m3fn)


def _normal(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def main():
    parser = contestant.parser(__doc__)
    parser.add_argument("--library", required=True, help="_moe_C*.so of a vLLM wheel")
    arguments = parser.parse_args()
    torch.ops.load_library(arguments.library)
    torch.manual_seed(0)
    contestant.time_cells("marlin", arguments.case, arguments.tokens, lambda case: Layer(case).time)


if __name__ == "__main__":
    main()
