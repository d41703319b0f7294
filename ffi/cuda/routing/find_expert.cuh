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
#pragma unroll
  for (int step = kSearchReach; step > 0; step /= 4) {
    if (step >= experts) continue;
    const int base = kPadded ? 0 : low;  // which bounds are checked against
    const bool first = (kPadded || low + step < experts) && starts[low + step] * times <= place;
    const bool second = base + 2 * step < experts && starts[low + 2 * step] * times <= place;
    const bool third = base + 3 * step < experts && starts[low + 3 * step] * times <= place;
    low += third ? 3 * step : second ? 2 * step : first ? step : 0;
  }
  return low;
}

}  // namespace nvfp4
