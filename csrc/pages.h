// Asks the system for pages of 2 MiB: it then maps fresh memory 512 times less often, one fault for each page.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace attnspan {

inline constexpr size_t large_page = size_t{1} << 21;

// Only memory to which nothing was written yet gains from it, and only the whole large pages that lie in it.
inline void use_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (address + large_page - 1) & ~(large_page - 1), end = (address + bytes) & ~(large_page - 1);
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // where refused: as it was
#endif
}

}  // namespace attnspan
