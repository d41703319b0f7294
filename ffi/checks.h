// Checks of the operands of an FFI call. An error message names the operand, what was expected, and
// what came:
//
//   packed [e, n, k/2]: expected [3, 128, 32], got [3, 128, 16]
//
// The Python ops check their arguments before, and speak of those arguments. The checks in this
// file protect callers who call the FFI targets directly.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "shapes.h"
#include "xla/ffi/api/ffi.h"

#define NVFP4_RETURN_IF_ERROR(expression)          \
  do {                                             \
    ::xla::ffi::Error nvfp4_error = (expression);  \
    if (nvfp4_error.failure()) return nvfp4_error; \
  } while (false)

namespace nvfp4 {

namespace ffi = ::xla::ffi;

template <typename Dims>
std::string DimsText(const Dims& dims) {
  std::string text = "[";
  for (int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

inline std::string TypeText(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return "bfloat16";
    case ffi::F16:
      return "float16";
    case ffi::F32:
      return "float32";
    case ffi::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::U8:
      return "uint8";
    case ffi::S32:
      return "int32";
    default:
      return "type " + std::to_string(static_cast<int>(type));
  }
}

inline ffi::Error Expected(std::string_view what, const std::string& expected,
                           const std::string& got) {
  return ffi::Error::InvalidArgument(std::string(what) + ": expected " + expected + ", got " + got);
}

// `what` names the operand and the letters of its dimensions, as in "packed [e, n, k/2]".
inline ffi::Error ExpectDims(std::string_view what, ffi::Span<const int64_t> got,
                             std::initializer_list<int64_t> expected) {
  bool same = got.size() == expected.size();
  for (size_t d = 0; same && d < expected.size(); ++d) same = got[d] == expected.begin()[d];
  return same ? ffi::Error::Success() : Expected(what, DimsText(expected), DimsText(got));
}

// A limit of a size or of an attribute.
struct Limit {
  enum Kind { kLeast, kMost, kFactor } kind;
  std::string_view what;
  int64_t got, bound;

  bool IsKept() const {
    return kind == kLeast  ? got >= bound
           : kind == kMost ? got <= bound
                           : got > 0 && got % bound == 0;
  }
};

constexpr Limit AtLeast(std::string_view what, int64_t got, int64_t least) {
  return {Limit::kLeast, what, got, least};
}
constexpr Limit AtMost(std::string_view what, int64_t got, int64_t most) {
  return {Limit::kMost, what, got, most};
}
constexpr Limit MultipleOf(std::string_view what, int64_t got, int64_t factor) {
  return {Limit::kFactor, what, got, factor};
}

// Returns an error for the first limit that is not kept.
inline ffi::Error Expect(std::initializer_list<Limit> limits) {
  constexpr const char* kKinds[] = {"at least ", "at most ", "a positive multiple of "};
  for (const Limit& limit : limits) {
    if (limit.IsKept()) continue;
    return Expected(limit.what, kKinds[limit.kind] + std::to_string(limit.bound),
                    std::to_string(limit.got));
  }
  return ffi::Error::Success();
}

// Finds the record that has the name `got`. `table` is an array of records with a member `name`.
template <typename Record, size_t kSize>
ffi::Error ExpectName(std::string_view what, std::string_view got, const Record (&table)[kSize],
                      const Record** record) {
  *record = std::find_if(table, table + kSize, [&](const Record& row) { return row.name == got; });
  if (*record != table + kSize) return ffi::Error::Success();
  std::string names;
  for (const Record& row : table) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return Expected(what, "one of " + names, std::string(got));
}

// Returns the gate whose silu is `limit`, a positive number. silu increases where it is positive,
// so that min(silu(g), limit) = silu(min(g, SiluGate(limit))).
inline float SiluGate(float limit) {
  double low = limit, high = limit + 0.28;  // x - silu(x) = x / (1 + e^x) is below 0.28
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (middle / (1.0 + std::exp(-middle)) < limit ? low : high) = middle;
  }
  return static_cast<float>(high);
}

// Fills `parameters` from the attributes of an activation.
inline ffi::Error ReadActivation(std::string_view activation, float alpha, float beta, float limit,
                                 ActivationParameters* parameters) {
  const ActivationRecord* record = nullptr;
  NVFP4_RETURN_IF_ERROR(ExpectName("activation", activation, kActivations, &record));
  const float gate_limit = record->bounds_result ? SiluGate(limit) : limit;
  *parameters = {record->kind, record->gated, record->interleaved, alpha, beta, gate_limit, limit};
  return ffi::Error::Success();
}

}  // namespace nvfp4
