// What the emulated device has besides the targets of the extension.
#pragma once

#include <vector>

#include "call_chain.h"

namespace nvfp4 {

// Which kernels the next calls take. Small calls would not take some kernels by themselves.
enum class Forced {
  kNothing,
  kSm90,  // those for 9.0 alone, for attention and for plain weights
  kTiles  // for plain weights, that of a device before 9.0, also for a single row
};
extern Forced forced;

// FFI targets for kernels and instructions that no target of the extension runs alone.
std::vector<NamedHandler> FunctionHandlers();

}  // namespace nvfp4
