// Runs the kernel over random problems at every instruction-set level, for the sanitizers to watch. Then the same while
// another thread writes into the mask and the indices, and with each allocation failing in turn. Values are compared
// with the oracle elsewhere (tests/kernels).
//
// Arguments: how many problems in all, the first of the numbers that they are drawn from, and "small" for small ones.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "allocation_check.h"
#include "edge_check.h"
#include "random_problem.h"

using namespace attnspan;
using namespace attnspan::native;

namespace {

// Overwrites integers of the caller's with anything, one at a time, and puts them back: most calls then find them
// legal, and meet others if they look again.
class Vandal {
 public:
  Vandal(std::vector<std::vector<int32_t>*> ints, std::vector<int64_t>& seeds)
      : thread_([this, ints = std::move(ints), &seeds] { spoil(ints, seeds); }) {
    while (!started_) std::this_thread::yield();
  }
  ~Vandal() {
    stop_ = true;
    thread_.join();
  }
  Vandal(const Vandal&) = delete;
  Vandal& operator=(const Vandal&) = delete;

 private:
  template <class T>
  static void spoil_one(std::vector<T>& values, std::minstd_rand& random) {
    if (values.empty()) return;
    T& x = values[random() % values.size()];
    const T legal = __atomic_load_n(&x, __ATOMIC_RELAXED);
    const uint64_t any = random() % 2 == 0 ? random() * uint64_t{random()} : random() % 1024;
    __atomic_store_n(&x, static_cast<T>(any), __ATOMIC_RELAXED);
    std::this_thread::yield();
    __atomic_store_n(&x, legal, __ATOMIC_RELAXED);
  }
  void spoil(const std::vector<std::vector<int32_t>*>& ints, std::vector<int64_t>& seeds) {
    std::minstd_rand random(1);
    for (started_ = true; !stop_; std::this_thread::yield()) {
      for (auto* values : ints) spoil_one(*values, random);
      spoil_one(seeds, random);
    }
  }

  std::atomic<bool> started_{false}, stop_{false};
  std::thread thread_;
};

bool run_one(Isa level) {
  RandomProblem x;
  const Parallel parallel = make_parallel(static_cast<int>(pick({1, 2, 5})));
  if (forward(x.f, level, parallel).status != Status::ok || backward(x.b, level, parallel).status != Status::ok)
    return false;
  std::optional<RandomPages> pages;
  if (x.may_have_pages()) pages.emplace(x.p);
  if (pages && pages->run(x.f, level, parallel) != Status::ok) return false;
  std::vector<int32_t> none;
  const Vandal vandal({&x.spans, &x.options.q_index, &x.options.k_index, pages ? &pages->table : &none},
                      x.options.seeds);
  for (int i = 0; i < 2; ++i) {
    forward(x.f, level, parallel), backward(x.b, level, parallel);
    if (pages) pages->run(x.f, level, parallel);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 360, seed = argc > 2 ? std::atoi(argv[2]) : 0;
  small_problems = argc > 3 && std::strcmp(argv[3], "small") == 0;
  int levels = 0;
  for (int i = 0; i < isa_levels; ++i) levels += isa_supported(static_cast<Isa>(i));
  const int each = (problems + levels - 1) / levels;
  random_bits.seed(static_cast<unsigned>(seed));
  for (int i = 0; i < isa_levels; ++i) {
    const Isa level = static_cast<Isa>(i);
    if (!isa_supported(level)) continue;
    const int failures =
        fail_allocations(level, std::min(each / 20 + 1, 100));  // forks, so before this process has threads
    for (int n = 0; n < each; ++n)
      if (!run_one(level)) return std::fprintf(stderr, "%s: a legal problem was refused\n", isa_name(level)), 1;
    std::printf("%s: %d problems, %d allocations that failed, seed %d\n", isa_name(level), each, failures, seed);
    std::fflush(stdout);
  }
  check_edges();
}
