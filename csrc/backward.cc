// Backward: five products for each visible tile (Dao 2023, FlashAttention-2, algorithm 2). Compiled once per
// instruction-set level.
//
// Without options each sequence is a problem of its own: the same bits on any number of threads, packed or alone.
#include "backward_sequence.h"
#include "engines.h"

namespace attnspan::ATTNSPAN_ISA {

// The backward pass of a call: its sequences one by one, each as if it were alone, on all threads or each on one.
//
// With options, whose indices, biases and seeds are those of the whole call, all rows are one sequence.
template <class T, class E>
class SequencesBackward {
 public:
  SequencesBackward(const BackwardArgs& args, int threads) : a_(args), threads_(threads), sequences_(args) {
    const Sequence& first = sequences_[0];
    whole_ = a_.options.change_weights() || a_.options.sinks != nullptr ||
             (a_.bounds.batches * a_.bounds.heads == 1 && first.row == 0 && first.rows == a_.q_len && first.key == 0 &&
              first.keys == a_.k_len);
    if (whole_) return;
    count_from_first_keys();
    double all = 0.0, most = 0.0;
    for (int64_t b = 0; b < a_.batch; ++b)
      for (int64_t hk = 0; hk < a_.kv_heads; ++hk) {
        const Range own = sequences_.of(sequences_.slice_of(b, hk));
        for (int64_t i = own.begin; i < own.end; ++i) {
          const Sequence& s = sequences_[i];
          if (s.keys == 0) continue;
          units_.push_back({b, hk, i});
          const double cost = static_cast<double>(s.rows) * static_cast<double>(s.keys);
          all += cost, most = cost > most ? cost : most;
        }
      }
    // Long ones come first, so that threads end together; one that is too long for that is worked on by all.
    std::sort(units_.begin(), units_.end(), [&](const Unit& x, const Unit& y) { return rows_of(x) > rows_of(y); });
    each_on_one_ = most * static_cast<double>(threads) <= 1.2 * all;
  }

  Scratch scratch() const {
    if (whole_) return Backward<T, E>(a_, threads_).scratch();
    Scratch most{0, 0};
    int64_t rows = -1, keys = -1;
    for (int64_t slice = 0; slice < sequences_.slices(); ++slice)
      for (int64_t i = sequences_.of(slice).begin; i < sequences_.of(slice).end; ++i) {
        const Sequence& s = sequences_[i];
        if (s.keys == 0 || (s.rows == rows && s.keys == keys && alike(s.rows))) continue;
        rows = s.rows, keys = s.keys;
        const BackwardArgs problem = problem_of({sequences_.batch_of(slice), sequences_.head_of(slice), i});
        const Scratch own = Backward<T, E>(problem, each_on_one_ ? 1 : threads_).scratch();
        if (own.shared_bytes > most.shared_bytes) most.shared_bytes = own.shared_bytes;
        if (own.thread_bytes > most.thread_bytes) most.thread_bytes = own.thread_bytes;
      }
    return most;
  }

  void run(const Parallel& parallel, char* shared, char* per_thread, size_t thread_bytes) const {
    if (whole_) return Backward<T, E>(a_, threads_).run(parallel, shared, per_thread, thread_bytes);
    parallel(a_.batch * a_.kv_heads, [&](int64_t head, int) { clear_unseen(head / a_.kv_heads, head % a_.kv_heads); });
    const Parallel alone{1, nullptr, [](void*, int, int64_t items, void (*body)(void*, int64_t, int), void* context) {
                           for (int64_t i = 0; i < items; ++i) body(context, i, 0);
                         }};
    const auto one = [&](const BackwardArgs& problem, const Parallel& by, char* own, Ahead* ahead) {
      Backward<T, E>(problem, by.threads).run(by, shared, own, thread_bytes, ahead);
    };
    const auto count = static_cast<int64_t>(units_.size());
    if (each_on_one_)
      return parallel(count, [&](int64_t i, int thread) {
        const BackwardArgs problem = problem_of(units_[static_cast<size_t>(i)]);
        Ahead ahead = E::overlaps ? Ahead() : Ahead(pauses_of(problem));  // products of tiles do not pause
        write(ahead, problem);
        // What this thread is likely to get next.
        if (const int64_t next = i + threads_; next < count) read(ahead, problem_of(units_[static_cast<size_t>(next)]));
        one(problem, alone, per_thread + static_cast<size_t>(thread) * thread_bytes, &ahead);
      });
    for (const Unit& unit : units_) one(problem_of(unit), parallel, per_thread, nullptr);
  }

 private:
  // One block of rows takes as much memory as another of its size; of more, the mask decides how many are packed at
  // once.
  bool alike(int64_t rows) const { return rows <= (a_.config.block_k != 0 ? a_.config.block_k : 192); }
  struct Unit {
    int64_t b, hk, sequence;
  };
  int64_t rows_of(const Unit& unit) const { return sequences_[unit.sequence].rows; }
  int64_t slice_size() const { return a_.q_len * a_.runs * 2; }

  // The rows' spans, as numbers of their sequence's keys.
  struct Span {
    int32_t lo, hi;
  };
  void count_from_first_keys() {
    spans_.reserve(static_cast<size_t>(a_.bounds.batches * a_.bounds.heads * slice_size() / 2));
    for (int64_t b = 0; b < a_.bounds.batches; ++b)
      for (int64_t h = 0; h < a_.bounds.heads; ++h) {
        const int32_t* from = a_.bounds.slice(b, h);
        const Range own = sequences_.of(sequences_.slice_of(b, a_.bounds.heads == 1 ? 0 : h / a_.group()));
        for (int64_t i = own.begin; i < own.end; ++i) {
          const auto key = static_cast<int32_t>(sequences_[i].key);
          for (int64_t n = 0; n < sequences_[i].rows * a_.runs; ++n, from += 2)
            spans_.push_back(from[0] < from[1] ? Span{from[0] - key, from[1] - key} : Span{0, 0});
        }
      }
  }

  BackwardArgs problem_of(const Unit& unit) const {
    const Sequence& s = sequences_[unit.sequence];
    BackwardArgs p = a_;
    const int64_t h = unit.hk * a_.group(), lse = a_.lse_row(unit.b, h) + s.row;
    p.batch = p.kv_heads = 1, p.q_heads = a_.group(), p.q_len = s.rows, p.k_len = s.keys;
    p.bounds.batches = 1, p.bounds.heads = a_.bounds.heads == 1 ? 1 : a_.group();
    const int64_t of_batch = a_.bounds.batches == 1 ? 0 : unit.b * a_.bounds.heads * slice_size();
    p.bounds.data = reinterpret_cast<const int32_t*>(spans_.data()) + of_batch +
                    (a_.bounds.heads == 1 ? 0 : h * slice_size()) + s.row * a_.runs * 2;
    p.bounds.batch = 0, p.bounds.head = a_.bounds.heads == 1 ? 0 : slice_size();
    for (Tensor* x : {&p.q, &p.out, &p.dout, &p.dq}) shift(x, unit.b, h, s.row);
    for (Tensor* x : {&p.k, &p.v, &p.dk, &p.dv}) shift(x, unit.b, unit.hk, s.key);
    if (p.lse != nullptr) p.lse += lse;
    if (p.lse_low != nullptr) p.lse_low += lse;
    if (p.wide_lse != nullptr) p.wide_lse += lse;
    if (p.dlse != nullptr) p.dlse += lse;
    p.lse_head = a_.lse_head == 0 ? a_.q_len : a_.lse_head;
    return p;
  }
  static void shift(Tensor* x, int64_t b, int64_t h, int64_t i) {
    x->data = x->wide ? static_cast<void*>(at<float>(*x, b, h, i)) : static_cast<void*>(at<T>(*x, b, h, i));
  }

  // About how many pauses the products of a causal sequence have.
  static int64_t pauses_of(const BackwardArgs& p) {
    return p.q_heads * E::pauses(p.q_len, p.k_len / 2, 2 * (p.head_dim + p.v_dim));
  }

  static void read(Ahead& ahead, const BackwardArgs& p) {
    constexpr int64_t size = sizeof(T);
    ahead.read(p.k.data, p.k.row * size, p.k_len, p.head_dim * size);
    ahead.read(p.v.data, p.v.row * size, p.k_len, p.v_dim * size);
    for (int64_t h = 0; h < p.q_heads; ++h) {
      ahead.read(at<T>(p.q, 0, h, 0), p.q.row * size, p.q_len, p.head_dim * size);
      ahead.read(at<T>(p.out, 0, h, 0), p.out.row * size, p.q_len, p.v_dim * size);
      ahead.read(at<T>(p.dout, 0, h, 0), p.dout.row * size, p.q_len, p.v_dim * size);
    }
  }
  static void write(Ahead& ahead, const BackwardArgs& p) {
    const int64_t size = p.dk.wide ? int64_t{sizeof(float)} : int64_t{sizeof(T)};
    ahead.write(p.dk.data, p.dk.row * size, p.k_len, p.head_dim * size);
    ahead.write(p.dv.data, p.dv.row * size, p.k_len, p.v_dim * size);
    if (p.q_heads == 1) ahead.write(p.dq.data, p.dq.row * size, p.q_len, p.head_dim * size);
  }

  // Gradients of the rows that see nothing, in front of all sequences, and of the keys between sequences.
  void clear_unseen(int64_t b, int64_t hk) const {
    const Range own = sequences_.of(sequences_.slice_of(b, hk));
    int64_t key = 0;
    for (int64_t i = own.begin; i <= own.end; ++i) {
      const int64_t next = i == own.end ? a_.k_len : sequences_[i].keys == 0 ? key : sequences_[i].key;
      for (; key < next; ++key) clear(a_.dk, b, hk, key, a_.head_dim), clear(a_.dv, b, hk, key, a_.v_dim);
      if (i == own.end) break;
      const Sequence& s = sequences_[i];
      if (s.keys > 0) key = s.key + s.keys;
      for (int64_t h = hk * a_.group(); s.keys == 0 && h < (hk + 1) * a_.group(); ++h)
        for (int64_t row = s.row; row < s.row + s.rows; ++row) clear(a_.dq, b, h, row, a_.head_dim);
    }
  }
  static void clear(const Tensor& x, int64_t b, int64_t h, int64_t i, int64_t dim) {
    alignas(64) static constexpr float zeros[max_dim] = {};
    write_row<T>(zeros, 1.0f, x, b, h, i, dim);
  }

  const BackwardArgs& a_;
  const int threads_;
  const Sequences sequences_;
  bool whole_ = false, each_on_one_ = false;
  std::vector<Unit> units_{};
  std::vector<Span> spans_{};
};

Kernels::BackwardPair backward_kernels(Dtype dtype) {
#if defined(ATTNSPAN_AMX_FP16)
  // Probabilities of long rows are below float16's normal numbers, and gradients may be beyond them: split ones serve.
  return static_cast<void>(dtype), Kernels::BackwardPair{};
#else
  return with_engine<Kernels::BackwardPair>(dtype, []<class T, class E>() -> Kernels::BackwardPair {
    return {Backward<T, E>::blocks_allowed,
            [](const BackwardArgs& args, int threads) { return SequencesBackward<T, E>(args, threads).scratch(); },
            [](const BackwardArgs& args, const Parallel& parallel, char* shared, char* own, size_t bytes) {
              SequencesBackward<T, E>(args, parallel.threads).run(parallel, shared, own, bytes);
            }};
  });
#endif
}

}  // namespace attnspan::ATTNSPAN_ISA
