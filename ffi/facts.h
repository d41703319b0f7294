// Facts that Python reads before it chooses and calls a kernel. Tables of them stand beside the
// declarations of launches: at the ends of cuda/launch.h and cpu/ops.h. launch_facts.cc exports all
// rows.
#pragma once

#include <cstdint>

namespace nvfp4 {

struct NumberFact {
  const char* name;
  int64_t value;
};

// The multiples of `factor` from `least` to `most`: the sizes that a kernel takes.
struct SizesFact {
  const char* name;
  int64_t least, most, factor;
};

// Stands for a size without an upper bound of its own: OPEN of backends/record.py, less 1.
constexpr int64_t kOpen = (int64_t{1} << 62) - 1;

// The bytes of scratch memory of a call of an FFI target, as a function of the sizes that `sizes`
// names, with spaces between them. A flag counts as a size, 0 or 1.
struct WorkspaceFact {
  const char* target;
  const char* sizes;
  int64_t (*bytes)(const int64_t* sizes);
};

// The same for targets whose number of rows may be unknown until a call. The bytes are
// fixed + of_row * min(rows, most_rows). There is no limit of rows if most_rows is 0.
struct WorkspaceRows {
  int64_t fixed, of_row, most_rows;
};

struct WorkspaceRowsFact {
  const char* target;
  const char* sizes;
  WorkspaceRows (*rows)(const int64_t* sizes);
};

}  // namespace nvfp4
