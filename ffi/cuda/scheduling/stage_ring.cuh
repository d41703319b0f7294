// The position of a warp in a ring of pipeline stages. Copying and multiplying warps have one each.
#pragma once

#include <cstdint>

namespace nvfp4 {

template <int kStages>
struct StageRing {
  int stage = 0;
  uint32_t phase = 0;  // of the mbarriers of the stage

  __device__ __forceinline__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace nvfp4
