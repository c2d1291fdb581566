#include <atomic>
#include <exception>

#include "threads.h"
#include "xla.h"

namespace attnspan {
namespace {

// A task may start when the loop is long over, so what it looks at outlives the loop; it never waits to be started.
struct Loop {
  int64_t items;
  void (*body)(void*, int64_t, int);
  void* context;
  std::atomic<int> holders;
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<int> thread{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};  // of the first body that threw

  void work() noexcept {
    const int id = thread.fetch_add(1, std::memory_order_relaxed);
    int64_t mine = 0;
    try {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items; ++mine) body(context, i, id);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      const int64_t left = items - next.exchange(items);  // nobody's any more
      mine += 1 + (left > 0 ? left : 0);
    }
    if (mine > 0 && done.fetch_add(mine, std::memory_order_acq_rel) + mine == items) done.notify_all();
  }
  void release() {
    if (holders.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  void wait() {
    for (int64_t seen; (seen = done.load(std::memory_order_acquire)) < items;) done.wait(seen);
  }
};

void enter(void* data) {
  auto* loop = static_cast<Loop*>(data);
  loop->work();
  loop->release();
}

void destroy(const ffi::Api& api, ffi::Error* error) {
  ffi::ErrorDestroy args{sizeof(args), nullptr, error};
  api.error_destroy(&args);
}

void run(void* data, int threads, int64_t items, void (*body)(void*, int64_t, int), void* context) {
  const auto& pool = *static_cast<XlaPool*>(data);
  const int team = static_cast<int>(items < threads ? items : threads);
  auto* loop = new Loop{items, body, context, team};
  for (int i = 1; i < team; ++i) {
    ffi::Schedule args{sizeof(args), nullptr, pool.context, &enter, loop};
    if (ffi::Error* error = pool.api->thread_pool_schedule(&args)) {
      destroy(*pool.api, error);  // The threads that there are share the work.
      loop->release();
    }
  }
  loop->work();
  loop->wait();
  const std::exception_ptr error = loop->error;
  loop->release();
  if (error) std::rethrow_exception(error);
}

int threads_of(const XlaPool& pool) {
  int64_t threads = 0;
  ffi::NumThreads args{sizeof(args), nullptr, pool.context, &threads};
  if (ffi::Error* error = pool.api->thread_pool_num_threads(&args)) {
    destroy(*pool.api, error);
    return 0;
  }
  return static_cast<int>(threads);
}

}  // namespace

Parallel make_parallel(XlaPool& pool, int threads) {
  const int most = threads_of(pool);
  if (most == 0) return make_parallel(threads);
  return {threads < 1 || threads > most ? most : threads, &pool, run};
}

}  // namespace attnspan
