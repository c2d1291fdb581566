// The Python edge: checks that the arrays fit each other, releases the GIL, runs, turns failures into exceptions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "arguments.h"
#include "arrays.h"
#include "attention.h"
#include "move.h"
#include "pages.h"
#include "peak.h"
#include "snapshot.h"
#include "threads.h"
#include "torch_edge.h"
#include "xla.h"

namespace nb = nanobind;
using namespace attnspan;

namespace {

std::optional<Array> given(nb::handle x) { return x.is_none() ? std::nullopt : std::optional(array_of(x)); }

// The GIL is released for the time of a scope. At the exit of the interpreter, Python up to 3.13 ends a daemon thread
// that asks for the GIL by unwinding its stack, which no noexcept function survives: the thread waits for the end of
// the process instead, as in Python 3.14.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

 private:
  PyThreadState* state_;
};

// Runs a pass without the GIL.
template <class Args>
void run(Result (*pass)(const Args&, Isa, const Parallel&), const Args& args, Direction direction, int threads) {
  const Isa isa = level();
  Result result;
  {
    const WithoutGil release;
    result = pass(args, isa, make_parallel(threads));
  }
  raise_unless_ok(result, args, direction, isa);
}

Problem problem_of(nb::handle q, nb::handle k, nb::handle v, nb::handle bounds, float scale,
                   nb::handle table = nb::none()) {
  return problem_of(array_of(q), array_of(k), array_of(v), array_of(bounds), scale, given(table));
}

// None, or (block_q, block_k, threads).
Config config_of(nb::handle x) {
  if (x.is_none()) return {};
  const auto t = nb::cast<nb::tuple>(x);
  return {nb::cast<int64_t>(t[0]), nb::cast<int64_t>(t[1]), nb::cast<int64_t>(t[2])};
}

// None, or (softcap, bias, bias_kind, sinks, dropout_threshold, dropout_seed, q_index, k_index).
Options options_of(nb::handle x, const Problem& p) {
  if (x.is_none()) return {};
  const auto t = nb::cast<nb::tuple>(x);
  if (t.size() != 8) fail("options: expected 8 items, got " + std::to_string(t.size()));
  return options_of({nb::cast<double>(t[0]), nb::cast<int>(t[2]), nb::cast<int64_t>(t[4]), given(t[1]), given(t[3]),
                     given(t[5]), given(t[6]), given(t[7])},
                    p);
}

void run_forward(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle bounds,
                 float scale, int threads, nb::handle config, nb::handle options, nb::handle table) {
  ForwardArgs args{};
  static_cast<Problem&>(args) = problem_of(q, k, v, bounds, scale, table);
  args.config = config_of(config);
  args.options = options_of(options, args);
  fill(args, array_of(out), given(lse));
  run(forward, args, Direction::forward, threads);
}

void run_backward(nb::handle dout, nb::object dlse, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                  nb::handle lse, nb::handle bounds, nb::handle dq, nb::handle dk, nb::handle dv, float scale,
                  int threads, nb::handle config, nb::handle options, nb::handle dbias, nb::handle dsinks, bool part) {
  BackwardArgs args{};
  static_cast<Problem&>(args) = problem_of(q, k, v, bounds, scale);
  args.config = config_of(config);
  args.options = options_of(options, args);
  fill(args, {array_of(dout),
              given(dlse),
              array_of(out),
              array_of(lse),
              array_of(dq),
              array_of(dk),
              array_of(dv),
              given(dbias),
              given(dsinks),
              {},
              part});
  run(backward, args, Direction::backward, threads);
}

RowArray row_array_of(const char* name, const Array& a) {
  if (a.ndim != 5 || a.dtype < 0 || a.dtype > 2 || (a.strides[4] != 1 && a.shape[4] > 1))
    fail(std::string(name) + ": expected floats (planes, length, inner, heads, width) with a unit last stride, got " +
         a.shape_text());
  const auto &n = a.shape, &s = a.strides;
  return {static_cast<char*>(a.data), n[0], n[1], n[2], n[3], n[4], s[0], s[1], s[2], s[3]};
}

// The index, and its length if it is given.
RowIndex row_index_of(const char* name, nb::handle x, int64_t& count) {
  if (x.is_none()) return {};
  const Array a = array_of(x);
  if (a.dtype != code_i32 || a.ndim != 1) fail(std::string(name) + ": expected int32 (n,), got " + a.shape_text());
  check_packed(name, a);
  count = a.shape[0];
  RowIndex index{std::vector<int32_t>(static_cast<size_t>(count))};
  copy_once(static_cast<const int32_t*>(a.data), count, index.rows.data());
  return index;
}

void move_rows(nb::handle target, nb::handle to, nb::handle source, nb::handle from, bool add, int threads) {
  const Array t = array_of(target), s = array_of(source);
  RowMove move{row_array_of("target", t), row_array_of("source", s), {}, {}, 0, t.dtype == code_f32 ? 4 : 2, add};
  if (t.dtype != s.dtype || t.shape[2] != s.shape[2] || t.shape[3] != s.shape[3] || t.shape[4] != s.shape[4])
    fail("source: expected rows as those of the target, " + t.shape_text() + ", got " + s.shape_text());
  if (add && t.dtype != code_f32) fail("target: expected float32 to add to");
  int64_t targets = move.target.rows(), sources = move.source.rows();
  move.to = row_index_of("to", to, targets);
  move.from = row_index_of("from", from, sources);
  if (targets != sources)
    fail("from: expected as many rows as `to`, " + std::to_string(targets) + ", got " + std::to_string(sources));
  move.count = targets;
  const int64_t bad = move.first_bad();
  if (bad >= 0)
    fail("row " + std::to_string(bad) + ": expected numbers below " + std::to_string(move.target.rows()) + " and " +
         std::to_string(move.source.rows()) + ", got " + std::to_string(move.to.of(bad)) + " and " +
         std::to_string(move.from.of(bad)));
  const WithoutGil release;
  move(make_parallel(threads));
}

// An uninitialised (batch, heads, length, dim) array of the caller's framework, stored as (batch, length, heads, dim).
nb::object new_bshd(nb::handle empty_strided, nb::handle dtype, int64_t batch, int64_t heads, int64_t length,
                    int64_t dim) {
  const int64_t row = heads * dim;
  return empty_strided(nb::make_tuple(batch, heads, length, dim), nb::make_tuple(length * row, dim, row, 1),
                       nb::arg("dtype") = dtype);
}

Tensor bshd(nb::handle x, int64_t heads, int64_t length, int64_t dim) {
  return {array_of(x).data, length * heads * dim, dim, heads * dim};
}

// Runs what turns arrays into arguments; false for arrays that the kernel cannot take as they are.
template <class Fill>
bool accepted(const Fill& fill) {
  try {
    fill();
  } catch (const std::invalid_argument&) {
    return false;
  } catch (const nb::builtin_exception&) {
    return false;
  } catch (const nb::python_error&) {
    return false;
  }
  return true;
}

bool fits(Problem& p, nb::handle q, nb::handle k, nb::handle v, nb::handle bounds) {
  return accepted([&] { p = problem_of(q, k, v, bounds, 1.0f); }) && p.batch * p.q_heads * p.q_len * p.k_len > 0;
}

// Sets the options of a problem; false for arrays that the kernel cannot take as they are.
bool set_options(Problem& p, nb::handle options) {
  try {
    p.options = options_of(options, p);
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}

// The whole of a small call in one: (out, lse in float, in double, or None), or None for arrays that the kernel cannot
// take as they are. Whoever calls has another way to go then, which names what is wrong.
nb::object attend(nb::handle q, nb::handle k, nb::handle v, nb::handle bounds, int64_t k_len, nb::handle scale,
                  int threads, nb::handle empty_strided, nb::handle lse_dtype, nb::handle options) {
  ForwardArgs args{};
  if (!fits(args, q, k, v, bounds) || args.k_len != k_len || !set_options(args, options)) return nb::none();
  args.scale = scale.is_none() ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(args.head_dim)))
                               : nb::cast<float>(scale);
  nb::object out = new_bshd(empty_strided, q.attr("dtype"), args.batch, args.q_heads, args.q_len, args.v_dim);
  args.out = bshd(out, args.q_heads, args.q_len, args.v_dim);
  nb::object lse = nb::none();
  if (!lse_dtype.is_none()) {
    const int64_t rows = args.q_heads * args.q_len;
    lse = empty_strided(nb::make_tuple(args.batch, args.q_heads, args.q_len), nb::make_tuple(rows, args.q_len, 1),
                        nb::arg("dtype") = lse_dtype);
    const Array to = array_of(lse);
    if (to.dtype == code_f64)
      args.wide_lse = static_cast<double*>(to.data);
    else
      args.lse = static_cast<float*>(to.data);
  }
  run(forward, args, Direction::forward, threads);
  return nb::make_tuple(out, lse);
}

// (dq, dk, dv) of what `attend` took, or None for arrays that the kernel cannot take as they are. Writes `dbias` and
// `dsinks` where they are given.
nb::object gradients(nb::handle dout, nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                     nb::handle bounds, float scale, int threads, nb::handle empty_strided, nb::handle options,
                     nb::handle dbias, nb::handle dsinks) {
  BackwardArgs args{};
  const auto fill = [&] {
    static_cast<Problem&>(args) = problem_of(q, k, v, bounds, scale);
    args.options = options_of(options, args);
    fill_option_gradients(args, given(dbias), given(dsinks));
    const int dtype = static_cast<int>(args.dtype);
    args.dout = tensor_of("dout", array_of(dout), dtype, {args.batch, args.q_heads, args.q_len, args.v_dim});
    args.out = tensor_of("out", array_of(out), dtype, {args.batch, args.q_heads, args.q_len, args.v_dim});
    fill_lse(args, array_of(lse), {});
  };
  if (!accepted(fill)) return nb::none();
  const nb::object type = q.attr("dtype");
  nb::object dq = new_bshd(empty_strided, type, args.batch, args.q_heads, args.q_len, args.head_dim),
             dk = new_bshd(empty_strided, type, args.batch, args.kv_heads, args.k_len, args.head_dim),
             dv = new_bshd(empty_strided, type, args.batch, args.kv_heads, args.k_len, args.v_dim);
  args.dq = bshd(dq, args.q_heads, args.q_len, args.head_dim);
  args.dk = bshd(dk, args.kv_heads, args.k_len, args.head_dim);
  args.dv = bshd(dv, args.kv_heads, args.k_len, args.v_dim);
  run(backward, args, Direction::backward, threads);
  return nb::make_tuple(dq, dk, dv);
}

// The index of a name among the first `count` of a list.
int index_of(const char* what, const std::string& name, const char* const* names, int count) {
  for (int i = 0; i < count; ++i)
    if (name == names[i]) return i;
  std::string known;
  for (int i = 0; i < count; ++i) known += (i ? ", " : "") + std::string(names[i]);
  fail(std::string(what) + ": expected one of " + known + ", got '" + name + "'");
}

Direction direction_named(const std::string& name) {
  return static_cast<Direction>(index_of("direction", name, direction_names, 2));
}
Dtype dtype_named(const std::string& name) { return static_cast<Dtype>(index_of("dtype", name, dtype_names, 3)); }

nb::dict counters() {
  nb::dict all;
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    const Totals t = totals(direction);
    nb::dict one;
    one["calls"] = t.calls;
    one["threads"] = t.threads;
    one["seconds"] = t.seconds;
    one["flops"] = t.flops;
    all[direction_names[static_cast<int>(direction)]] = one;
  }
  return all;
}

double peak(const std::string& kind, int threads, double seconds) {
  const auto which = static_cast<PeakKind>(index_of("kind", kind, peak_kind_names, peak_kinds));
  const Isa isa = level();
  if (!has_peak(which, isa)) fail("kind: expected one of attnspan._core.peak_kinds(), got '" + kind + "'");
  const WithoutGil release;
  return peak_rate(which, isa, make_parallel(threads), seconds);
}

double read_bandwidth(int64_t bytes, int threads, double seconds) {
  if (bytes < 4096 * static_cast<int64_t>(threads)) fail("bytes: expected at least 4096 for each thread");
  const Isa isa = level();
  const WithoutGil release;
  std::vector<char> memory(static_cast<size_t>(bytes), 1);
  return read_rate(isa, memory.data(), bytes, make_parallel(threads), seconds);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The CPU kernel. Use it through attnspan.kernels.cpu.";
  m.def("forward", &run_forward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse").none(),
        nb::arg("bounds"), nb::arg("scale"), nb::arg("num_threads"), nb::arg("config").none() = nb::none(),
        nb::arg("options").none() = nb::none(), nb::arg("table").none() = nb::none());
  m.def("backward", &run_backward, nb::arg("dout"), nb::arg("dlse").none(), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("out"), nb::arg("lse"), nb::arg("bounds"), nb::arg("dq"), nb::arg("dk"), nb::arg("dv"),
        nb::arg("scale"), nb::arg("num_threads"), nb::arg("config").none() = nb::none(),
        nb::arg("options").none() = nb::none(), nb::arg("dbias").none() = nb::none(),
        nb::arg("dsinks").none() = nb::none(), nb::arg("part") = false);
  m.def("attend", &attend, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("bounds"), nb::arg("k_len"),
        nb::arg("scale").none(), nb::arg("num_threads"), nb::arg("empty_strided"), nb::arg("lse_dtype").none(),
        nb::arg("options").none());
  m.def("gradients", &gradients, nb::arg("dout"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"),
        nb::arg("lse"), nb::arg("bounds"), nb::arg("scale"), nb::arg("num_threads"), nb::arg("empty_strided"),
        nb::arg("options").none(), nb::arg("dbias").none(), nb::arg("dsinks").none());
  m.def("move_rows", &move_rows, nb::arg("target"), nb::arg("to").none(), nb::arg("source"), nb::arg("from").none(),
        nb::arg("add"), nb::arg("threads"));
  // As XLA registers them: capsules of handlers, by the name of the custom call's target.
  m.def("xla_handlers", [] {
    nb::dict handlers;
    handlers["attnspan_forward"] = nb::capsule(reinterpret_cast<void*>(xla_forward()));
    handlers["attnspan_backward"] = nb::capsule(reinterpret_cast<void*>(xla_backward()));
    return handlers;
  });
  m.def("isa_levels", [] {
    std::vector<std::string> levels;
    for (int i = 0; i < isa_levels; ++i)
      if (isa_supported(static_cast<Isa>(i))) levels.emplace_back(isa_name(static_cast<Isa>(i)));
    return levels;
  });
  m.def("active_isa", [] { return std::string(isa_name(level())); });
  m.def("threading", [] { return std::string(threading_name()); });
  m.def("blocks", [](const std::string& direction, const std::string& dtype) {
    const Blocks b = blocks_of(direction_named(direction), dtype_named(dtype), level());
    return nb::make_tuple(b.q.step, b.q.most, b.k.step, b.k.most, b.square);
  });
  m.def("register_torch_operators", &register_torch_operators);
  m.def("counters", &counters);
  m.def("peak_kinds", [] {
    std::vector<std::string> kinds;
    for (int i = 0; i < peak_kinds; ++i)
      if (has_peak(static_cast<PeakKind>(i), level())) kinds.emplace_back(peak_kind_names[i]);
    return kinds;
  });
  m.def("peak", &peak, nb::arg("kind"), nb::arg("threads"), nb::arg("seconds"));
  m.def(
      "use_large_pages",
      [](uintptr_t address, size_t bytes) { use_large_pages(reinterpret_cast<void*>(address), bytes); },
      nb::arg("address"), nb::arg("bytes"));
  m.def("read_bandwidth", &read_bandwidth, nb::arg("bytes"), nb::arg("threads"), nb::arg("seconds"));
}
