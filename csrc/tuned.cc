#include "tuned.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace attnspan {
namespace {

using Table = std::unordered_map<uint64_t, Config>;

uint64_t code(const TunedKey& k) {
  return static_cast<uint64_t>(k.direction) | static_cast<uint64_t>(k.isa) << 4 | static_cast<uint64_t>(k.dtype) << 8 |
         static_cast<uint64_t>(k.mask_kind) << 12 | static_cast<uint64_t>(k.length_bucket) << 16 |
         static_cast<uint64_t>(k.head_dim) << 32;
}

std::mutex table_mutex;
std::shared_ptr<const Table> table;
std::atomic<bool> filled{false};  // most processes have no table, and should not pay for one

// A forked child finds the mutex free.
[[maybe_unused]] const int fork_handlers =
    pthread_atfork([] { table_mutex.lock(); }, [] { table_mutex.unlock(); }, [] { table_mutex.unlock(); });

}  // namespace

int64_t length_bucket(int64_t k_len) {
  int64_t bucket = 0;
  while ((int64_t{1} << bucket) < k_len) ++bucket;
  return bucket;
}

MaskKind mask_kind(int64_t q_len, int64_t k_len, double pairs_of_a_head) {
  if (q_len <= 16) return MaskKind::decode;
  const double all = static_cast<double>(q_len) * static_cast<double>(k_len);
  return pairs_of_a_head >= 0.75 * all   ? MaskKind::dense
         : pairs_of_a_head >= 0.25 * all ? MaskKind::half
                                         : MaskKind::sparse;
}

void set_tuned(const std::vector<TunedRow>& rows) {
  auto next = std::make_shared<Table>();
  for (const TunedRow& row : rows) (*next)[code(row.key)] = row.config;
  const bool any = !next->empty();
  const std::lock_guard lock(table_mutex);
  table = std::move(next);
  filled.store(any, std::memory_order_release);
}

bool find_tuned(const TunedKey& key, Config* config) {
  if (!filled.load(std::memory_order_acquire)) return false;
  std::shared_ptr<const Table> now;
  {
    const std::lock_guard lock(table_mutex);
    now = table;
  }
  const auto found = now->find(code(key));
  if (found == now->end()) return false;
  *config = found->second;
  return true;
}

Config tuned_for(Direction direction, Isa level, const Problem& p, int64_t pairs) {
  Config config;
  const double heads = static_cast<double>(p.batch * p.q_heads);
  find_tuned({direction, level, p.dtype, p.head_dim, length_bucket(p.k_len),
              mask_kind(p.q_len, p.k_len, heads == 0 ? 0.0 : static_cast<double>(pairs) / heads)},
             &config);
  // How many threads are worth it depends on what a key leaves open, too: only problems no larger than the tuner's
  // obey.
  constexpr int64_t tuned_heads = 8;
  if (p.batch * p.q_heads > tuned_heads || p.q_len > (int64_t{1} << length_bucket(p.k_len))) config.threads = 0;
  return config;
}

}  // namespace attnspan
