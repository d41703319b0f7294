// Finds the expert that owns a sorted row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.h"

namespace nvfp4 {

// A search in a padded table may read entries up to the next multiple of this number.
constexpr int kSearchReach = 256;
static_assert(kMaxExperts == 4 * kSearchReach, "four steps of the first size");

// Returns the last of `experts` experts for which starts[expert] * times <= place; starts[0] must
// be 0. If `starts` counts rows, `place` is a row. An expert that owns nothing starts where the
// next one does, so that the search never stops at it before an expert that owns `place`.
//
// Each step compares three entries, because three loads at a time take as long as one. kPadded:
// entries past the experts, up to a multiple of kSearchReach, can be read and are above every
// `place`.
template <bool kPadded = false>
__device__ __forceinline__ int FindExpert(const int32_t* starts, int experts, int32_t place,
                                          int32_t times = 1) {
  int low = 0;
#pragma unroll
  for (int step = kSearchReach; step > 0; step /= 4) {
    if (step >= experts) continue;
    const int base = kPadded ? 0 : low;  // start of the checks against the number of experts
    const bool first = (kPadded || low + step < experts) && starts[low + step] * times <= place;
    const bool second = base + 2 * step < experts && starts[low + 2 * step] * times <= place;
    const bool third = base + 3 * step < experts && starts[low + 3 * step] * times <= place;
    low += third ? 3 * step : second ? 2 * step : first ? step : 0;
  }
  return low;
}

}  // namespace nvfp4
