#include "cuda_peers.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>

#include "cuda/launch.h"

namespace nvfp4 {
namespace {

void Check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // otherwise the next call would report this error as its own
  throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

// Makes a GPU the current one of this thread until the end of a scope. XLA's threads have their
// own.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    Check(cudaGetDevice(&before_), "the current GPU");
    Check(cudaSetDevice(device), "GPU " + std::to_string(device));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

using Groups = std::map<std::pair<std::string, int>, PeerGroup, std::less<>>;

std::mutex mutex;
Groups& KnownGroups() {
  static auto* const groups = new Groups;
  return *groups;
}

}  // namespace

uintptr_t AllocatePeerMemory(int device, int count) {
  const CurrentDevice current(device);
  void* memory = nullptr;
  const auto bytes = static_cast<size_t>(PeerMemoryBytes(count));
  Check(cudaMalloc(&memory, bytes), std::to_string(bytes) + " bytes for the sums of GPUs");
  Check(cudaMemset(memory, 0, bytes), "the memory for the sums of GPUs");
  Check(cudaDeviceSynchronize(), "the memory for the sums of GPUs");
  return reinterpret_cast<uintptr_t>(memory);
}

void EnablePeerAccess(int device, int peer) {
  const CurrentDevice current(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  Check(status, "access of GPU " + std::to_string(device) + " to the memory of GPU " +
                    std::to_string(peer));
}

std::string ExportPeerMemory(int device, uintptr_t memory) {
  const CurrentDevice current(device);
  cudaIpcMemHandle_t handle = {};
  Check(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(memory)),
        "memory of GPU " + std::to_string(device) + " for another process");
  return std::string(handle.reserved, sizeof(handle.reserved));
}

uintptr_t ImportPeerMemory(int device, const std::string& handle) {
  const CurrentDevice current(device);
  cudaIpcMemHandle_t given = {};
  if (handle.size() != sizeof(given.reserved)) {
    throw std::runtime_error("a handle of another process: expected " +
                             std::to_string(sizeof(given.reserved)) + " bytes, got " +
                             std::to_string(handle.size()));
  }
  std::memcpy(given.reserved, handle.data(), handle.size());
  void* memory = nullptr;
  Check(cudaIpcOpenMemHandle(&memory, given, cudaIpcMemLazyEnablePeerAccess),
        "access of GPU " + std::to_string(device) + " to the memory of another process");
  return reinterpret_cast<uintptr_t>(memory);
}

void AddPeerGroup(const std::string& groups, int device, int rank,
                  const std::vector<uintptr_t>& memory, double timeout_seconds) {
  if (memory.size() < 2 || memory.size() > kMaxPeers || rank < 0 ||
      rank >= static_cast<int>(memory.size()) || !(timeout_seconds > 0)) {
    throw std::runtime_error("a group of GPUs: expected 2 to " + std::to_string(kMaxPeers) +
                             " members, one of which this GPU is, and a positive timeout");
  }
  PeerGroup group = {};
  group.rank = rank;
  group.count = static_cast<int32_t>(memory.size());
  group.timeout_ns = static_cast<uint64_t>(timeout_seconds * 1e9);
  std::transform(memory.begin(), memory.end(), group.memory,
                 [](uintptr_t address) { return reinterpret_cast<char*>(address); });
  const CurrentDevice current(device);
  Check(PrepareAllReduce(&group.overlaps), "the kernels for the sums of GPUs");
  void* failure = nullptr;
  Check(cudaHostAlloc(&failure, sizeof(PeerFailure), cudaHostAllocPortable | cudaHostAllocMapped),
        "memory of the host for an error");
  group.failure = new (failure) PeerFailure();
  const std::lock_guard<std::mutex> lock(mutex);
  KnownGroups()[{groups, device}] = group;
}

std::optional<PeerGroup> FindPeerGroup(std::string_view groups, int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = KnownGroups().find({std::string(groups), device});
  if (found == KnownGroups().end()) return std::nullopt;
  return found->second;
}

std::string PeerFailureText() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, group] : KnownGroups()) {
    const volatile PeerFailure& failure = *group.failure;
    if (failure.reason == PeerFailure::kNone) continue;
    const std::string pair = "rank " + std::to_string(group.rank) + " of the GPUs " + key.first +
                             " and rank " + std::to_string(failure.peer);
    if (failure.reason == PeerFailure::kMismatch) {
      return pair + " add up different arrays: all processes must run the same program";
    }
    return pair + " did not meet within " + std::to_string(group.timeout_ns / 1000000000) +
           " s: a process has ended or is late";
  }
  return "";
}

}  // namespace nvfp4
