// What a call without rows writes, and what becomes of an exception in a loop.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../csrc/attention.h"
#include "../../csrc/threads.h"
#include "../../csrc/xla.h"

namespace attnspan {

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::exit(1);
}

// One forward and backward of these extents, on arrays of ones: what is zero afterwards is what they wrote.
struct EmptyCall {
  int64_t batch, heads, q_len, k_len, dim = 8;
  std::vector<float> queries = std::vector<float>(static_cast<size_t>(batch * heads * q_len * dim), 1.0f);
  std::vector<float> keys = std::vector<float>(static_cast<size_t>(batch * 2 * k_len * dim), 1.0f);
  std::vector<float> out = queries, dq = queries, dk = keys, dv = keys;
  std::vector<float> lse = std::vector<float>(static_cast<size_t>(batch * heads * q_len), 1.0f);
  std::vector<float> sinks = std::vector<float>(static_cast<size_t>(heads), 1.0f), dsinks = sinks;
  std::vector<int32_t> bounds = std::vector<int32_t>(static_cast<size_t>(2 * q_len));

  static bool all_zero(const std::vector<float>& x) {
    for (const float value : x)
      if (value != 0.0f) return false;
    return true;
  }

  void run() {
    const auto of_queries = [&](std::vector<float>& x) {
      return Tensor{x.data(), heads * q_len * dim, q_len * dim, dim};
    };
    const auto of_keys = [&](std::vector<float>& x) { return Tensor{x.data(), 2 * k_len * dim, k_len * dim, dim}; };
    Problem p{Dtype::f32, batch, heads, 2, q_len, k_len, dim, dim, 1, 1.0f, {}, {}, {}, {}};
    p.bounds = {bounds.data(), 0, 0, batch == 0 ? 0 : 1, heads == 0 ? 0 : 1};
    p.q = of_queries(queries), p.k = of_keys(keys), p.v = of_keys(keys);
    p.options.sinks = sinks.data();
    const Parallel parallel = make_parallel(3);
    const ForwardArgs f{p, of_queries(out), lse.data()};
    expect(forward(f, isa_active(), parallel).status == Status::ok, "an empty call runs forward");
    expect(all_zero(out), "nothing to see: the output is 0");
    const BackwardArgs b{p,
                         of_queries(out),
                         of_queries(queries),
                         of_queries(dq),
                         of_keys(dk),
                         of_keys(dv),
                         lse.data(),
                         nullptr,
                         nullptr,
                         false,
                         nullptr,
                         {},
                         dsinks.data()};
    expect(backward(b, isa_active(), parallel).status == Status::ok, "an empty call runs backward");
    expect(all_zero(dq) && all_zero(dk) && all_zero(dv), "nothing to see: gradients are 0");
    expect(all_zero(dsinks), "nothing to see: the sinks' gradients are 0");
  }
};

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
  EmptyCall{0, 4, 5, 7}.run();
  EmptyCall{2, 0, 5, 7}.run();
  EmptyCall{2, 4, 0, 7}.run();
  EmptyCall{2, 4, 5, 0}.run();
  check_exceptions(make_parallel(1));
  check_exceptions(make_parallel(4));
  check_exceptions_in_xla();
#if !defined(__SANITIZE_THREAD__)  // which does not see how an OpenMP runtime synchronises
  if (dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL) != nullptr) check_exceptions(make_parallel(4));
#endif
}

}  // namespace attnspan
