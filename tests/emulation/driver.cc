// What tests/emulation.py calls: the layer and the product of launch.h on host memory.
#include "launch.h"

namespace emulation {
extern bool backwards;
}

namespace nvfp4 {
int multiprocessors = 1;
}

using namespace nvfp4;

namespace {

// packed, block_scale, global_scale, input_scale, bias
ExpertWeights WeightsAt(void* const* operands) {
  return {static_cast<const uint8_t*>(operands[0]), static_cast<const uint8_t*>(operands[1]),
          static_cast<const float*>(operands[2]), static_cast<const float*>(operands[3]),
          static_cast<const float*>(operands[4])};
}

}  // namespace

extern "C" {

// How the next calls run: on how many multiprocessors, and from which end the threads of a block.
void configure(int count, int backwards) {
  multiprocessors = count;
  emulation::backwards = backwards != 0;
}

int64_t moe_workspace_bytes(const MoEShape* shape) { return MoEW4A16WorkspaceBytes(*shape); }

// x, gate_up, down, expert_ids, expert_weights, y, workspace
int moe(const MoEShape* shape, const ActivationParameters* activation, int type, int engine,
        int weight_on_input, int activation_scale, void* const* operands) {
  const MoECall call = {*shape,
                        static_cast<DataType>(type),
                        *activation,
                        static_cast<ActivationScale>(activation_scale),
                        weight_on_input != 0,
                        static_cast<EngineKind>(engine)};
  const MoEBuffers buffers = {operands[0],
                              WeightsAt(operands + 1),
                              WeightsAt(operands + 6),
                              static_cast<const int32_t*>(operands[11]),
                              static_cast<const float*>(operands[12]),
                              operands[13],
                              operands[14]};
  return LaunchMoEW4A16(nullptr, call, buffers);
}

int64_t grouped_gemm_workspace_bytes(const GroupedGemmShape* shape) {
  return GroupedGemmW4A16WorkspaceBytes(*shape);
}

// x, weight, group_sizes, y, workspace
int grouped_gemm(const GroupedGemmShape* shape, int type, int engine, int activation_scale,
                 void* const* operands) {
  const GroupedGemmCall call = {*shape, static_cast<DataType>(type),
                                static_cast<ActivationScale>(activation_scale),
                                static_cast<EngineKind>(engine)};
  const GroupedGemmBuffers buffers = {operands[0], WeightsAt(operands + 1),
                                      static_cast<const int32_t*>(operands[6]), operands[7],
                                      operands[8]};
  return LaunchGroupedGemmW4A16(nullptr, call, buffers);
}

// x, global_scale or null, packed, block_scale, used_scale, partials
int quantize(int64_t m, int64_t k, int type, int swizzled, void* const* operands) {
  return LaunchQuantize(nullptr, {m, k, static_cast<DataType>(type), swizzled != 0},
                        {operands[0], static_cast<const float*>(operands[1]),
                         static_cast<uint8_t*>(operands[2]), static_cast<uint8_t*>(operands[3]),
                         static_cast<float*>(operands[4]), static_cast<uint32_t*>(operands[5])});
}

// logits, bias, expert_ids, expert_weights
int route(const RouterCall* call, void* const* operands) {
  return LaunchRoute(
      nullptr, *call,
      {static_cast<const float*>(operands[0]), static_cast<const float*>(operands[1]),
       static_cast<int32_t*>(operands[2]), static_cast<float*>(operands[3])});
}
}
