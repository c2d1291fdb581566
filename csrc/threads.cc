#include "threads.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <string>
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
struct Search {
  unsigned long long loads = 0;  // how many libraries were ever loaded
  std::string name;
};

// Only notes the name: loading anything from within would take the loader's locks in the wrong order.
int look_for_runtime(dl_phdr_info* info, size_t, void* search) {
  auto& found = *static_cast<Search*>(search);
  found.loads = info->dlpi_adds;
  const char* name = info->dlpi_name;
  if (name == nullptr) return 0;
  const char* slash = std::strrchr(name, '/');
  const char* file = slash != nullptr ? slash + 1 : name;
  const bool runtime = std::strncmp(file, "libgomp", 7) == 0 || std::strncmp(file, "libomp", 6) == 0 ||
                       std::strncmp(file, "libiomp5", 8) == 0;
  // torch's own comes first; another library may have brought one of its own.
  if (runtime && (found.name.empty() || std::strstr(name, "/torch") != nullptr)) found.name = name;
  return 0;
}

GompParallel look_up(const std::string& name) {
  void* library = name.empty() ? nullptr : dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
}
#endif

// Looks again only when libraries have been loaded since: torch may be imported later.
GompParallel find_runtime() {
#if defined(__linux__)
  static std::atomic<GompParallel> known{nullptr};
  static std::atomic<unsigned long long> searched{0};
  Search search;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* loads) {
        *static_cast<unsigned long long*>(loads) = info->dlpi_adds;
        return 1;
      },
      &search.loads);
  if (search.loads == searched.load(std::memory_order_acquire)) return known.load(std::memory_order_relaxed);
  dl_iterate_phdr(look_for_runtime, &search);
  known.store(look_up(search.name), std::memory_order_relaxed);
  searched.store(search.loads, std::memory_order_release);
  return known.load(std::memory_order_relaxed);
#else
  return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
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
  // All threads even for fewer items: a team of another size would end and start threads of the pool.
  if (const GompParallel parallel = find_runtime())
    return parallel(&Loop::enter, &loop, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> helpers;
  try {
    for (int i = 1; i < team; ++i) helpers.emplace_back([&loop] { loop.work(); });
  } catch (const std::exception&) {
    // No more threads or memory to be had: those that started share the work.
  }
  loop.work();
  for (auto& helper : helpers) helper.join();
}

}  // namespace

Parallel make_parallel(int threads) { return {threads < 1 ? 1 : threads, nullptr, run}; }

const char* threading_name() { return find_runtime() != nullptr ? "OpenMP of the process" : "own threads"; }

}  // namespace attnspan
