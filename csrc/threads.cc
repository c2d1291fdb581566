#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

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
  std::string torch, runtime;  // torch's library that computes; the first OpenMP runtime
};

bool starts_with(const char* text, const char* beginning) {
  return std::strncmp(text, beginning, std::strlen(beginning)) == 0;
}

// Only notes names: loading anything from within would take the loader's locks in the wrong order.
int look_for_runtime(dl_phdr_info* info, size_t, void* search) {
  auto& found = *static_cast<Search*>(search);
  const char* name = info->dlpi_name;
  if (name == nullptr) return 0;
  const char* slash = std::strrchr(name, '/');
  const char* file = slash != nullptr ? slash + 1 : name;
  if (found.torch.empty() && starts_with(file, "libtorch_cpu.so")) found.torch = name;
  const bool runtime = starts_with(file, "libgomp") || starts_with(file, "libomp") || starts_with(file, "libiomp5");
  if (runtime && found.runtime.empty()) found.runtime = name;
  return 0;
}

// In a library, or in what it depends on.
GompParallel look_up(const std::string& name) {
  void* library = name.empty() ? nullptr : dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
}

// The one that torch's own calls reach: the loader looks at what the whole process shares, then at what torch depends
// on. Without torch, the first that was loaded.
GompParallel search_runtime() {
  if (const auto shared = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))) return shared;
  Search search;
  dl_iterate_phdr(look_for_runtime, &search);
  const GompParallel of_torch = look_up(search.torch);
  return of_torch != nullptr ? of_torch : look_up(search.runtime);
}
#endif

// Looks again only when libraries have been loaded since: torch may be imported later.
GompParallel find_runtime() {
#if defined(__linux__)
  static std::atomic<GompParallel> known{nullptr};
  static std::atomic<unsigned long long> searched{0};
  unsigned long long loads = 0;  // how many libraries were ever loaded
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        *static_cast<unsigned long long*>(to) = info->dlpi_adds;
        return 1;
      },
      &loads);
  if (loads == searched.load(std::memory_order_acquire)) return known.load(std::memory_order_relaxed);
  known.store(search_runtime(), std::memory_order_relaxed);
  searched.store(loads, std::memory_order_release);
  return known.load(std::memory_order_relaxed);
#else
  return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
}

// The threads of an OpenMP runtime do not survive a fork, but the runtime of the child waits for them: a forked child
// starts threads of its own for each call.
std::atomic<bool> forked{false};
[[maybe_unused]] const int fork_handlers = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Loop {
  int64_t items;
  void (*body)(void*, int64_t, int);
  void* context;
  std::atomic<int64_t> next{0};
  std::atomic<int> thread{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};  // of the first body that threw; the rest of the items is left

  void work() noexcept {
    const int id = thread.fetch_add(1);
    try {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(context, i, id);
    } catch (...) {
      next = items;
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
  static void enter(void* loop) { static_cast<Loop*>(loop)->work(); }
};

void work_together(Loop& loop, int threads) {
  const int team = static_cast<int>(loop.items < threads ? loop.items : threads);
  if (team <= 1) return loop.work();
  // All threads even for fewer items: a team of another size would end and start threads of the pool.
  if (const GompParallel parallel = forked ? nullptr : find_runtime())
    return parallel(&Loop::enter, &loop, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(team));
    for (int i = 1; i < team; ++i) helpers.emplace_back([&loop] { loop.work(); });
  } catch (const std::exception&) {
    // No more threads or memory to be had: those that started share the work.
  }
  loop.work();
  for (auto& helper : helpers) helper.join();
}

void run(void*, int threads, int64_t items, void (*body)(void*, int64_t, int), void* context) {
  Loop loop{items, body, context};
  work_together(loop, threads);
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace

Parallel make_parallel(int threads) { return {threads < 1 ? 1 : threads, nullptr, run}; }

const char* threading_name() { return !forked && find_runtime() != nullptr ? "OpenMP of the process" : "own threads"; }

}  // namespace attnspan
