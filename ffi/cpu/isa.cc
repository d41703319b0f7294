// Finds the instruction sets that this CPU runs, best first.
#include "kernels.h"

namespace nvfp4::cpu {
namespace {

const Kernels* const kAllKernels[] = {
#if defined(__x86_64__)
    &kAmxKernels,
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kScalarKernels,
};

}  // namespace

const Kernels* ChooseKernels(std::string_view isa) {
  for (const Kernels* kernels : kAllKernels) {
    const bool wanted = isa == "auto" || isa == kernels->name;
    if (wanted && kernels->supported()) return kernels;
  }
  return nullptr;
}

std::vector<std::string_view> SupportedIsas() {
  std::vector<std::string_view> names;
  for (const Kernels* kernels : kAllKernels) {
    if (kernels->supported()) names.push_back(kernels->name);
  }
  return names;
}

}  // namespace nvfp4::cpu
