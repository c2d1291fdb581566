// Chooses the instruction-set level, checks the bounds, provides scratch memory.
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "attention.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace attnspan {

#define ATTNSPAN_LEVEL(name)                     \
  namespace name {                               \
  Kernels::ForwardPair forward_kernels(Dtype);   \
  Kernels::BackwardPair backward_kernels(Dtype); \
  }
ATTNSPAN_LEVEL(portable)
#if defined(__x86_64__)
ATTNSPAN_LEVEL(avx2)
ATTNSPAN_LEVEL(avx512)
ATTNSPAN_LEVEL(avx512bf16)
ATTNSPAN_LEVEL(amx)
#endif
#undef ATTNSPAN_LEVEL

namespace {

const Kernels levels[isa_levels] = {
    {portable::forward_kernels, portable::backward_kernels},
#if defined(__x86_64__)
    {avx2::forward_kernels, avx2::backward_kernels},
    {avx512::forward_kernels, avx512::backward_kernels},
    {avx512bf16::forward_kernels, avx512bf16::backward_kernels},
    {amx::forward_kernels, amx::backward_kernels},
#endif
};

const char* const names[isa_levels] = {"portable", "avx2", "avx512", "avx512bf16", "amx"};

#if defined(__x86_64__)
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
#endif

bool detect(Isa level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  switch (level) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx512;
    case Isa::avx512bf16:
      return avx512bf16;
    case Isa::amx:
      return avx512bf16 && amx_usable();
  }
  return false;
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

// Blocks of scratch memory that are kept between calls: fresh pages cost more than small problems take.
class ScratchPool {
 public:
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
    const size_t rounded = (bytes + (bytes >> 3) + 4095) & ~size_t{4095};
    return {static_cast<char*>(std::aligned_alloc(4096, rounded)), rounded};
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

bool good_row(const int32_t* spans, int64_t runs, int64_t k_len) {
  int64_t end = 0;
  for (int64_t r = 0; r < runs; ++r) {
    const int64_t lo = spans[2 * r], hi = spans[2 * r + 1];
    if (lo < 0 || hi < lo || hi > k_len) return false;
    if (lo == hi) continue;
    if (lo < end) return false;
    end = hi;
  }
  return true;
}

bool find_bad_row(const Problem& p, BadRow* bad) {
  for (int64_t b = 0; b < p.bounds.batches; ++b)
    for (int64_t h = 0; h < p.bounds.heads; ++h) {
      const int32_t* spans = p.bounds.slice(b, h);
      for (int64_t i = 0; i < p.q_len; ++i)
        if (!good_row(spans + i * p.runs * 2, p.runs, p.k_len)) {
          *bad = {b, h, i};
          return true;
        }
    }
  return false;
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
Result launch(const Args& args, const Pair& pair, const Parallel& parallel) {
  Result result;
  if (find_bad_row(args, &result.bad)) {
    result.status = Status::bad_bounds;
    return result;
  }
  const Scratch need = pair.scratch(args, parallel.threads);
  const size_t shared = (need.shared_bytes + 4095) & ~size_t{4095}, own = (need.thread_bytes + 4095) & ~size_t{4095};
  const ScratchPool::Block block(pool(), shared + own * static_cast<size_t>(parallel.threads) + 4096);
  if (block.data() == nullptr) {
    result.status = Status::out_of_memory;
    return result;
  }
  pair.run(args, parallel, block.data(), block.data() + shared, own);
  return result;
}

}  // namespace

const char* isa_name(Isa level) { return names[static_cast<int>(level)]; }
bool isa_supported(Isa level) { return selection().supported[static_cast<int>(level)]; }
Isa isa_active() { return selection().active; }
const char* isa_request_error() { return selection().error; }

Result forward(const ForwardArgs& args, Isa level, const Parallel& parallel) {
  return launch(args, best(level, args.dtype, &Kernels::forward), parallel);
}

Result backward(const BackwardArgs& args, Isa level, const Parallel& parallel) {
  return launch(args, best(level, args.dtype, &Kernels::backward), parallel);
}

}  // namespace attnspan
