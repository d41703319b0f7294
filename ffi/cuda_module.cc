// The module _nvfp4_cuda: the CUDA kernels as XLA FFI targets, and numbers about them for tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <string>

#include "call_chain.h"
#include "cuda/launch.h"
#include "cuda_bindings.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

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
}
