#include "peak.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace attnspan {

#define ATTNSPAN_LEVEL(name) \
  namespace name {           \
  PeakLoops peak_loops();    \
  }
ATTNSPAN_LEVEL(portable)
#if defined(__x86_64__)
ATTNSPAN_LEVEL(avx2)
ATTNSPAN_LEVEL(avx512)
ATTNSPAN_LEVEL(avx512bf16)
ATTNSPAN_LEVEL(amx)
ATTNSPAN_LEVEL(amxfp16)
#endif
#undef ATTNSPAN_LEVEL

namespace {

PeakLoops loops(Isa level) {
  switch (level) {
#if defined(__x86_64__)
    case Isa::avx2:
      return avx2::peak_loops();
    case Isa::avx512:
      return avx512::peak_loops();
    case Isa::avx512bf16:
      return avx512bf16::peak_loops();
    case Isa::amx:
      return amx::peak_loops();
    case Isa::amxfp16:
      return amxfp16::peak_loops();
#endif
    default:
      return portable::peak_loops();
  }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best of several short passes, each of which keeps all threads busy: `pass(thread)` returns what it did.
template <class Pass>
double best_rate(const Parallel& parallel, double seconds, const Pass& pass) {
  const auto begin = std::chrono::steady_clock::now();
  double best = 0.0;
  std::vector<double> done(static_cast<size_t>(parallel.threads));
  do {
    const auto start = std::chrono::steady_clock::now();
    parallel(parallel.threads, [&](int64_t item, int) { done[static_cast<size_t>(item)] = pass(item); });
    double sum = 0.0;
    for (const double x : done) sum += x;
    best = std::max(best, sum / seconds_since(start));
  } while (seconds_since(begin) < seconds);
  return best;
}

}  // namespace

bool has_peak(PeakKind kind, Isa level) { return loops(level).compute[static_cast<int>(kind)] != nullptr; }

double peak_rate(PeakKind kind, Isa level, const Parallel& parallel, double seconds) {
  const auto loop = loops(level).compute[static_cast<int>(kind)];
  int64_t rounds = 1000;
  for (auto start = std::chrono::steady_clock::now(); loop(rounds), seconds_since(start) < 2e-3;
       start = std::chrono::steady_clock::now())
    rounds *= 2;
  return best_rate(parallel, seconds, [&](int64_t) { return loop(rounds); });
}

double read_rate(Isa level, const char* data, int64_t bytes, const Parallel& parallel, double seconds) {
  const auto read = loops(level).read;
  const int64_t share = bytes / parallel.threads / 4096 * 4096;
  return best_rate(parallel, seconds, [&](int64_t item) {
    read(data + item * share, share);
    return static_cast<double>(share);
  });
}

}  // namespace attnspan
