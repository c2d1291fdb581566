#include "peak.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace attnspan {

namespace {

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

bool has_peak(PeakKind kind, Isa level) {
  return kernels_of(level).peak_loops().compute[static_cast<int>(kind)] != nullptr;
}

double peak_rate(PeakKind kind, Isa level, const Parallel& parallel, double seconds) {
  const auto loop = kernels_of(level).peak_loops().compute[static_cast<int>(kind)];
  int64_t rounds = 1000;
  for (auto start = std::chrono::steady_clock::now(); loop(rounds), seconds_since(start) < 2e-3;
       start = std::chrono::steady_clock::now())
    rounds *= 2;
  return best_rate(parallel, seconds, [&](int64_t) { return loop(rounds); });
}

double read_rate(Isa level, const char* data, int64_t bytes, const Parallel& parallel, double seconds) {
  const auto read = kernels_of(level).peak_loops().read;
  const int64_t share = bytes / parallel.threads / 4096 * 4096;
  return best_rate(parallel, seconds, [&](int64_t item) {
    read(data + item * share, share);
    return static_cast<double>(share);
  });
}

}  // namespace attnspan
