// Data out of the caches, for timings that must find it where a step does: in memory. Changes no value.
#pragma once

#include <cstddef>

namespace mpipipe::cpu {

// Drops the lines of `n` bytes from `p` on out of every cache, those of other cores included, in some nanoseconds a
// line. False on a processor without an instruction for it; nothing has been done then.
bool evict(const void* p, size_t n);

}  // namespace mpipipe::cpu
