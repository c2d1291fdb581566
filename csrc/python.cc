// The Python edge: checks that the arrays fit each other, releases the GIL, runs, turns failures into exceptions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "attention.h"
#include "threads.h"

namespace nb = nanobind;
using namespace attnspan;

namespace {

// (address, dtype code, shape, strides in elements), as kernels/cpu.py makes it.
struct Array {
  void* data;
  int dtype;
  std::vector<int64_t> shape, strides;
};

constexpr int code_i32 = 3;
const char* const dtype_names[] = {"float32", "bfloat16", "float16", "int32"};

[[noreturn]] void fail(const std::string& text) { throw nb::value_error(text.c_str()); }

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

Array array_of(nb::handle x) {
  const auto t = nb::cast<nb::tuple>(x);
  return {reinterpret_cast<void*>(nb::cast<uintptr_t>(t[0])), nb::cast<int>(t[1]), nb::cast<std::vector<int64_t>>(t[2]),
          nb::cast<std::vector<int64_t>>(t[3])};
}

Array checked(const char* name, nb::handle x, int dtype, const std::vector<int64_t>& shape) {
  Array a = array_of(x);
  if (a.dtype != dtype)
    fail(std::string(name) + ": expected " + dtype_names[dtype] + ", got " +
         (a.dtype >= 0 && a.dtype <= 3 ? dtype_names[a.dtype] : "an unknown dtype"));
  if (a.shape != shape || a.strides.size() != shape.size())
    fail(std::string(name) + ": expected shape " + text_of(shape) + ", got " + text_of(a.shape));
  return a;
}

Tensor tensor_of(const char* name, nb::handle x, int dtype, const std::vector<int64_t>& shape) {
  const Array a = checked(name, x, dtype, shape);
  if (a.strides[3] != 1 && shape[3] > 1)
    fail(std::string(name) + ": expected a unit last stride, got " + std::to_string(a.strides[3]));
  return {a.data, a.strides[0], a.strides[1], a.strides[2]};
}

template <class Item>
Item* packed(const char* name, nb::handle x, int dtype, const std::vector<int64_t>& shape) {
  const Array a = checked(name, x, dtype, shape);
  int64_t stride = 1;
  for (const int64_t n : shape)
    if (n == 0) return static_cast<Item*>(a.data);
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i])
    if (shape[i] > 1 && a.strides[i] != stride) fail(std::string(name) + ": expected a contiguous array");
  return static_cast<Item*>(a.data);
}

void fill(Problem& p, nb::handle q, nb::handle k, nb::handle v, nb::handle bounds, float scale) {
  const Array qa = array_of(q), ka = array_of(k), va = array_of(v), ba = array_of(bounds);
  if (qa.shape.size() != 4 || ka.shape.size() != 4 || va.shape.size() != 4)
    fail("q, k, v: expected 4 axes (batch, heads, length, dim)");
  if (qa.dtype < 0 || qa.dtype > 2) fail("q: expected float32, bfloat16 or float16");
  p.dtype = static_cast<Dtype>(qa.dtype);
  p.batch = qa.shape[0], p.q_heads = qa.shape[1], p.q_len = qa.shape[2], p.head_dim = qa.shape[3];
  p.kv_heads = ka.shape[1], p.k_len = ka.shape[2], p.v_dim = va.shape[3];
  if (p.kv_heads < 1 || p.q_heads % p.kv_heads != 0)
    fail("q heads: expected a multiple of the " + std::to_string(p.kv_heads) + " kv heads, got " +
         std::to_string(p.q_heads));
  if (p.head_dim < 1 || p.head_dim > 256 || p.v_dim < 1 || p.v_dim > 256)
    fail("head_dim: expected 1 to 256, got " + std::to_string(p.head_dim) + " and " + std::to_string(p.v_dim));
  if (p.k_len > INT32_MAX - 64 || p.q_len > INT32_MAX - 64) fail("lengths: expected at most 2**31 - 65");
  p.q = tensor_of("q", q, qa.dtype, qa.shape);
  p.k = tensor_of("k", k, qa.dtype, {p.batch, p.kv_heads, p.k_len, p.head_dim});
  p.v = tensor_of("v", v, qa.dtype, {p.batch, p.kv_heads, p.k_len, p.v_dim});
  if (ba.dtype != code_i32 || ba.shape.size() != 5 || (ba.shape[0] != 1 && ba.shape[0] != p.batch) ||
      (ba.shape[1] != 1 && ba.shape[1] != p.q_heads) || ba.shape[2] != p.q_len || ba.shape[3] < 1 || ba.shape[4] != 2)
    fail("bounds: expected int32 (batch or 1, heads or 1, q_len, runs, 2), got " + text_of(ba.shape));
  p.runs = ba.shape[3];
  const int64_t slice = p.q_len * p.runs * 2;
  p.bounds = {packed<int32_t>("bounds", bounds, code_i32, ba.shape), ba.shape[0] == 1 ? 0 : ba.shape[1] * slice,
              ba.shape[1] == 1 ? 0 : slice, ba.shape[0], ba.shape[1]};
  p.scale = scale;
}

Isa level() {
  if (const char* error = isa_request_error())
    fail(std::string("ATTNSPAN_ISA: expected one of the levels in attnspan._core.isa_levels(); ") + error);
  return isa_active();
}

void raise_unless_ok(const Result& result, int64_t k_len) {
  if (result.status == Status::out_of_memory) throw std::bad_alloc();
  if (result.status == Status::bad_bounds)
    fail("mask bounds: expected spans that are sorted, disjoint and within 0 <= lo <= hi <= k_len = " +
         std::to_string(k_len) + "; row " + std::to_string(result.bad.row) + " (batch " +
         std::to_string(result.bad.batch) + ", head " + std::to_string(result.bad.head) +
         ") breaks this. If the mask has segment ids, an id may stand in more than max_runs "
         "separate places: raise max_runs, or give each document an id of its own");
}

void run_forward(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle bounds,
                 float scale, int threads) {
  ForwardArgs args{};
  fill(args, q, k, v, bounds, scale);
  args.out = tensor_of("out", out, static_cast<int>(args.dtype), {args.batch, args.q_heads, args.q_len, args.v_dim});
  args.lse = packed<float>("lse", lse, 0, {args.batch, args.q_heads, args.q_len});
  const Isa isa = level();
  Result result;
  {
    const nb::gil_scoped_release release;
    result = forward(args, isa, make_parallel(threads));
  }
  raise_unless_ok(result, args.k_len);
}

void run_backward(nb::handle dout, nb::object dlse, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                  nb::handle lse, nb::handle bounds, nb::handle dq, nb::handle dk, nb::handle dv, float scale,
                  int threads) {
  BackwardArgs args{};
  fill(args, q, k, v, bounds, scale);
  const int dtype = static_cast<int>(args.dtype);
  const std::vector<int64_t> o = {args.batch, args.q_heads, args.q_len, args.v_dim},
                             rows = {args.batch, args.q_heads, args.q_len};
  args.dout = tensor_of("dout", dout, dtype, o);
  args.out = tensor_of("out", out, dtype, o);
  args.dq = tensor_of("dq", dq, dtype, {args.batch, args.q_heads, args.q_len, args.head_dim});
  args.dk = tensor_of("dk", dk, dtype, {args.batch, args.kv_heads, args.k_len, args.head_dim});
  args.dv = tensor_of("dv", dv, dtype, {args.batch, args.kv_heads, args.k_len, args.v_dim});
  args.lse = packed<float>("lse", lse, 0, rows);
  args.dlse = dlse.is_none() ? nullptr : packed<float>("dlse", dlse, 0, rows);
  const Isa isa = level();
  Result result;
  {
    const nb::gil_scoped_release release;
    result = backward(args, isa, make_parallel(threads));
  }
  raise_unless_ok(result, args.k_len);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The CPU kernel. Use it through attnspan.kernels.cpu.";
  m.def("forward", &run_forward, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("lse"),
        nb::arg("bounds"), nb::arg("scale"), nb::arg("num_threads"));
  m.def("backward", &run_backward, nb::arg("dout"), nb::arg("dlse").none(), nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("out"), nb::arg("lse"), nb::arg("bounds"), nb::arg("dq"), nb::arg("dk"), nb::arg("dv"),
        nb::arg("scale"), nb::arg("num_threads"));
  m.def("isa_levels", [] {
    std::vector<std::string> levels;
    for (int i = 0; i < isa_levels; ++i)
      if (isa_supported(static_cast<Isa>(i))) levels.emplace_back(isa_name(static_cast<Isa>(i)));
    return levels;
  });
  m.def("active_isa", [] { return std::string(isa_name(level())); });
  m.def("threading", [] { return std::string(threading_name()); });
}
