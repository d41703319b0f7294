// The submodule `launch_facts` of _nvfp4_cpu: what Python must know about launches to choose a
// kernel, and to give it memory. It is in the extension that every build has, so that programs can
// be lowered for a GPU without the other extension.
#include "launch_facts.h"

#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/ops.h"
#include "cuda/launch.h"
#include "cuda/layers/forms.h"
#include "facts.h"
#include "shapes.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nvfp4 {
namespace {

int64_t CountWords(const char* text) {
  std::istringstream words(text);
  int64_t count = 0;
  for (std::string word; words >> word;) ++count;
  return count;
}

// Returns a Python function of the sizes that `names` lists. It calls `function` with them.
template <typename Function>
nb::object OfSizes(const char* target, const char* names, const Function& function) {
  return nb::cpp_function([=, count = CountWords(names)](const nb::args& given) {
    std::vector<int64_t> sizes;
    for (const nb::handle& size : given) {
      int64_t number = 0;
      if (nb::try_cast(size, number)) sizes.push_back(number);
    }
    if (static_cast<int64_t>(sizes.size()) != count || sizes.size() != given.size()) {
      throw nb::type_error((std::string(target) + ": expected a number for each of " + names +
                            ", got " + nb::repr(given).c_str())
                               .c_str());
    }
    return function(sizes.data());
  });
}

nb::dict WorkspaceBytes() {
  nb::dict bytes;
  const auto add = [&](const WorkspaceFact& fact) {
    bytes[fact.target] = OfSizes(fact.target, fact.sizes, fact.bytes);
  };
  for (const WorkspaceFact& fact : kCudaWorkspaces) add(fact);
  for (const WorkspaceFact& fact : cpu::kWorkspaces) add(fact);
  return bytes;
}

nb::dict WorkspaceOfRows() {
  nb::dict rows;
  const auto add = [&](const WorkspaceRowsFact& fact) {
    rows[fact.target] =
        OfSizes(fact.target, fact.sizes, [of_sizes = fact.rows](const int64_t* sizes) {
          const WorkspaceRows found = of_sizes(sizes);
          return std::make_tuple(found.fixed, found.of_row, found.most_rows);
        });
  };
  for (const WorkspaceRowsFact& fact : kCudaWorkspaceRows) add(fact);
  for (const WorkspaceRowsFact& fact : cpu::kWorkspaceRows) add(fact);
  return rows;
}

// What notes of `explain` say about the choices of forms.h.
void DefineForms(nb::module_& m) {
  m.def(
      "most_unsorted_tokens",
      [](int64_t top_k, int64_t h, int64_t i, bool gated, bool token_scales, int64_t shared_bytes) {
        const auto scale = token_scales ? ActivationScale::kToken : ActivationScale::kNone;
        return MostUnsortedTokens(MoEShape{0, top_k, 1, h, i, gated ? 2 * i : i}, DataType::kBF16,
                                  scale, shared_bytes);
      },
      "top_k"_a, "h"_a, "i"_a, "gated"_a, "token_scales"_a, "shared_bytes"_a,
      "Return up to how many tokens an expert layer runs without sorting them by expert.");
  m.def(
      "few_slots_shared_bytes",
      [](int64_t slots, int64_t top_k, int64_t h, int64_t i) {
        return FewSlotsSharedBytes(MoEShape{0, top_k, 1, h, i, i}, slots);
      },
      "slots"_a, "top_k"_a, "h"_a, "i"_a,
      "Return the bytes of shared memory of a block that runs so many slots without a sort.");
  m.def(
      "most_linear_rows",
      [](int64_t k, bool clusters, int64_t shared_bytes) {
        return MostLinearRows(k, {0, shared_bytes, clusters, false});
      },
      "k"_a, "clusters"_a, "shared_bytes"_a,
      "Return up to how many rows a linear layer runs in one kernel, without a workspace.");
}

}  // namespace

void DefineLaunchFacts(nb::module_ m) {
  m.doc() = "What kernels and Python must agree on: sizes that kernels take, and bytes of memory.";
  for (const NumberFact& number : kCudaNumbers) m.attr(number.name) = number.value;
  const nb::object range = nb::module_::import_("builtins").attr("range");
  const auto add = [&](const SizesFact& sizes) {
    m.attr(sizes.name) = range(sizes.least, sizes.most + 1, sizes.factor);
  };
  for (const SizesFact& sizes : kCudaSizes) add(sizes);
  for (const SizesFact& sizes : cpu::kSizes) add(sizes);
  m.attr("WORKSPACE_BYTES") = WorkspaceBytes();
  m.attr("WORKSPACE_ROWS") = WorkspaceOfRows();
  DefineForms(m);
}

}  // namespace nvfp4
