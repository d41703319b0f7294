// Says when the next kernel of this host thread may start. The handlers write this, and
// launch_kernel.cuh reads it.
#pragma once

namespace nvfp4 {

// If this is set, the next kernel that this thread launches starts when all work that it depends on
// has ended, even if it could overlap. The launch clears it. The first kernel of a fork and the
// kernel that waits for a fork need this, because no single kernel precedes them
// (launch_kernel.cuh). If a call launches nothing, the next call has the first kernel.
inline thread_local bool next_kernel_starts_last = false;

}  // namespace nvfp4
