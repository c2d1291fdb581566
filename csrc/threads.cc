#include "threads.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <link.h>
#endif

namespace attnspan {
namespace {

// The entry point that compilers emit for `#pragma omp parallel`; libgomp, libomp and libiomp all export it.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

#if defined(__linux__)
int look_for_runtime(dl_phdr_info* info, size_t, void* found) {
  const char* name = info->dlpi_name;
  if (name == nullptr ||
      (!std::strstr(name, "libgomp") && !std::strstr(name, "libomp") && !std::strstr(name, "libiomp5")))
    return 0;
  void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return 0;
  *static_cast<GompParallel*>(found) = reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
  return *static_cast<GompParallel*>(found) != nullptr;
}
#endif

GompParallel find_runtime() {
  static std::atomic<GompParallel> known{nullptr};  // only success is remembered: torch may be imported later
  if (GompParallel entry = known.load(std::memory_order_relaxed)) return entry;
  GompParallel entry = nullptr;
#if defined(__linux__)
  dl_iterate_phdr(look_for_runtime, &entry);
#else
  entry = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
  if (entry != nullptr) known.store(entry, std::memory_order_relaxed);
  return entry;
}

struct Loop {
  int64_t items;
  void (*body)(void*, int64_t, int);
  void* context;
  std::atomic<int64_t> next{0};
  std::atomic<int> thread{0};

  void work() {
    const int id = thread.fetch_add(1);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(context, i, id);
  }
  static void enter(void* loop) { static_cast<Loop*>(loop)->work(); }
};

void run(void*, int threads, int64_t items, void (*body)(void*, int64_t, int), void* context) {
  Loop loop{items, body, context};
  const int team = static_cast<int>(items < threads ? items : threads);
  if (team <= 1) return loop.work();
  if (const GompParallel parallel = find_runtime())
    return parallel(&Loop::enter, &loop, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> helpers;
  for (int i = 1; i < team; ++i) helpers.emplace_back([&loop] { loop.work(); });
  loop.work();
  for (auto& helper : helpers) helper.join();
}

}  // namespace

Parallel make_parallel(int threads) { return {threads < 1 ? 1 : threads, nullptr, run}; }

const char* threading_name() { return find_runtime() != nullptr ? "OpenMP of the process" : "own threads"; }

}  // namespace attnspan
