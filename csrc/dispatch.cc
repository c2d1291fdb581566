// Chooses the instruction-set level, checks and copies the bounds, provides scratch memory.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>

#include "attention.h"
#include "pages.h"
#include "snapshot.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace attnspan {

// forward.cc, backward.cc and peak_loops.cc define these, once per level.
#define ATTNSPAN_DECLARE(level)                  \
  namespace level {                              \
  Kernels::ForwardPair forward_kernels(Dtype);   \
  Kernels::BackwardPair backward_kernels(Dtype); \
  PeakLoops peak_loops();                        \
  }
#define ATTNSPAN_ENTRY(level) {level::forward_kernels, level::backward_kernels, level::peak_loops},
#define ATTNSPAN_TEXT(level) #level,
#if defined(__x86_64__)
#define ATTNSPAN_BUILT(use) ATTNSPAN_LEVELS(use)
#else
#define ATTNSPAN_BUILT(use) use(portable)
#endif
ATTNSPAN_BUILT(ATTNSPAN_DECLARE)

namespace {

const Kernels levels[isa_levels] = {ATTNSPAN_BUILT(ATTNSPAN_ENTRY)};
const char* const names[isa_levels] = {ATTNSPAN_LEVELS(ATTNSPAN_TEXT)};

#if defined(__x86_64__)
#if defined(ATTNSPAN_EMULATED_TILES)
bool amx_usable() { return true; }
bool has_fp16_tiles() { return true; }
#else
// AMX needs the processor's word and the kernel's permission to use the large tile state.
bool amx_usable() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  if ((d & amx_bf16) == 0 || (d & amx_tile) == 0) return false;
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

bool has_fp16_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned amx_fp16 = 1u << 21;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & amx_fp16) != 0;
}
#endif
#endif

bool detect(Isa level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  const bool tiles = level >= Isa::amx && avx512bf16 && amx_usable();
  const bool supported[isa_levels] = {true, avx2, avx512, avx512bf16, tiles, tiles && has_fp16_tiles()};
  return supported[static_cast<int>(level)];
#else
  return level == Isa::portable;
#endif
}

struct Selection {
  bool supported[isa_levels];
  Isa active = Isa::portable;
  const char* error = nullptr;
};

const Selection& selection() {
  static const Selection chosen = [] {
    Selection s;
    for (int i = 0; i < isa_levels; ++i) {
      s.supported[i] = detect(static_cast<Isa>(i));
      if (s.supported[i]) s.active = static_cast<Isa>(i);
    }
    const char* wanted = std::getenv("ATTNSPAN_ISA");
    if (wanted == nullptr || *wanted == '\0') return s;
    for (int i = 0; i < isa_levels; ++i)
      if (std::strcmp(wanted, names[i]) == 0) {
        if (s.supported[i])
          s.active = static_cast<Isa>(i);
        else
          s.error = "this machine cannot run the instruction-set level that ATTNSPAN_ISA names";
        return s;
      }
    s.error = "ATTNSPAN_ISA names no instruction-set level";
    return s;
  }();
  return chosen;
}

// From this size on, faults of pages of 4 KiB cost more than asking for large ones.
constexpr size_t worth_large_pages = size_t{4} << 20;

// Blocks of scratch memory that are kept between calls: fresh pages cost more than small problems take.
class ScratchPool {
 public:
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  class Block {
   public:
    Block(ScratchPool& pool, size_t bytes) : pool_(pool), slot_(pool.acquire(bytes)) {}
    ~Block() { pool_.release(slot_); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    char* data() const { return slot_.data; }

   private:
    friend class ScratchPool;
    struct Slot {
      char* data;
      size_t bytes;
    };
    ScratchPool& pool_;
    Slot slot_;
  };

 private:
  using Slot = Block::Slot;
  static constexpr int kept_most = 8;
  static constexpr size_t kept_bytes = size_t{256} << 20;

  Slot acquire(size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      int best = -1;
      for (int i = 0; i < count_; ++i)
        if (kept_[i].bytes >= bytes && (best < 0 || kept_[i].bytes < kept_[best].bytes)) best = i;
      if (best >= 0) {
        const Slot slot = kept_[best];
        kept_[best] = kept_[--count_];
        total_ -= slot.bytes;
        return slot;
      }
    }
    const size_t page = bytes < worth_large_pages ? 4096 : large_page,
                 rounded = (bytes + (bytes >> 3) + page - 1) & ~(page - 1);
    auto* const data = static_cast<char*>(std::aligned_alloc(page, rounded));
    if (page == large_page && data != nullptr) use_large_pages(data, rounded);
    return {data, rounded};
  }

  void release(Slot slot) {
    if (slot.data == nullptr) return;
    {
      const std::lock_guard lock(mutex_);
      if (count_ < kept_most && total_ + slot.bytes <= kept_bytes) {
        kept_[count_++] = slot;
        total_ += slot.bytes;
        return;
      }
    }
    std::free(slot.data);
  }

  std::mutex mutex_;
  Slot kept_[kept_most]{};
  int count_ = 0;
  size_t total_ = 0;
};

ScratchPool& pool() {
  static auto* const instance = new ScratchPool;  // never destroyed: calls may outlive static destructors
  return *instance;
}

// A forked child finds the mutex free, and everything made that is made once, whatever other threads did meanwhile.
[[maybe_unused]] const int fork_handlers = pthread_atfork([] { static_cast<void>(selection()), pool().lock(); },
                                                          [] { pool().unlock(); }, [] { pool().unlock(); });

bool within(int64_t size, BlockRange range) {
  return size == 0 || (size > 0 && size % range.step == 0 && size <= range.most);
}

bool legal(const Config& c, const Blocks& blocks) {
  return within(c.block_q, blocks.q) && within(c.block_k, blocks.k) && c.threads >= 0 &&
         (!blocks.square || c.block_q == c.block_k);
}

class Counter {
 public:
  void add(std::chrono::steady_clock::duration spent, double flops, int threads) {
    calls_.fetch_add(1, std::memory_order_relaxed);
    threads_.fetch_add(threads, std::memory_order_relaxed);
    ticks_.fetch_add(spent.count(), std::memory_order_relaxed);
    flops_.fetch_add(flops, std::memory_order_relaxed);
  }
  Totals totals() const {
    return {calls_.load(std::memory_order_relaxed), threads_.load(std::memory_order_relaxed),
            std::chrono::duration<double>(std::chrono::steady_clock::duration(ticks_.load(std::memory_order_relaxed)))
                .count(),
            flops_.load(std::memory_order_relaxed)};
  }

 private:
  std::atomic<int64_t> calls_{0}, threads_{0}, ticks_{0};
  std::atomic<double> flops_{0.0};
};
Counter counters[2];

double flops_of(const Problem& p, int64_t pairs, Direction direction) {
  const double forward = 2.0 * static_cast<double>(pairs) * static_cast<double>(p.head_dim + p.v_dim);
  return direction == Direction::forward ? forward : 2.5 * forward;
}

// The highest level up to `level` that has a kernel of its own for this dtype.
template <class Pair>
Pair best(Isa level, Dtype dtype, Pair (*Kernels::*member)(Dtype)) {
  for (int i = static_cast<int>(level); i > 0; --i)
    if (levels[i].*member != nullptr)
      if (const Pair pair = (levels[i].*member)(dtype); pair.run != nullptr) return pair;
  return (levels[0].*member)(dtype);
}

template <class Args, class Pair>
Result run(const Args& args, const Pair& pair, const Parallel& parallel) {
  const Scratch need = pair.scratch(args, parallel.threads);
  const size_t shared = (need.shared_bytes + 4095) & ~size_t{4095}, own = (need.thread_bytes + 4095) & ~size_t{4095};
  const ScratchPool::Block block(pool(), shared + own * static_cast<size_t>(parallel.threads) + 4096);
  if (block.data() == nullptr) return {Status::out_of_memory};
  pair.run(args, parallel, block.data(), block.data() + shared, own);
  return {};
}

// Long results are often fresh memory: common allocators return freed arrays of more than 32 MiB to the system at once.
void expect_fresh(const Tensor& x, const Problem& p, int64_t heads, int64_t rows, int64_t dim) {
  if (x.data == nullptr || std::min({x.batch, x.head, x.row}) < 0) return;
  const int64_t numbers = (p.batch - 1) * x.batch + (heads - 1) * x.head + (rows - 1) * x.row + dim;
  const int64_t bytes = numbers * (p.dtype == Dtype::f32 || x.wide ? 4 : 2);
  if (bytes >= static_cast<int64_t>(worth_large_pages)) use_large_pages(x.data, static_cast<size_t>(bytes));
}
void expect_fresh_results(const ForwardArgs& a) { expect_fresh(a.out, a, a.q_heads, a.q_len, a.v_dim); }
void expect_fresh_results(const BackwardArgs& a) {
  expect_fresh(a.dq, a, a.q_heads, a.q_len, a.head_dim);
  expect_fresh(a.dk, a, a.kv_heads, a.k_len, a.head_dim);
  expect_fresh(a.dv, a, a.kv_heads, a.k_len, a.v_dim);
}

// Rows that see a key on a page that there is not have no result.
void spoil(const BackwardArgs&) {}
void spoil(const ForwardArgs& a) {
  if (a.pages.table == nullptr) return;
  const bool wide = a.out.wide || a.dtype == Dtype::f32;
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t i = 0; i < a.q_len; ++i)
      for (int64_t h = 0; h < a.q_heads; ++h) {
        const int32_t* const spans = a.bounds.slice(b, h) + i * a.runs * 2;
        bool lost = false;
        for (int64_t r = 0; r < a.runs; ++r) lost = lost || a.pages.misses(b, spans[2 * r], spans[2 * r + 1]);
        if (!lost && a.bounds.heads == 1) break;
        if (!lost) continue;
        const int64_t at = b * a.out.batch + h * a.out.head + i * a.out.row, row = (b * a.q_heads + h) * a.q_len + i;
        if (wide)
          std::fill_n(static_cast<float*>(a.out.data) + at, a.v_dim, NAN);
        else  // of either kind
          std::fill_n(static_cast<uint16_t*>(a.out.data) + at, a.v_dim, uint16_t{0x7fff});
        for (float* lse : {a.lse, a.lse_low})
          if (lse != nullptr) lse[row] = NAN;
        if (a.wide_lse != nullptr) a.wide_lse[row] = static_cast<double>(NAN);
      }
}

// Memory for a snapshot: few bytes, those of most small calls, are on the stack.
class SnapshotMemory {
 public:
  explicit SnapshotMemory(size_t bytes) {
    if (bytes > sizeof near_) far_.emplace(pool(), bytes);
  }
  char* data() { return far_ ? far_->data() : near_; }

 private:
  alignas(64) char near_[2048];
  std::optional<ScratchPool::Block> far_;
};

// Does a call end before other threads have woken up? Decoding over few keys does (AVX-512, 8 heads over 64 keys of
// float32: 13 us on one thread, 16 on two; over 256: 22 and 19); all else gains from 10 us on. Measured with two
// threads.
bool is_brief(const BackwardArgs&, int64_t) { return false; }
bool is_brief(const ForwardArgs& a, int64_t pairs) {
  constexpr int64_t bytes_of_a_row = 3072, most_bytes = int64_t{1} << 19, most_products = int64_t{1} << 17;
  if (a.q_len > 16 || a.options.change_weights()) return false;
  const int64_t size = a.dtype == Dtype::f32 ? 4 : 2, rows = a.batch * a.q_heads * a.q_len,
                together = std::min<int64_t>(4, a.q_heads / a.kv_heads * a.q_len),
                products = pairs * (a.head_dim + a.v_dim);
  return products < most_products && products * size / together + rows * bytes_of_a_row < most_bytes;
}

template <class Args, class Pair>
Result launch(Args args, Direction direction, const Pair& pair, Parallel parallel) {
  const auto start = std::chrono::steady_clock::now();
  Result result;
  const Snapshot snapshot(args);
  SnapshotMemory memory(snapshot.bytes());
  if (memory.data() == nullptr) return {Status::out_of_memory};
  const int64_t pairs = snapshot.take(args, memory.data(), &result.bad);
  if (pairs < 0) {
    result.status = Status::bad_bounds;
    return result;
  }
  if (!legal(args.config, pair.blocks)) return {Status::bad_config};
  if (args.config.threads != 0 && args.config.threads < parallel.threads)
    parallel.threads = static_cast<int>(args.config.threads);
  if (is_brief(args, pairs)) parallel.threads = 1;
  expect_fresh_results(args);
  result = run(args, pair, parallel);
  if (result.status == Status::ok) spoil(args);
  counters[static_cast<int>(direction)].add(std::chrono::steady_clock::now() - start, flops_of(args, pairs, direction),
                                            parallel.threads);
  return result;
}

// A call without rows has nothing to compute, and extents that cannot divide.
bool without_rows(const Problem& p) { return p.batch == 0 || p.q_heads == 0 || p.q_len == 0; }

void clear(const Tensor& x, const Problem& p, int64_t dim) {
  const size_t size = p.dtype == Dtype::f32 || x.wide ? 4 : 2;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.kv_heads; ++h)
      for (int64_t i = 0; i < p.k_len; ++i)
        std::memset(static_cast<char*>(x.data) + static_cast<size_t>(b * x.batch + h * x.head + i * x.row) * size, 0,
                    static_cast<size_t>(dim) * size);
}

// What the gradients of a call without rows are.
void clear_gradients(const BackwardArgs& a) {
  clear(a.dk, a, a.head_dim);
  clear(a.dv, a, a.v_dim);
  const Bias& bias = a.options.bias;
  const int64_t width = bias.kind == BiasKind::dense      ? bias.rows * a.k_len
                        : bias.kind == BiasKind::distance ? 2 * bias.reach + 1
                                                          : 1;
  if (a.dbias.data != nullptr) std::fill_n(a.dbias.data, bias.batches * bias.heads * width, 0.0f);
  if (a.dsinks != nullptr) std::fill_n(a.dsinks, a.q_heads, 0.0f);
}

}  // namespace

const Kernels& kernels_of(Isa level) { return levels[static_cast<int>(level)]; }
const char* isa_name(Isa level) { return names[static_cast<int>(level)]; }
bool isa_supported(Isa level) { return selection().supported[static_cast<int>(level)]; }
Isa isa_active() { return selection().active; }
const char* isa_request_error() { return selection().error; }

Result forward(const ForwardArgs& args, Isa level, const Parallel& parallel) try {
  if (without_rows(args)) return {};
  return launch(args, Direction::forward, best(level, args.dtype, &Kernels::forward), parallel);
} catch (const std::bad_alloc&) {
  return {Status::out_of_memory};
}

Result backward(const BackwardArgs& args, Isa level, const Parallel& parallel) try {
  if (without_rows(args)) return clear_gradients(args), Result{};
  return launch(args, Direction::backward, best(level, args.dtype, &Kernels::backward), parallel);
} catch (const std::bad_alloc&) {
  return {Status::out_of_memory};
}

Totals totals(Direction direction) { return counters[static_cast<int>(direction)].totals(); }

Blocks blocks_of(Direction direction, Dtype dtype, Isa level) {
  return direction == Direction::forward ? best(level, dtype, &Kernels::forward).blocks
                                         : best(level, dtype, &Kernels::backward).blocks;
}

}  // namespace attnspan
