// y[r] = W[e(r)] @ x[r] * global_scale + bias for rows that come sorted by expert.
//
// Launches: tiles from group_sizes (routing.cu), quantization of x where asked (quantize.cu), the
// product (plain_gemm.cu), and zeros for the rows that no expert owns. A linear layer is the
// case of one expert. All grouped targets of the extension run this sequence.
#include "elements.cuh"
#include "launch_kernel.cuh"
#include "plain_gemm.cuh"
#include "quantize.cuh"
#include "workspace.cuh"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;

struct GroupedGemmWorkspace {
  ExpertRows rows;
  QuantizedRows quantized;
  int64_t bytes;
};

GroupedGemmWorkspace TakeGroupedGemmWorkspace(void* buffer, const GroupedGemmShape& shape) {
  Sections sections(buffer);
  GroupedGemmWorkspace workspace;
  workspace.rows = TakeExpertRows(&sections, shape.m, shape.e, kTileRows, /*sorted=*/true);
  workspace.quantized = TakeQuantizedRows(&sections, shape.m, shape.k);
  workspace.bytes = sections.bytes();
  return workspace;
}

constexpr int kRowsOfBlock = 64;

// Rows from *num_rows to m.
__global__ void __launch_bounds__(kThreads)
    ZeroRows(const int32_t* num_rows, int64_t m, int64_t row_bytes, uint8_t* y) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock;
  const int64_t begin = first > *num_rows ? first : *num_rows;
  const int64_t end = first + kRowsOfBlock < m ? first + kRowsOfBlock : m;
  // Elements have 2 or 4 bytes, so rows are whole in 16-bit words.
  uint16_t* words = reinterpret_cast<uint16_t*>(y);
  for (int64_t i = begin * (row_bytes / 2) + threadIdx.x; i < end * (row_bytes / 2);
       i += kThreads) {
    words[i] = 0;
  }
}

}  // namespace

int64_t GroupedGemmWorkspaceBytes(const GroupedGemmShape& shape) {
  return TakeGroupedGemmWorkspace(nullptr, shape).bytes;
}

cudaError_t LaunchGroupedGemm(cudaStream_t stream, const GroupedGemmCall& call,
                              const GroupedGemmBuffers& buffers) {
  const GroupedGemmShape& shape = call.shape;
  const bool quantized = call.activation_scale != ActivationScale::kNone;
  const GroupedGemmWorkspace workspace = TakeGroupedGemmWorkspace(buffers.workspace, shape);
  if (shape.m == 0 || shape.n == 0) return cudaSuccess;
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchGroupTiles(stream, buffers.group_sizes, shape.m, shape.e,
                                              workspace.rows, kPlainRule, Walks{}));

  PlainLeft left = {buffers.x, nullptr, 1, nullptr, nullptr, nullptr, nullptr};
  if (quantized) {
    const QuantizedRows& rows = workspace.quantized;
    const bool is_static = call.activation_scale == ActivationScale::kStatic;
    const RowQuantizer quantizer = {workspace.rows,
                                    shape.m,
                                    static_cast<int32_t>(shape.e),
                                    call.type,
                                    buffers.x,
                                    nullptr,
                                    1,
                                    nullptr,
                                    static_cast<int32_t>(shape.k),
                                    is_static ? buffers.weight.input_scale : nullptr,
                                    rows.codes,
                                    rows.block_scale,
                                    rows.row_scale};
    NVFP4_RETURN_IF_CUDA_ERROR(LaunchQuantizeRows(stream, quantizer));
    left = {nullptr, nullptr, 1, nullptr, rows.codes, rows.block_scale, rows.row_scale};
  }
  PlainGemm gemm = {};
  gemm.rows = workspace.rows;
  gemm.max_tiles = MaxTiles(shape.m, shape.e, kTileRows);
  gemm.type = call.type;
  gemm.left = left;
  gemm.weight = buffers.weight;
  gemm.weight_rows = shape.n;
  gemm.bias_rows = shape.n;
  gemm.parts = static_cast<int32_t>(shape.parts);
  gemm.k = static_cast<int32_t>(shape.k);
  gemm.columns = static_cast<int32_t>(shape.n);
  gemm.output = {buffers.y, call.type, nullptr};
  NVFP4_RETURN_IF_CUDA_ERROR(LaunchPlainGemm(stream, gemm));
  const dim3 zero_grid(static_cast<unsigned>(CeilDiv(shape.m, kRowsOfBlock)));
  return Launch(stream, zero_grid, kThreads, ZeroRows,
                static_cast<const int32_t*>(workspace.rows.starts + shape.e), shape.m,
                shape.n * Bytes(call.type), static_cast<uint8_t*>(buffers.y));
}

}  // namespace nvfp4
