// Computes the GEMM of fp4_groups.cuh on tcgen05, with two of CUTLASS's grouped block-scaled
// collectives.
//
//   few rows   tiles of 128 weight rows x  64 rows x 256 of k, on one multiprocessor each
//   many rows  tiles of 256 weight rows x 256 rows x 256 of k, shared by two multiprocessors
//
// This file is compiled for sm_100f only. For any other architecture, plain sm_100 included,
// CUTLASS leaves its kernels empty without a warning; test_sass.py checks that they are not. The
// kernels were never run, because no such GPU was available.
//
// All arguments point to device memory and no size is read back, so that a CUDA graph can capture
// the launch. The kernel itself writes the tensor maps in `workspace`.
#include <cutlass/cutlass.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cuda/gemm/fp4_groups.cuh"
#include "cuda/launch_kernel.cuh"

namespace nvfp4 {
namespace {

using Element = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
using ElementOut = cutlass::bfloat16_t;
using Problems = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

constexpr int kInputAlignment = 32;  // 16 bytes of codes
constexpr int kOutputAlignment = 8;  // 16 bytes of bfloat16

struct FewRows {
  using Tile = cute::Shape<cute::_128, cute::_64, cute::_256>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm;
};

struct ManyRows {
  using Tile = cute::Shape<cute::_256, cute::_256, cute::_256>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmNvf4Sm100;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm;
};

template <typename Config>
struct Collective {
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, typename Config::Tile,
      typename Config::Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      ColumnMajor*, kOutputAlignment, ElementOut, ColumnMajor*, kOutputAlignment,
      typename Config::Epilogue>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Element, RowMajor*,
      kInputAlignment, Element, ColumnMajor*, kInputAlignment, float, typename Config::Tile,
      typename Config::Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      typename Config::Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problems, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // fp4_groups.cu writes arrays of these types as plain numbers.
  using Scales = typename Mainloop::InternalLayoutSFA;
  static_assert(std::is_same_v<Scales, typename Mainloop::InternalLayoutSFB>);
  static_assert(sizeof(Scales) == sizeof(ScaleLayout));
  static_assert(sizeof(typename Kernel::InternalStrideA) == sizeof(int64_t));
  static_assert(sizeof(typename Kernel::InternalStrideB) == sizeof(int64_t));
  static_assert(sizeof(typename Kernel::InternalStrideD) == sizeof(int64_t));
  static_assert(sizeof(Problems::UnderlyingProblemShape) == sizeof(GroupShape));
};

template <typename Config>
cudaError_t Run(cudaStream_t stream, const Fp4Groups& groups, void* workspace) {
  using Gemm = typename Collective<Config>::Gemm;
  typename Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {
      groups.count, reinterpret_cast<Problems::UnderlyingProblemShape*>(groups.shapes), nullptr};
  auto& a = arguments.mainloop;
  a.ptr_A = reinterpret_cast<decltype(a.ptr_A)>(groups.weights.codes);
  a.dA = reinterpret_cast<decltype(a.dA)>(groups.weights.strides);
  a.ptr_SFA = reinterpret_cast<decltype(a.ptr_SFA)>(groups.weights.scales);
  a.layout_SFA = reinterpret_cast<decltype(a.layout_SFA)>(groups.weights.scale_layouts);
  a.ptr_B = reinterpret_cast<decltype(a.ptr_B)>(groups.rows.codes);
  a.dB = reinterpret_cast<decltype(a.dB)>(groups.rows.strides);
  a.ptr_SFB = reinterpret_cast<decltype(a.ptr_SFB)>(groups.rows.scales);
  a.layout_SFB = reinterpret_cast<decltype(a.layout_SFB)>(groups.rows.scale_layouts);
  auto& d = arguments.epilogue;
  d.ptr_D = reinterpret_cast<decltype(d.ptr_D)>(groups.outputs);
  d.dD = reinterpret_cast<decltype(d.dD)>(groups.output_strides);
  d.thread.alpha_ptr_array = groups.alphas;
  d.thread.dAlpha = {cute::_0{}, cute::_0{}, 1};
  cudaGetDevice(&arguments.hw_info.device_id);
  arguments.hw_info.sm_count = MultiprocessorCount();

  if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return cudaErrorNotSupported;
  if (Gemm::get_workspace_size(arguments) > static_cast<size_t>(kCollectiveBytes)) {
    return cudaErrorMemoryAllocation;
  }
  Gemm gemm;
  const cutlass::Status status = gemm.run(arguments, workspace, stream);
  if (status == cutlass::Status::kSuccess) return cudaSuccess;
  const cudaError_t error = cudaGetLastError();  // CUTLASS may have cleared it
  return error == cudaSuccess ? cudaErrorLaunchFailure : error;
}

}  // namespace

cudaError_t LaunchFp4GemmSm100(cudaStream_t stream, const Fp4Groups& groups, bool many_rows,
                               void* workspace) {
  return many_rows ? Run<ManyRows>(stream, groups, workspace)
                   : Run<FewRows>(stream, groups, workspace);
}

}  // namespace nvfp4
