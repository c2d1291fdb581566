// Allocations that fail, each in turn: the call says so, and the process goes on.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <optional>
#include <vector>

#include "edge_check.h"
#include "random_problem.h"

namespace attnspan::native {

// How many allocations are left until one fails; below 1 none does.
inline std::atomic<int64_t> allocations_left{0};
inline bool fails() { return allocations_left > 0 && allocations_left.fetch_sub(1) == 1; }

}  // namespace attnspan::native

// Everything in this program that allocates as C++ does comes here; what takes aligned memory is linked to the other.
void* operator new(std::size_t bytes) {
  if (attnspan::native::fails()) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto step = static_cast<std::size_t>(alignment);
  if (void* const memory = std::aligned_alloc(step, (bytes + step - 1) / step * step)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

extern "C" void* __real_aligned_alloc(std::size_t alignment, std::size_t bytes);
extern "C" void* __wrap_aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return attnspan::native::fails() ? nullptr : __real_aligned_alloc(alignment, bytes);
}

namespace attnspan::native {

// Runs a pass while one allocation fails. Returns whether it got as far as that one.
template <class Run>
bool survives_failure_of(int64_t which, const Run& run, const Parallel& parallel) {
  allocations_left = which;
  const Status status = run();
  const bool failed = allocations_left.exchange(0) <= 0;
  // Where no thread could be started, the others do its work.
  expect(status == Status::ok || (failed && status == Status::out_of_memory), "a failed allocation is reported");
  expect(run() == Status::ok, "the next call runs");
  check_exceptions(parallel);
  return failed;
}

// A process of its own, which has no memory left over from other calls, for each allocation of each pass over some
// problems. Returns how many failed.
inline int fail_allocations(Isa level, int problems) {
  int failures = 0;
  for (int n = 0; n < problems; ++n) {
    RandomProblem x;
    std::optional<RandomPages> pages;
    if (x.may_have_pages()) pages.emplace(x.p);
    const Parallel parallel = make_parallel(static_cast<int>(pick({1, 3})));
    const auto run = [&](int pass) {
      return pass == 0   ? forward(x.f, level, parallel).status
             : pass == 1 ? backward(x.b, level, parallel).status
                         : pages->run(x.f, level, parallel);
    };
    for (int pass = 0; pass < (pages ? 3 : 2); ++pass)
      for (int64_t which = 1;; ++which, ++failures) {
        const pid_t child = fork();
        expect(child >= 0, "a process starts");
        if (child == 0) {
          if (pass == 1) expect(run(0) == Status::ok, "a legal problem runs");
          std::_Exit(survives_failure_of(which, [&] { return run(pass); }, parallel) ? 0 : 2);
        }
        int status = 0;
        waitpid(child, &status, 0);
        expect(WIFEXITED(status) && WEXITSTATUS(status) != 1, "no failed allocation ends a process");
        if (WEXITSTATUS(status) == 2) break;  // there are no more
        expect(WEXITSTATUS(status) == 0, "a process ends as it should");
      }
  }
  return failures;
}

}  // namespace attnspan::native
