// The loops behind the ceilings, compiled once per instruction-set level.
#include "amx_engine.h"
#include "attention.h"

namespace attnspan::ATTNSPAN_ISA {
namespace {

// Keeps a value in a register: the compiler must neither fold the loop nor spill it.
template <class V>
inline void keep(V& x) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(x));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(x));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(x));
#else
  asm volatile("" : "+m"(x));
#endif
}

constexpr int chains = 12;  // independent sums: more than latency times throughput of any processor so far

// `step` applied to each of the sums, which the compiler must see as so many registers and not as an array.
template <class V, class Step>
double chains_of(int64_t rounds, int64_t flops, V first, const Step& step) {
  V a = first, b = first, c = first, d = first, e = first, f = first, g = first, h = first, i = first, j = first,
    k = first, l = first;
  for (int64_t n = 0; n < rounds; ++n) {
    step(a), step(b), step(c), step(d), step(e), step(f), step(g), step(h), step(i), step(j), step(k), step(l);
    keep(a), keep(b), keep(c), keep(d), keep(e), keep(f), keep(g), keep(h), keep(i), keep(j), keep(k), keep(l);
  }
  return static_cast<double>(rounds * chains * flops);
}

double peak_fma(int64_t rounds) {
  const Vec x = set(0.999f), y = set(1e-3f);
  using V = decltype(Vec::v);
  return chains_of(rounds, Vec::width * 2, set(1.0f).v, [=](V& sum) { sum = fma({sum}, x, y).v; });
}

#if defined(__AVX512BF16__)
double peak_dot(int64_t rounds) {
  const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3c003c00));
  return chains_of(rounds, 16 * 4, _mm512_set1_ps(1.0f), [=](__m512& sum) { sum = _mm512_dpbf16_ps(sum, x, x); });
}
#endif

#if defined(__AMX_BF16__)
// `products` of tiles count as one.
template <class C, int products>
double peak_tiles(int64_t rounds) {
  alignas(64) static const C operand[16 * 32] = {};
  const typename AmxEngine<C, 1>::Session session;
  AmxEngine<C, 1>::repeat(operand, rounds);
  return static_cast<double>(rounds) * 4 * 16 * 16 * 64 / products;
}
#endif

void read(const char* data, int64_t bytes) {
  const float* p = reinterpret_cast<const float*>(data);
  Vec sum[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i + 4 * Vec::width <= bytes / 4; i += 4 * Vec::width)
    for (int j = 0; j < 4; ++j) sum[j] = vmax(sum[j], load(p + i + j * Vec::width));
  for (auto& x : sum) keep(x.v);
}

}  // namespace

PeakLoops peak_loops() {
  PeakLoops loops{{peak_fma}, read};
#if defined(__AVX512BF16__)
  loops.compute[1] = peak_dot;
#endif
#if defined(__AMX_BF16__)
  loops.compute[2] = peak_tiles<bf16, 1>;
  loops.compute[3] = peak_tiles<bf16, 6>;
#if defined(ATTNSPAN_AMX_FP16)
  loops.compute[4] = peak_tiles<f16, 1>;
#endif
#endif
  return loops;
}

}  // namespace attnspan::ATTNSPAN_ISA
