// Sorts slots by expert; see sort_by_expert.cu.
#pragma once

#include "cuda/scheduling/tile_scheduler.cuh"

namespace nvfp4 {

// Sorts the slots 0 to num_slots - 1 by expert_ids[slot], and writes `schedules`. Slots of one
// expert keep their order. Slots whose id is not in [0, num_experts) are left out. There must be at
// most 65536 slots and at least one expert; callers handle calls without experts themselves.
cudaError_t LaunchSortByExpert(cudaStream_t stream, const int32_t* expert_ids, int64_t num_slots,
                               int64_t num_experts, const ExpertRows& rows, const TileRule& rule,
                               const TileSchedules& schedules);

}  // namespace nvfp4
