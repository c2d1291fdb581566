// Random problems for the sanitizers to watch: each array is a heap block of exactly the size that the strides reach.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "../../csrc/attention.h"
#include "../../csrc/threads.h"

namespace attnspan::native {

inline std::mt19937 random_bits(0);
inline bool small_problems = false;  // a hundred times as many in the same time

inline int64_t pick(std::initializer_list<int64_t> values) { return values.begin()[random_bits() % values.size()]; }

inline size_t element_size(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// A (batch, heads, length, dim) array stored as (batch, length, heads, dim), of small numbers in any of the dtypes.
struct Array {
  std::vector<char> bytes;
  Tensor tensor;
  Array(Dtype dtype, int64_t batch, int64_t heads, int64_t length, int64_t dim)
      : bytes(static_cast<size_t>(batch * heads * length * dim) * element_size(dtype)) {
    for (size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<char>(i % element_size(dtype) ? 0x3c : random_bits());
    tensor = {bytes.data(), length * heads * dim, dim, heads * dim};
  }
  void spoil(Dtype dtype) {  // with a NaN somewhere
    if (bytes.empty()) return;
    const size_t size = element_size(dtype), at = random_bits() % (bytes.size() / size) * size;
    std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), size, static_cast<char>(0xff));
  }
};

// Documents of random lengths, some without keys or without rows, and padding behind them.
inline std::vector<int32_t> spans_of_documents(int64_t slices, const Problem& p) {
  std::vector<int32_t> bounds(static_cast<size_t>(slices * p.q_len * p.runs * 2));
  for (int64_t slice = 0; slice < slices; ++slice)
    for (int64_t row = 0, key = 0, end; row < p.q_len && key < p.k_len; row = end) {
      end = std::min(p.q_len, row + pick({1, 5, 16, 40, 100}));
      const int64_t first = std::min(p.k_len, key + pick({0, 0, 3}));
      key = std::min(p.k_len, first + pick({0, 1, 5, 16, 40, 100}));
      for (int64_t i = row; i < end; ++i) {
        int32_t* span = &bounds[static_cast<size_t>((slice * p.q_len + i) * p.runs * 2)];
        span[0] = static_cast<int32_t>(first), span[1] = static_cast<int32_t>(std::min(key, first + i - row + 1));
        for (int64_t r = 1; r < p.runs; ++r) span[2 * r] = span[2 * r + 1] = span[1];
      }
    }
  return bounds;
}

inline std::vector<int32_t> spans_of(int64_t slices, const Problem& p) {
  std::vector<int32_t> bounds;
  // Anything, documents, or for each slice a narrow range of its own: parts of the rows then pack few keys.
  const int64_t kind = pick({0, 1, 2});
  if (kind == 2) return spans_of_documents(slices, p);
  const auto width = static_cast<uint64_t>(kind == 1 ? std::min<int64_t>(p.k_len, 40) : p.k_len);
  uint64_t begin = 0;
  for (int64_t row = 0; row < slices * p.q_len; ++row) {
    if (row % p.q_len == 0) begin = random_bits() % (static_cast<uint64_t>(p.k_len) - width + 1);
    std::vector<int32_t> cuts(static_cast<size_t>(2 * p.runs));
    for (auto& cut : cuts) cut = static_cast<int32_t>(begin + random_bits() % (width + 1));
    std::sort(cuts.begin(), cuts.end());
    bounds.insert(bounds.end(), cuts.begin(), cuts.end());
  }
  return bounds;
}

// Options and everything that they point to.
struct RandomOptions {
  std::vector<char> bias;
  std::vector<float> sinks, dbias, dsinks;
  std::vector<int64_t> seeds;
  std::vector<int32_t> q_index, k_index;
  BiasGradient gradient;

  void fill(Problem& p) {
    Options& o = p.options;
    o.softcap = static_cast<float>(pick({0, 0, 1, 50}));
    add_bias(p, static_cast<BiasKind>(random_bits() % 5));
    if (pick({0, 1})) sinks.assign(static_cast<size_t>(p.q_heads), 0.5f), o.sinks = sinks.data();
    dsinks.resize(sinks.size());
    if (pick({0, 1})) {
      const bool per_head = pick({0, 1});
      seeds.assign(static_cast<size_t>(per_head ? p.batch * p.q_heads : 1), 7);
      o.dropout = {1000, seeds.data(), per_head};
    }
    if (pick({0, 1})) o.q_index = indices(q_index, p, p.q_len);
    if (pick({0, 1})) o.k_index = indices(k_index, p, p.k_len);
  }

 private:
  static Indices indices(std::vector<int32_t>& values, const Problem& p, int64_t length) {
    const int64_t rows = pick({1, p.batch});
    values.resize(static_cast<size_t>(rows * length));
    for (auto& x : values) x = static_cast<int32_t>(random_bits() % 3000);
    if (pick({0, 0, 0, 1}) && !values.empty()) values[0] = static_cast<int32_t>(pick({-INT32_MAX, INT32_MAX}));
    return {values.data(), rows == 1 ? 0 : length};
  }

  void add_bias(Problem& p, BiasKind kind) {
    if (kind == BiasKind::none) return;
    Bias b{kind};
    const bool dense = kind == BiasKind::dense, table = kind == BiasKind::distance;
    b.dtype = dense ? static_cast<Dtype>(random_bits() % 3) : Dtype::f32;
    b.batches = table ? 1 : pick({1, p.batch}), b.heads = dense ? pick({1, p.q_heads}) : p.q_heads;
    b.rows = dense ? pick({1, p.q_len}) : 1, b.reach = table ? pick({0, 3, 50, 700}) : 0;
    const int64_t width = dense ? p.k_len : table ? 2 * b.reach + 1 : 1;
    b.row = b.rows == 1 ? 0 : width;
    b.head = b.heads == 1 ? 0 : b.rows * width, b.batch = b.batches == 1 ? 0 : b.heads * b.rows * width;
    const int64_t size = b.batches * b.heads * b.rows * width;
    bias.assign(static_cast<size_t>(size) * element_size(b.dtype), 0x3c);
    magnify(b.dtype, pick({0, 0, 1, 2}), pick({-1, 1}));
    dbias.resize(static_cast<size_t>(size));
    b.data = bias.data();
    p.options.bias = b;
    gradient = {dbias.data(), b.batch, b.head, b.row};
  }

  // Makes none of the biases large, all, or every third one.
  void magnify(Dtype dtype, int64_t which, int64_t sign) {
    const size_t size = element_size(dtype), step = which == 1 ? 1 : 3;
    const auto whole = static_cast<float>(sign) * 1e6f;
    const uint16_t half = sign < 0 ? 0xfb00 : 0x7b00;  // of float16, about 57,000
    const char* from = dtype == Dtype::f16    ? reinterpret_cast<const char*>(&half)
                       : dtype == Dtype::bf16 ? reinterpret_cast<const char*>(&whole) + 2
                                              : reinterpret_cast<const char*>(&whole);
    for (size_t i = 0; which != 0 && i < bias.size() / size; i += step) std::memcpy(&bias[i * size], from, size);
  }
};

// The forward pass over keys on pages, in any order; some numbers in the table are no pages. Legal as the mask is.
class RandomPages {
 public:
  explicit RandomPages(const Problem& p) : p_(p), length_(pick({1, 5, 16, 32, 48})) {
    const int64_t columns = (p.k_len + length_ - 1) / length_, pool = std::max<int64_t>(1, p.batch * columns);
    k_ = Array(p.dtype, pool, p.kv_heads, length_, p.head_dim), v_ = Array(p.dtype, pool, p.kv_heads, length_, p.v_dim);
    table.resize(static_cast<size_t>(p.batch * columns));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    if (pick({0, 1})) std::shuffle(table.begin(), table.end(), random_bits);
    if (pick({0, 1}) && !table.empty()) table[random_bits() % table.size()] = static_cast<int32_t>(pick({-1, pool}));
    p_.k = k_.tensor, p_.v = v_.tensor, p_.k_len = columns * length_;
    p_.pages = {table.data(), length_, columns, pool};
    p_.options.k_index = {};  // of fewer keys
  }
  Status run(const ForwardArgs& plain, Isa level, const Parallel& parallel) const {
    ForwardArgs args = plain;
    static_cast<Problem&>(args) = p_;
    return forward(args, level, parallel).status;
  }

  std::vector<int32_t> table;

 private:
  Problem p_;
  int64_t length_;
  Array k_{Dtype::f32, 0, 0, 0, 0}, v_{Dtype::f32, 0, 0, 0, 0};
};

// A problem of any kind and all that it points to.
class RandomProblem {
 public:
  RandomProblem() : p(random_sizes()), spans(random_spans(p)) {
    if (pick({0, 0, 0, 0, 0, 0, 0, 1})) (pick({0, 1}) ? k_ : v_).spoil(p.dtype);
    p.q = q_.tensor, p.k = k_.tensor, p.v = v_.tensor;
    const auto all_rows = static_cast<size_t>(p.batch * p.q_heads * p.q_len);
    const bool wide = pick({0, 1});
    (wide ? wide_lse_.resize(all_rows) : lse_.resize(all_rows));
    if (pick({0, 1})) options.fill(p);
    if (pick({0, 1})) options.gradient = {};  // not wanted
    f = {p, out.tensor, wide ? nullptr : lse_.data(), nullptr, wide ? wide_lse_.data() : nullptr};
    b = {p,
         out.tensor,
         dout_.tensor,
         dq_.tensor,
         dk_.tensor,
         dv_.tensor,
         f.lse,
         f.lse_low,
         f.wide_lse,
         wide && pick({0, 1}) != 0,
         nullptr,
         options.gradient,
         p.options.sinks == nullptr ? nullptr : options.dsinks.data()};
  }
  RandomProblem(const RandomProblem&) = delete;
  RandomProblem& operator=(const RandomProblem&) = delete;

  bool may_have_pages() const { return !p.options.change_weights() && p.options.sinks == nullptr; }

  Problem p;
  std::vector<int32_t> spans;
  RandomOptions options{};
  ForwardArgs f{};
  BackwardArgs b{};

 private:
  static Problem random_sizes() {
    Problem p{};
    p.dtype = static_cast<Dtype>(random_bits() % 3);
    p.batch = pick({1, 2}), p.kv_heads = pick({1, 2, 3}), p.q_heads = p.kv_heads * pick({1, 2, 4});
    p.q_len = pick({1, 3, 8, 16, 33, 97, 130, 200, 385}), p.k_len = pick({0, 1, 31, 64, 193, 257, 520});
    p.head_dim = pick({1, 7, 16, 40, 64, 80, 128, 256, 576}), p.v_dim = pick({1, 8, 33, 64, 128, 256, 512});
    if (p.q_len <= 16 && pick({0, 1}))  // keys in several parts
      p.batch = p.kv_heads = 1, p.q_heads = pick({1, 2, 4}), p.k_len = pick({2100, 2100, 9000});
    if (small_problems) {
      p.kv_heads = 1, p.q_heads = pick({1, 2}), p.q_len = pick({1, 3, 8, 16, 33, 65}),
      p.k_len = pick({0, 1, 31, 64, 97});
      p.head_dim = pick({1, 7, 16, 40, 64}), p.v_dim = pick({1, 8, 33, 64});
    }
    if (pick({0, 0, 0, 0, 0, 0, 0, 1}))  // a call without rows
      *std::array{&p.batch, &p.q_heads, &p.q_len}[random_bits() % 3] = 0;
    p.runs = pick({1, 1, 2, 4});
    const auto factor = static_cast<float>(pick({-1, 0, 1, 1}) * pick({1, 1, 1000000}));
    p.scale = factor / std::sqrt(static_cast<float>(p.head_dim));
    return p;
  }
  static std::vector<int32_t> random_spans(Problem& p) {
    const int64_t batches = pick({1, p.batch}), heads = pick({1, p.q_heads}), slice = p.q_len * p.runs * 2;
    std::vector<int32_t> spans = spans_of(batches * heads, p);
    p.bounds = {spans.data(), batches == 1 ? 0 : heads * slice, heads == 1 ? 0 : slice, batches, heads};
    return spans;  // whose elements do not move
  }
  Array queries(int64_t dim) const { return {p.dtype, p.batch, p.q_heads, p.q_len, dim}; }
  Array keys(int64_t dim) const { return {p.dtype, p.batch, p.kv_heads, p.k_len, dim}; }

 public:
  Array out = queries(p.v_dim);

 private:
  Array q_ = queries(p.head_dim), k_ = keys(p.head_dim), v_ = keys(p.v_dim), dout_ = queries(p.v_dim);
  Array dq_ = queries(p.head_dim), dk_ = keys(p.head_dim), dv_ = keys(p.v_dim);
  std::vector<float> lse_{};
  std::vector<double> wide_lse_{};
};

}  // namespace attnspan::native
