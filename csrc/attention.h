// The CPU kernel's interface: plain structs, raw pointers, strides in elements. No framework header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnspan {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

inline constexpr int64_t max_dim = 576;  // of a head: keys of latent attention that is not expanded

// A (batch, heads, length, dim) array whose last axis has unit stride.
struct Tensor {
  void* data;
  int64_t batch, head, row;  // strides in elements
  bool wide = false;         // a result in float, whatever the dtype of the problem: for sums over several calls
};

// What a query may see: int32 (B|1, H|1, q_len, runs, 2), each slice contiguous.
struct Bounds {
  const int32_t* data;
  int64_t batch, head;     // strides in elements, 0 where broadcast
  int64_t batches, heads;  // extents of the distinct slices
  const int32_t* slice(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

enum class BiasKind : int { none = 0, alibi = 1, signed_alibi = 2, distance = 3, dense = 4 };

// What is added to the scores of query index i and key index j: -slope * |j - i|, slope * (j - i), an entry of a table
// of 2 * reach + 1 by j - i (those at its ends serve beyond), or an entry of a (batch, heads, q_len, k_len) array.
struct Bias {
  BiasKind kind = BiasKind::none;
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;                  // of a dense one; the others are float
  int64_t batch = 0, head = 0, row = 0;      // strides in elements, 0 where shared
  int64_t batches = 0, heads = 0, rows = 0;  // extents
  int64_t reach = 0;
  const float* floats(int64_t b, int64_t h) const { return static_cast<const float*>(data) + b * batch + h * head; }
};

// Which weights are dropped is a function of the seed and of the indices of batch row, head, query and key alone.
struct Dropout {
  uint32_t threshold = 0;          // of 2^16; 0 drops nothing
  const int64_t* seeds = nullptr;  // one, or one for each batch row and query head
  bool per_head = false;
  bool on() const { return threshold != 0; }
  float kept_weight() const { return 65536.0f / static_cast<float>(65536 - threshold); }
};

// Global indices, shared by the batch if `batch` is 0; null: keys count from 0, and queries are the last of them.
struct Indices {
  const int32_t* data = nullptr;
  int64_t batch = 0;
  const int32_t* of(int64_t b) const { return data == nullptr ? nullptr : data + b * batch; }
};

// What a plain call has nothing of.
struct Options {
  float softcap = 0.0f;  // 0: none
  Bias bias = {};
  const float* sinks = nullptr;  // (q_heads)
  Dropout dropout = {};
  Indices q_index = {}, k_index = {};
  bool change_scores() const { return softcap > 0.0f || bias.kind != BiasKind::none; }
  bool change_weights() const { return change_scores() || dropout.on(); }
};

// Where keys lie that are not in one piece: key j of a batch row is on page j / length of the row's table, which names
// pages of a pool. The `batch` stride of k and v then leads from one page of the pool to the next.
struct Pages {
  const int32_t* table = nullptr;             // (batch, columns), contiguous; null: no pages
  int64_t length = 0, columns = 0, pool = 0;  // keys of a page, pages of a batch row, and of the pool
  const int32_t* missing = nullptr;           // (batch, columns + 1): see `Snapshot`
  const int32_t* row(int64_t b) const { return table + b * columns; }
  bool misses(int64_t b, int64_t lo, int64_t hi) const {  // a page with a key of [lo, hi)
    const int32_t* const before = missing + b * (columns + 1);
    return lo < hi && before[lo / length] != before[(hi - 1) / length + 1];
  }
};

// How a kernel cuts a problem up. 0 leaves a choice to the kernel. The meaning of a result does not depend on it.
struct Config {
  int64_t block_q = 0, block_k = 0;  // rows and keys of a block
  int64_t threads = 0;               // use at most so many
};

struct Problem {
  Dtype dtype;
  int64_t batch, q_heads, kv_heads, q_len, k_len, head_dim, v_dim, runs;
  float scale;
  Bounds bounds;
  Tensor q, k, v;
  Pages pages = {};  // of the forward pass
  Config config = {};
  Options options = {};
  int64_t group() const { return q_heads / kv_heads; }
};

struct ForwardArgs : Problem {
  Tensor out;
  float* lse;                  // (batch, q_heads, q_len), contiguous; may be null
  float* lse_low = nullptr;    // what a float of it has lost; may be null
  double* wide_lse = nullptr;  // or in double
};

// Gradient of a bias, contiguous in its shape; strides are 0 where shared.
struct BiasGradient {
  float* data = nullptr;  // null: not wanted
  int64_t batch = 0, head = 0, row = 0;
};

struct BackwardArgs : Problem {
  Tensor out, dout, dq, dk, dv;
  const float* lse;                  // alone, it loses |lse| * 2^-24 of the weights
  const float* lse_low = nullptr;    // may be null
  const double* wide_lse = nullptr;  // instead
  bool part = false;                 // lse is of a whole of which these keys are a part
  const float* dlse;                 // may be null
  BiasGradient dbias = {};
  float* dsinks = nullptr;  // (q_heads); null without sinks
  int64_t lse_head = 0;     // elements between heads of lse and dlse; 0: q_len
  int64_t lse_row(int64_t b, int64_t h) const { return (b * q_heads + h) * (lse_head == 0 ? q_len : lse_head); }
};

// How the caller runs a loop in parallel. `body(context, item, thread)` is called once for each item,
// with 0 <= thread < threads; items are handed out in order, so costly ones should come first.
struct Parallel {
  int threads;
  void* pool;
  void (*run)(void* pool, int threads, int64_t items, void (*body)(void*, int64_t, int), void* context);

  template <class Body>
  void operator()(int64_t items, Body&& body) const {
    run(
        pool, threads, items,
        [](void* context, int64_t item, int thread) { (*static_cast<Body*>(context))(item, thread); }, &body);
  }
};

// The first row whose spans are unsorted, overlapping or out of range.
struct BadRow {
  int64_t batch, head, row;
};

enum class Status { ok, bad_bounds, bad_config, out_of_memory };

struct Result {
  Status status = Status::ok;
  BadRow bad{};
};

enum class Direction : int { forward = 0, backward = 1 };
inline constexpr const char* direction_names[] = {"forward", "backward"};
inline constexpr const char* dtype_names[] = {"float32", "bfloat16", "float16", "int32", "int64", "float64"};

// Instruction-set levels, from the lowest on. CMakeLists.txt has the compiler's options of each.
#define ATTNSPAN_LEVELS(level) level(portable) level(avx2) level(avx512) level(avx512bf16) level(amx) level(amxfp16)
#define ATTNSPAN_NAME(level) level,
enum class Isa : int { ATTNSPAN_LEVELS(ATTNSPAN_NAME) };
#undef ATTNSPAN_NAME
inline constexpr int isa_levels = static_cast<int>(Isa::amxfp16) + 1;

const char* isa_name(Isa level);
bool isa_supported(Isa level);    // does this build have it and this machine run it?
Isa isa_active();                 // the best supported level, or the one that ATTNSPAN_ISA names
const char* isa_request_error();  // why ATTNSPAN_ISA cannot be honoured, or null

Result forward(const ForwardArgs& args, Isa level, const Parallel& parallel);
Result backward(const BackwardArgs& args, Isa level, const Parallel& parallel);

// Totals over all calls of the process so far; `flops` counts visible pairs only, `threads` those that each call might
// use.
struct Totals {
  int64_t calls, threads;
  double seconds, flops;
};
Totals totals(Direction direction);

// Legal blocks: multiples of `step` up to `most`. Where `square`, both blocks are of one size.
struct BlockRange {
  int64_t step, most;
};
struct Blocks {
  BlockRange q, k;
  bool square;
};
Blocks blocks_of(Direction direction, Dtype dtype, Isa level);

// What one instruction-set level provides. Scratch comes from the caller: `shared_bytes` once and
// `thread_bytes` for each thread, both 64-byte aligned.
struct Scratch {
  size_t shared_bytes, thread_bytes;
};

// Loops for peak.cc: FLOPs done by so many rounds of each kind (null where a level lacks it), and a read of memory.
struct PeakLoops {
  double (*compute[5])(int64_t rounds);
  void (*read)(const char* data, int64_t bytes);
};

struct Kernels {
  struct ForwardPair {
    Blocks blocks = {};
    Scratch (*scratch)(const ForwardArgs&, int threads) = nullptr;
    void (*run)(const ForwardArgs&, const Parallel&, char* shared, char* per_thread, size_t thread_bytes) = nullptr;
  };
  struct BackwardPair {
    Blocks blocks = {};
    Scratch (*scratch)(const BackwardArgs&, int threads) = nullptr;
    void (*run)(const BackwardArgs&, const Parallel&, char* shared, char* per_thread, size_t thread_bytes) = nullptr;
  };
  // Pairs of null pointers where a level has nothing better than the one below it.
  ForwardPair (*forward)(Dtype);
  BackwardPair (*backward)(Dtype);
  PeakLoops (*peak_loops)();
};
const Kernels& kernels_of(Isa level);

}  // namespace attnspan
