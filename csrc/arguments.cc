#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include "snapshot.h"

namespace attnspan {
namespace {

void fill_bounds(Problem& p, const Array& a) {
  if (a.dtype != code_i32 || a.ndim != 5 || (a.shape[0] != 1 && a.shape[0] != p.batch) ||
      (a.shape[1] != 1 && a.shape[1] != p.q_heads) || a.shape[2] != p.q_len || a.shape[3] < 1 || a.shape[4] != 2)
    fail("bounds: expected int32 (batch or 1, heads or 1, q_len, runs, 2), got " + a.shape_text());
  check_packed("bounds", a);
  p.runs = a.shape[3];
  const int64_t slice = p.q_len * p.runs * 2;
  p.bounds = {static_cast<const int32_t*>(a.data), a.shape[0] == 1 ? 0 : a.shape[1] * slice,
              a.shape[1] == 1 ? 0 : slice, a.shape[0], a.shape[1]};
}

// Extent `i` of an array with a first or other axis that may be shared: 1, or `full`.
int64_t own_or_shared(const char* name, const Array& a, int i, int64_t full) {
  const int64_t size = i < a.ndim ? a.shape[static_cast<size_t>(i)] : 0;
  if (size != 1 && size != full)
    fail(std::string(name) + ": expected 1 or " + std::to_string(full) + " along axis " + std::to_string(i) +
         ", got shape " + a.shape_text());
  return size;
}

Indices indices_of(const char* name, const std::optional<Array>& x, const Problem& p, int64_t length) {
  if (!x) return {};
  const int64_t rows = own_or_shared(name, *x, 0, p.batch);
  return {static_cast<const int32_t*>(packed(name, *x, code_i32, {rows, length}).data), rows == 1 ? 0 : length};
}

Bias dense_bias_of(const Array& a, const Problem& p) {
  Bias bias{BiasKind::dense, a.data, static_cast<Dtype>(a.dtype)};
  if (a.dtype < 0 || a.dtype > 2) fail("bias: expected float32, bfloat16 or float16");
  bias.batches = own_or_shared("bias", a, 0, p.batch), bias.heads = own_or_shared("bias", a, 1, p.q_heads);
  bias.rows = own_or_shared("bias", a, 2, p.q_len);
  const Tensor t = tensor_of("bias", a, a.dtype, {bias.batches, bias.heads, bias.rows, p.k_len});
  bias.batch = bias.batches == 1 ? 0 : t.batch, bias.head = bias.heads == 1 ? 0 : t.head;
  bias.row = bias.rows == 1 ? 0 : t.row;
  return bias;
}

Bias bias_of(const std::optional<Array>& x, BiasKind kind, const Problem& p) {
  if (kind == BiasKind::none) return {};
  if (!x) fail("bias: expected an array for a bias_kind, got none");
  if (kind == BiasKind::dense) return dense_bias_of(*x, p);
  Bias bias{kind};
  bias.heads = p.q_heads, bias.rows = 1;
  if (kind == BiasKind::distance) {
    const int64_t size = x->ndim == 2 ? x->shape[1] : 0;
    if (size % 2 == 0) fail("bias: expected a table of (heads, 2 * reach + 1), got " + x->shape_text());
    bias.data = packed("bias", *x, code_f32, {p.q_heads, size}).data;
    bias.batches = 1, bias.head = size, bias.reach = size / 2;
  } else {
    bias.batches = own_or_shared("bias", *x, 0, p.batch);
    bias.data = packed("bias", *x, code_f32, {bias.batches, p.q_heads}).data;
    bias.batch = bias.batches == 1 ? 0 : p.q_heads, bias.head = 1;
  }
  return bias;
}

Dropout dropout_of(const OptionArrays& given, const Problem& p) {
  const int64_t threshold = given.dropout_threshold;
  if (threshold < 0 || threshold > 65535) fail("dropout: expected a threshold of 0 to 65535");
  if (threshold == 0) return {};
  if (!given.dropout_seed) fail("dropout_seed: expected one beside dropout, got none");
  const bool one = given.dropout_seed->ndim == 0;
  const Array seeds = one ? packed("dropout_seed", *given.dropout_seed, code_i64, {})
                          : packed("dropout_seed", *given.dropout_seed, code_i64, {p.batch, p.q_heads});
  return {static_cast<uint32_t>(threshold), static_cast<const int64_t*>(seeds.data), !one};
}

// The gradient of a bias, contiguous in its shape.
BiasGradient bias_gradient_of(const std::optional<Array>& x, const Problem& p) {
  const Bias& bias = p.options.bias;
  if (!x || bias.kind == BiasKind::none) return {};
  if (bias.kind == BiasKind::dense) {
    const Array a = packed("dbias", *x, code_f32, {bias.batches, bias.heads, bias.rows, p.k_len});
    const int64_t head = bias.rows * p.k_len;
    return {static_cast<float*>(a.data), bias.batches == 1 ? 0 : bias.heads * head, bias.heads == 1 ? 0 : head,
            bias.rows == 1 ? 0 : p.k_len};
  }
  const bool table = bias.kind == BiasKind::distance;
  const Array a =
      packed("dbias", *x, code_f32, {table ? p.q_heads : bias.batches, table ? 2 * bias.reach + 1 : p.q_heads});
  return {static_cast<float*>(a.data), bias.batch, bias.head, 0};
}

Pages pages_of(const Array& table, const Problem& p, int64_t pool, int64_t length) {
  if (table.dtype != code_i32 || table.ndim != 2 || table.shape[0] != p.batch)
    fail("table: expected int32 (batch, pages of a row) with batch " + std::to_string(p.batch) + ", got " +
         table.shape_text());
  check_packed("table", table);
  if (pool < 1 || length < 1) fail("k: expected a pool of at least one page of at least one key");
  return {static_cast<const int32_t*>(table.data), length, table.shape[1], pool};
}

std::string text_of(const BlockRange& range) {
  return "multiples of " + std::to_string(range.step) + " up to " + std::to_string(range.most);
}

}  // namespace

Problem problem_of(const Array& q, const Array& k, const Array& v, const Array& bounds, float scale,
                   const std::optional<Array>& table) {
  Problem p{};
  if (q.ndim != 4 || k.ndim != 4 || v.ndim != 4) fail("q, k, v: expected 4 axes (batch, heads, length, dim)");
  if (q.dtype < 0 || q.dtype > 2) fail("q: expected float32, bfloat16 or float16");
  p.dtype = static_cast<Dtype>(q.dtype);
  p.batch = q.shape[0], p.q_heads = q.shape[1], p.q_len = q.shape[2], p.head_dim = q.shape[3];
  p.kv_heads = k.shape[1], p.k_len = k.shape[2], p.v_dim = v.shape[3];
  if (p.kv_heads < 1 || p.q_heads % p.kv_heads != 0)
    fail("q heads: expected a multiple of the " + std::to_string(p.kv_heads) + " kv heads, got " +
         std::to_string(p.q_heads));
  if (p.head_dim < 1 || p.head_dim > max_dim || p.v_dim < 1 || p.v_dim > max_dim)
    fail("head_dim: expected 1 to " + std::to_string(max_dim) + ", got " + std::to_string(p.head_dim) + " and " +
         std::to_string(p.v_dim));
  const int64_t planes = table ? k.shape[0] : p.batch, length = p.k_len;
  if (table) p.pages = pages_of(*table, p, planes, length), p.k_len = p.pages.columns * length;
  if (p.k_len > INT32_MAX - 64 || p.q_len > INT32_MAX - 64) fail("lengths: expected at most 2**31 - 65");
  p.q = tensor_of("q", q, q.dtype, {p.batch, p.q_heads, p.q_len, p.head_dim});
  p.k = tensor_of("k", k, q.dtype, {planes, p.kv_heads, length, p.head_dim});
  p.v = tensor_of("v", v, q.dtype, {planes, p.kv_heads, length, p.v_dim});
  fill_bounds(p, bounds);
  p.scale = scale;
  return p;
}

// The ends of the global indices of `length` rows or keys, which are [from, from + length) where none are given.
static std::pair<int64_t, int64_t> ends_of(const Indices& given, int64_t batch, int64_t from, int64_t length) {
  if (given.data == nullptr) return {from, from + length - 1};
  int64_t low = INT64_MAX, high = INT64_MIN;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < length; ++i) {
      const int64_t index = given.of(b)[i];
      low = std::min(low, index), high = std::max(high, index);
    }
  return {low, high};
}

// The largest distance between a query and a key that it sees.
static int64_t farthest_visible(const Options& o, const Problem& p) {
  const int64_t planes = o.q_index.batch == 0 && o.k_index.batch == 0 && p.bounds.batch == 0 ? 1 : p.batch;
  int64_t farthest = 0;
  for (int64_t b = 0; b < planes; ++b)
    for (int64_t h = 0; h < p.bounds.heads; ++h)
      for (int64_t i = 0; i < p.q_len * p.runs; ++i) {
        const int32_t* const span = p.bounds.slice(p.bounds.batch == 0 ? 0 : b, h) + 2 * i;
        const int64_t row = i / p.runs;
        const int64_t q = o.q_index.data == nullptr ? p.k_len - p.q_len + row : o.q_index.of(b)[row];
        // Illegal spans are refused later, and other threads may write into these.
        const int64_t lo = std::max<int64_t>(read_once(span[0]), 0);
        const int64_t hi = std::min<int64_t>(read_once(span[1]), p.k_len);
        // Given indices may have any order. Others ascend, so that the ends tell.
        const int64_t step = o.k_index.data == nullptr ? std::max<int64_t>(hi - lo - 1, 1) : 1;
        for (int64_t j = lo; j < hi; j += step)
          farthest = std::max(farthest, std::abs((o.k_index.data == nullptr ? j : o.k_index.of(b)[j]) - q));
      }
  return farthest;
}

// A bias is a slope times a distance. Floats hold distances of up to 2^24, and products of all pairs with a slope: a
// hidden pair of a tile has one too.
static void check_slopes(const Options& o, const Problem& p) {
  constexpr int64_t most = int64_t{1} << 24;
  if (p.batch * p.q_len * p.k_len == 0) return;
  const auto [first_q, last_q] = ends_of(o.q_index, p.batch, p.k_len - p.q_len, p.q_len);
  const auto [first_k, last_k] = ends_of(o.k_index, p.batch, 0, p.k_len);
  const int64_t of_all = std::max(last_q - first_k, last_k - first_q);
  if (const int64_t distance = of_all > most ? farthest_visible(o, p) : of_all; distance > most)
    fail("bias: expected distances between queries and keys of at most 2^24 with slopes, got " +
         std::to_string(distance) + ". Take the same number from q_index and k_index, or use a table by distance");
  const float steepest = of_all > most ? 1e27f : 1e30f;
  for (int64_t h = 0; h < p.q_heads; ++h)
    if (const float slope = *o.bias.floats(0, h); !(std::fabs(slope) <= steepest) && !std::isnan(slope))
      fail("bias: expected slopes of at most " + std::string(of_all > most ? "1e27" : "1e30") + ", got " +
           std::to_string(slope) + ". Scale them down");
}

Options options_of(const OptionArrays& given, const Problem& p) {
  Options o;
  // Far above all scores a cap changes none of them; far below, floats cannot hold its slopes.
  const double softcap = given.softcap;
  if (softcap != 0.0 && !(softcap >= 1e-30 && std::isfinite(softcap)))
    fail("softcap: expected 0 or a number of at least 1e-30, got " + std::to_string(softcap));
  o.softcap = softcap > 0x1p60 ? 0.0f : static_cast<float>(softcap);
  const int kind = given.bias_kind;
  if (kind < 0 || kind > 4) fail("bias_kind: expected 0 to 4, got " + std::to_string(kind));
  o.bias = bias_of(given.bias, static_cast<BiasKind>(kind), p);
  if (given.sinks) o.sinks = static_cast<const float*>(packed("sinks", *given.sinks, code_f32, {p.q_heads}).data);
  o.dropout = dropout_of(given, p);
  o.q_index = indices_of("q_index", given.q_index, p, p.q_len);
  o.k_index = indices_of("k_index", given.k_index, p, p.k_len);
  if (o.bias.kind == BiasKind::alibi || o.bias.kind == BiasKind::signed_alibi) check_slopes(o, p);
  return o;
}

float* rows_of(const char* name, const Array& a, const Problem& p) {
  return static_cast<float*>(packed(name, a, code_f32, {p.batch, p.q_heads, p.q_len}).data);
}

static double* wide_rows_of(const char* name, const Array& a, const Problem& p) {
  return static_cast<double*>(packed(name, a, code_f64, {p.batch, p.q_heads, p.q_len}).data);
}

template <class Args>
static void set_lse(Args& args, const Array& lse, const std::optional<Array>& low) {
  if (lse.dtype == code_f64)
    args.wide_lse = wide_rows_of("lse", lse, args);
  else
    args.lse = rows_of("lse", lse, args);
  if (low) args.lse_low = rows_of("lse_low", *low, args);
}

void fill(ForwardArgs& args, const Array& out, const std::optional<Array>& lse, const std::optional<Array>& low) {
  const int dtype = static_cast<int>(args.dtype);
  args.out = result_of("out", out, dtype, {args.batch, args.q_heads, args.q_len, args.v_dim});
  if (lse) set_lse(args, *lse, low);
}

void fill_lse(BackwardArgs& args, const Array& lse, const std::optional<Array>& low) { set_lse(args, lse, low); }

void fill_option_gradients(BackwardArgs& args, const std::optional<Array>& dbias, const std::optional<Array>& dsinks) {
  args.dbias = bias_gradient_of(dbias, args);
  if (args.options.sinks != nullptr && dsinks)
    args.dsinks = static_cast<float*>(packed("dsinks", *dsinks, code_f32, {args.q_heads}).data);
}

void fill(BackwardArgs& args, const GradientArrays& given) {
  fill_option_gradients(args, given.dbias, given.dsinks);
  const int dtype = static_cast<int>(args.dtype);
  args.dout = tensor_of("dout", given.dout, dtype, {args.batch, args.q_heads, args.q_len, args.v_dim});
  args.out = tensor_of("out", given.out, dtype, {args.batch, args.q_heads, args.q_len, args.v_dim});
  args.dq = result_of("dq", given.dq, dtype, {args.batch, args.q_heads, args.q_len, args.head_dim});
  args.dk = result_of("dk", given.dk, dtype, {args.batch, args.kv_heads, args.k_len, args.head_dim});
  args.dv = result_of("dv", given.dv, dtype, {args.batch, args.kv_heads, args.k_len, args.v_dim});
  fill_lse(args, given.lse, given.lse_low);
  args.part = given.part;
  args.dlse = given.dlse ? rows_of("dlse", *given.dlse, args) : nullptr;
}

Isa level() {
  if (const char* error = isa_request_error())
    fail(std::string("ATTNSPAN_ISA: expected one of the levels in attnspan._core.isa_levels(); ") + error);
  return isa_active();
}

void raise_unless_ok(const Result& result, const Problem& p, Direction direction, Isa isa) {
  if (result.status == Status::out_of_memory) throw std::bad_alloc();
  if (result.status == Status::bad_bounds)
    fail("mask bounds: expected spans that are sorted, disjoint and within 0 <= lo <= hi <= k_len = " +
         std::to_string(p.k_len) + "; query " + std::to_string(result.bad.row) + " (batch " +
         std::to_string(result.bad.batch) + ", head " + std::to_string(result.bad.head) +
         ") breaks this. If the mask has segment ids, an id may stand in more than max_runs "
         "separate places: pass the ids in the order of the tokens, give each document an id of its own, or raise "
         "max_runs. If it has booleans, a query may have "
         "more than max_runs runs of visible keys: pass max_runs to what made it, such as from_dense. If it has "
         "lengths (cache, "
         "key_padding), one may be beyond the keys: pass as many keys as it counts. mask.prepare() says which");
  if (result.status == Status::ok) return;
  const Blocks blocks = blocks_of(direction, p.dtype, isa);
  fail("config: expected block_q of 0 or " + text_of(blocks.q) + " and block_k of 0 or " + text_of(blocks.k) +
       (blocks.square ? ", both the same" : "") + ", got " + std::to_string(p.config.block_q) + " and " +
       std::to_string(p.config.block_k) + " with " + std::to_string(p.config.threads) + " threads");
}

}  // namespace attnspan
