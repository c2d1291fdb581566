// The XLA edge: the kernel as custom calls on XLA's own buffers, which are read and written in place.
#include "xla.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <string_view>

#include "arguments.h"
#include "threads.h"

namespace attnspan {
namespace {

// How many arrays may follow the required ones, as bits of the attribute `given`, in this order.
enum Given : int {
  bias = 1,
  sinks = 2,
  seeds = 4,
  q_index = 8,
  k_index = 16,
  dlse = 32,
  want_dbias = 64,
  lse_low = 128,  // a result of forward, an argument of backward
};

int dtype_code(int type) {
  constexpr int types[] = {ffi::f32, ffi::bf16, ffi::f16, ffi::s32, ffi::s64};  // in the order of dtype_names
  const auto* found = std::find(std::begin(types), std::end(types), type);
  return found == std::end(types) ? -1 : static_cast<int>(found - types);
}

Array array_of(const ffi::Buffer& buffer) {
  if (buffer.rank > Array::most_dims) fail("array: expected at most 5 axes, got " + std::to_string(buffer.rank));
  Array a;
  a.data = buffer.data;
  a.dtype = dtype_code(buffer.dtype);
  a.ndim = static_cast<int>(buffer.rank);
  int64_t dense = 1;
  for (int i = a.ndim; i-- > 0;) {
    const auto at = static_cast<size_t>(i);
    a.shape[at] = buffer.dims[i];
    a.strides[at] = dense;
    dense *= buffer.dims[i];
  }
  return a;
}

// (batch, length, heads, dim) as (batch, heads, length, dim).
Array swapped(Array a) {
  if (a.ndim != 4) fail("array: expected 4 axes, got " + a.shape_text());
  std::swap(a.shape[1], a.shape[2]);
  std::swap(a.strides[1], a.strides[2]);
  return a;
}

// Pairs of words, low and high, are 64-bit integers as they lie.
Array words(Array a, int type) {
  if (type != ffi::u32 || a.ndim != 3 || a.shape[2] != 2) fail("seeds: expected uint32 (batch, heads, 2)");
  a.dtype = code_i64, a.ndim = 2;
  a.strides[0] /= 2, a.strides[1] /= 2;
  return a;
}

class Call {
 public:
  explicit Call(const ffi::CallFrame& frame) : frame_(frame) {}

  double number(std::string_view name) const {
    const ffi::Attributes& all = frame_.attributes;
    for (int64_t i = 0; i < all.size; ++i)
      if (std::string_view(all.names[i]->data, all.names[i]->size) == name && all.types[i] == ffi::scalar)
        return value(*static_cast<const ffi::Scalar*>(all.values[i]));
    fail("attribute " + std::string(name) + ": expected a number, got none");
  }
  int64_t integer(std::string_view name) const { return static_cast<int64_t>(number(name)); }

  const ffi::Buffer& argument() { return take(frame_.arguments, next_argument_++, "arguments"); }
  Array array() { return array_of(argument()); }
  Array tensor() { return integer("bshd") != 0 ? swapped(array()) : array(); }
  Array result() { return array_of(take(frame_.results, next_result_++, "results")); }
  Array result_tensor() { return integer("bshd") != 0 ? swapped(result()) : result(); }

  bool has(Given what) const { return (integer("given") & what) != 0; }
  std::optional<Array> optional(Given what) { return has(what) ? std::optional(array()) : std::nullopt; }

  OptionArrays options() {
    OptionArrays o;
    o.softcap = number("softcap");
    o.bias_kind = static_cast<int>(integer("bias_kind"));
    o.dropout_threshold = integer("dropout_threshold");
    o.bias = optional(bias), o.sinks = optional(sinks);
    if (has(seeds)) {
      const ffi::Buffer& pairs = argument();
      o.dropout_seed = words(array_of(pairs), pairs.dtype);
    }
    o.q_index = optional(q_index), o.k_index = optional(k_index);
    return o;
  }

  XlaPool pool() const { return {frame_.api, frame_.context}; }

 private:
  static double value(const ffi::Scalar& scalar) {
    if (scalar.dtype == ffi::f32) return *static_cast<const float*>(scalar.value);
    if (scalar.dtype == ffi::f64) return *static_cast<const double*>(scalar.value);
    if (scalar.dtype == ffi::s32) return *static_cast<const int32_t*>(scalar.value);
    if (scalar.dtype == ffi::s64) return static_cast<double>(*static_cast<const int64_t*>(scalar.value));
    fail("attribute: expected float32, float64, int32 or int64");
  }
  static const ffi::Buffer& take(const ffi::Buffers& all, int64_t i, const char* what) {
    if (i >= all.size) fail(std::string(what) + ": expected more than " + std::to_string(all.size));
    return *static_cast<const ffi::Buffer*>(all.values[i]);
  }

  const ffi::CallFrame& frame_;
  int64_t next_argument_ = 0, next_result_ = 0;
};

// XLA's pool, or with `own_threads` those that torch's calls use.
template <class Run>
Result on_threads(const Call& call, Run&& run) {
  const int own = static_cast<int>(call.integer("own_threads"));
  if (own > 0) return run(make_parallel(own));
  XlaPool pool = call.pool();
  return run(make_parallel(pool, 0));
}

void run_forward(Call& call) {
  const Array q = call.tensor(), k = call.tensor(), v = call.tensor(), bounds = call.array();
  ForwardArgs args{};
  static_cast<Problem&>(args) = problem_of(q, k, v, bounds, static_cast<float>(call.number("scale")));
  args.options = options_of(call.options(), args);
  const Array out = call.result_tensor();
  const Array lse = call.result();
  fill(args, out, lse, call.has(lse_low) ? std::optional(call.result()) : std::nullopt);
  if (args.batch * args.q_heads * args.q_len == 0) return;
  const Isa isa = level();
  const auto run = [&](const Parallel& parallel) { return forward(args, isa, parallel); };
  raise_unless_ok(on_threads(call, run), args, Direction::forward, isa);
}

void run_backward(Call& call) {
  const Array dout = call.tensor(), q = call.tensor(), k = call.tensor(), v = call.tensor(), out = call.tensor(),
              lse = call.array(), bounds = call.array();
  BackwardArgs args{};
  static_cast<Problem&>(args) = problem_of(q, k, v, bounds, static_cast<float>(call.number("scale")));
  args.options = options_of(call.options(), args);
  GradientArrays given{dout, call.optional(dlse), out, lse, {}, {}, {}, {}, {}};
  given.lse_low = call.optional(lse_low);
  given.dq = call.result_tensor(), given.dk = call.result_tensor(), given.dv = call.result_tensor();
  if (call.has(want_dbias)) given.dbias = call.result();
  if (call.has(sinks)) given.dsinks = call.result();
  fill(args, given);
  const Isa isa = level();
  const auto run = [&](const Parallel& parallel) { return backward(args, isa, parallel); };
  raise_unless_ok(on_threads(call, run), args, Direction::backward, isa);
}

template <void (*run)(Call&)>
ffi::Error* handle(ffi::CallFrame* frame) {
  if (answered_metadata(*frame) || frame->stage != ffi::Stage::execute) return nullptr;
  try {
    Call call(*frame);
    run(call);
    return nullptr;
  } catch (const std::bad_alloc&) {
    return error_of(*frame, ffi::resource_exhausted, "attnspan: out of memory");
  } catch (const std::invalid_argument& error) {
    return error_of(*frame, ffi::invalid_argument, error.what());
  } catch (const std::exception& error) {
    return error_of(*frame, ffi::internal, error.what());
  }
}

}  // namespace

ffi::Handler xla_forward() { return &handle<run_forward>; }
ffi::Handler xla_backward() { return &handle<run_backward>; }

}  // namespace attnspan
