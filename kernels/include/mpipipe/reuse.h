// Freed memory that fits again: torch's blocks from an allocator that can give the same block out twice.
//
// glibc before 2.38 serves an aligned request by a block that is larger than asked and cuts the ends off. Once
// freed, the rest is too small for the same request, so a heap of equal tensors grows holes (glibc bug 14581).
// Here requests for up to a cache line's alignment become plain ones of whole lines: a freed block fits its
// like. Values, alignment and free() are as before.
#pragma once

#include <cstddef>

namespace mpipipe::cpu {

// Lets every loaded library whose file name begins with one of `prefixes` (`n` of them) call our form of
// posix_memalign for blocks below `largest` bytes. The number of calls redirected: 0 where there is no need
// (another allocator, another libc, glibc 2.38 or newer) or no way. Of the whole process and for good.
size_t reuse_freed_blocks(const char* const* prefixes, size_t n, size_t largest);

}  // namespace mpipipe::cpu
