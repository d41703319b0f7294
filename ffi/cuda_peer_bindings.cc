// The target of sums over GPUs, which needs memory that cuda_peers.h has set up.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "call_chain.h"
#include "checks.h"
#include "cuda/launch.h"
#include "cuda_bindings.h"
#include "cuda_checks.h"
#include "cuda_peers.h"
#include "operands.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {
namespace {

constexpr Operand kAllReduceOperands[] = {
    {"x", kActivation, "[n]"},
    {"y", Like("x"), "[n]", kResult},
};

ffi::Error AllReduce(cudaStream_t stream, const Call& operands, std::string_view groups,
                     int64_t size) {
  AllReduceCall call = {};
  call.type = operands.type("x");
  const int64_t bytes = operands.size("n") * Bytes(call.type);
  NVFP4_RETURN_IF_ERROR(operands.Check(
      {MultipleOf("bytes of x", bytes, kPieceBytes), AtMost("bytes of x", bytes, kMaxPeerBytes)}));
  // After such an error, no call of CUDA succeeds any more.
  const std::string failure = PeerFailureText();
  if (!failure.empty()) return ffi::Error::Internal(failure);
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return FromCuda(status);
  const std::optional<PeerGroup> group = FindPeerGroup(groups, device);
  if (!group || group->count != size) {
    return Expected("groups", "GPUs that parallel.connect_peers has connected in this process",
                    std::string(groups));
  }
  call.x = operands.in<void>("x");
  call.y = operands.out("y");
  call.pieces = static_cast<int32_t>(bytes / kPieceBytes);
  call.group = *group;
  // If the work is left to a norm that has no kernel for both, the kernel of the sum need not wait:
  // that of the norm does.
  call.starts_next = running_chain.fuses ? running_chain.Follows() : running_chain.StartsNext();
  if (running_chain.fuses) {
    running_chain.work = call;
    return ffi::Error::Success();
  }
  return FromCuda(LaunchAllReduce(stream, call));
}

}  // namespace

std::vector<NamedHandler> PeerHandlers() {
  return {
      NVFP4_CUDA_TARGET("nvfp4_all_reduce_cuda", kAllReduceOperands, AllReduce,
                        .Attr<std::string_view>("groups").Attr<int64_t>("size")),
  };
}

}  // namespace nvfp4
