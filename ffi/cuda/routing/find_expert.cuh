// The expert that owns a sorted row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.h"

namespace nvfp4 {

// Entries of a padded table that a search may read come before the next multiple of this.
constexpr int kSearchReach = 256;
static_assert(kMaxExperts == 4 * kSearchReach, "four steps of the first size");

// The last of `experts` experts with starts[expert] * times <= place, where starts[0] is 0. `place`
// is a row where `starts` counts rows. Experts that own nothing start where the next one does, so
// they are never found before an expert that does own `place`. Three entries are compared at a
// time, because each load takes as long as all three. kPadded: entries past the experts, up to
// kSearchReach, may be read, and are above every `place`.
template <bool kPadded = false>
__device__ __forceinline__ int FindExpert(const int32_t* starts, int experts, int32_t place,
                                          int32_t times = 1) {
  int low = 0;
  const auto begins_before = [&](int offset) {
    const bool inside = kPadded ? offset < experts : low + offset < experts;
    return inside && starts[low + offset] * times <= place;
  };
#pragma unroll
  for (int step = kSearchReach; step > 0; step /= 4) {
    if (step >= experts) continue;
    const bool first = begins_before(step);
    const bool second = begins_before(2 * step);
    const bool third = begins_before(3 * step);
    low += third ? 3 * step : second ? 2 * step : first ? step : 0;
  }
  return low;
}

}  // namespace nvfp4
