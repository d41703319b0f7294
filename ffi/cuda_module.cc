// The module _nvfp4_cuda: the CUDA kernels as XLA FFI targets, and numbers about them for tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "call_chain.h"
#include "cuda/launch.h"
#include "cuda_bindings.h"
#include "cuda_peers.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nvfp4 {
namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict targets;
  for (const NamedHandler& target : CudaHandlers()) {
    targets[std::string(target.name).c_str()] = Capsule(target.handler);
  }
  targets["nvfp4_call_chain_cuda"] = Capsule(RunCudaChain);
  return targets;
}

}  // namespace
}  // namespace nvfp4

NB_MODULE(_nvfp4_cuda, m) {
  m.def("registrations", &nvfp4::Registrations, "Return {FFI target name: capsule}.");
  m.def(
      "ffi_api_version", [] { return std::pair<int, int>(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "Return the (major, minor) of the XLA FFI headers that this module was built with.");
  m.def(
      "architectures", [] { return NVFP4_ARCHITECTURES; },
      "Return CMake's names of the architectures of the kernels, separated by spaces.");
  m.def(
      "nvcc_version", [] { return NVFP4_NVCC; },
      "Return the version of the nvcc that compiled the kernels.");
  m.def(
      "emulates_blackwell", [] { return NVFP4_EMULATE_BLACKWELL != 0; },
      "Return whether GPUs of compute capability 9.0 can run the targets for 10.x and 12.x, by "
      "emulation.");
  m.def("allocate_peer_memory", &nvfp4::AllocatePeerMemory, "device"_a, "count"_a,
        "Return the address of new memory for the sums of a GPU with count - 1 others.");
  m.def("enable_peer_access", &nvfp4::EnablePeerAccess, "device"_a, "peer"_a,
        "Let a GPU access the memory of another GPU of this process.");
  m.def(
      "export_peer_memory",
      [](int device, uintptr_t memory) {
        const std::string handle = nvfp4::ExportPeerMemory(device, memory);
        return nb::bytes(handle.data(), handle.size());
      },
      "device"_a, "memory"_a, "Return what another process needs to access the memory.");
  m.def(
      "import_peer_memory",
      [](int device, nb::bytes handle) {
        return nvfp4::ImportPeerMemory(device, std::string(handle.c_str(), handle.size()));
      },
      "device"_a, "handle"_a, "Return the address of memory that another process has exported.");
  m.def("add_peer_group", &nvfp4::AddPeerGroup, "groups"_a, "device"_a, "rank"_a, "memory"_a,
        "timeout_seconds"_a, "Make a GPU of this process a member of a group.");
  m.def("peer_failure", &nvfp4::PeerFailureText,
        "Return why a sum of this process has ended with an error; empty if none has.");
}
