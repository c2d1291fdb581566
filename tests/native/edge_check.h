// What becomes of an exception in a loop.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../csrc/threads.h"
#include "../../csrc/xla.h"

namespace attnspan {

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::exit(1);
}

// The exception of one item reaches the caller, whoever ran it, and the next loop works.
inline void check_exceptions(const Parallel& parallel) {
  for (const int64_t bad : {0, 7, 63}) {
    bool caught = false;
    try {
      parallel(64, [&](int64_t item, int) {
        if (item == bad) throw std::runtime_error("an item");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    expect(caught, "an exception in a loop reaches its caller");
  }
  std::atomic<int> ran{0};
  parallel(64, [&](int64_t, int) { ++ran; });
  expect(ran == 64, "a loop runs after one that threw");
}

// XLA's pool, as far as it is used: a thread for each task.
inline void check_exceptions_in_xla() {
  static std::vector<std::thread> threads;
  ffi::Api api{};
  api.thread_pool_num_threads = [](ffi::NumThreads* args) -> ffi::Error* { return *args->threads = 4, nullptr; };
  api.thread_pool_schedule = [](ffi::Schedule* args) -> ffi::Error* {
    return threads.emplace_back(args->task, args->data), nullptr;
  };
  XlaPool pool{&api, nullptr};
  check_exceptions(make_parallel(pool, 0));
  for (auto& thread : threads) thread.join();
  threads.clear();
}

inline void check_edges() {
  check_exceptions(make_parallel(1));
  check_exceptions(make_parallel(4));
  check_exceptions_in_xla();
#if !defined(__SANITIZE_THREAD__)  // which does not see how an OpenMP runtime synchronises
  if (dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL) != nullptr) check_exceptions(make_parallel(4));
#endif
}

}  // namespace attnspan
