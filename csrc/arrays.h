// Arrays as they come from Python: a tuple that names everything, or any object whose type has DLPack's C exchange
// table (torch from 2.10 on), which is read without a Python call. No framework header.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "attention.h"

namespace attnspan {

namespace nb = nanobind;

[[noreturn]] inline void fail(const std::string& text) { throw nb::value_error(text.c_str()); }

// What DLPack 1.x fixes (dlpack.h, `DLPackExchangeAPI`), as far as it is used.
namespace dlpack {

struct Tensor {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
static_assert(offsetof(Tensor, shape) == 24);

struct Exchange {
  uint32_t major, minor;
  const Exchange* previous;
  void *allocate, *from_object, *to_object;
  int (*borrow)(void* object, Tensor* out);
  void* stream;
};

// The table of an object's type, or null. Types are few and live on: the last ones are remembered.
inline const Exchange* exchange_of(nb::handle x) {
  static std::array<std::pair<PyTypeObject*, const Exchange*>, 4> known{};
  static size_t next = 0;
  PyTypeObject* const type = Py_TYPE(x.ptr());
  for (const auto& [seen, table] : known)
    if (seen == type) return table;
  const Exchange* table = nullptr;
  const nb::object capsule = nb::getattr(x.type(), "__dlpack_c_exchange_api__", nb::none());
  if (!capsule.is_none())
    table = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) PyErr_Clear();
  while (table != nullptr && table->major != 1) table = table->previous;
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  known[next++ % known.size()] = {type, table};
  return table;
}

}  // namespace dlpack

struct Array {
  static constexpr int most_dims = 5;
  void* data = nullptr;
  int dtype = -1, ndim = 0;                           // dtype: an index of dtype_names, or -1
  std::array<int64_t, most_dims> shape{}, strides{};  // strides in elements

  bool has_shape(std::initializer_list<int64_t> other) const {
    int i = 0;
    for (const int64_t n : other)
      if (i >= ndim || shape[static_cast<size_t>(i++)] != n) return false;
    return i == ndim;
  }
  std::string shape_text() const { return text(shape.data(), ndim); }
  static std::string text(const int64_t* shape, int ndim) {
    std::string text = "(";
    for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
  }
};

inline int dtype_code(const dlpack::Tensor& t) {
  constexpr int integer = 0, floating = 2, brain = 4;
  if (t.lanes != 1) return -1;
  if (t.code == floating) return t.bits == 32 ? 0 : t.bits == 16 ? 2 : -1;
  if (t.code == brain && t.bits == 16) return 1;
  if (t.code != integer) return -1;
  return t.bits == 32 ? 3 : t.bits == 64 ? 4 : -1;
}

inline Array borrow(nb::handle x, const dlpack::Exchange& exchange) {
  dlpack::Tensor t;
  if (exchange.borrow(x.ptr(), &t) != 0) throw nb::python_error();
  constexpr int cpu = 1;
  if (t.device_type != cpu) fail("array: expected one in the processor's memory, got one on a device");
  if (t.ndim > Array::most_dims) fail("array: expected at most 5 axes, got " + std::to_string(t.ndim));
  Array a;
  a.data = static_cast<char*>(t.data) + t.byte_offset;
  a.dtype = dtype_code(t);
  a.ndim = t.ndim;
  int64_t dense = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    const auto at = static_cast<size_t>(i);
    a.shape[at] = t.shape[i];
    a.strides[at] = t.strides != nullptr ? t.strides[i] : dense;
    dense *= t.shape[i];
  }
  if (t.data == nullptr && dense != 0) fail("array: expected one with memory of its own");
  return a;
}

// (address, dtype code, shape, strides in elements), as kernels/cpu.py makes it, or an object to borrow from.
inline Array array_of(nb::handle x) {
  if (!nb::isinstance<nb::tuple>(x)) {
    const dlpack::Exchange* exchange = dlpack::exchange_of(x);
    if (exchange == nullptr) throw nb::type_error("array: expected a tuple or an array with DLPack's exchange table");
    return borrow(x, *exchange);
  }
  const auto t = nb::cast<nb::tuple>(x);
  const auto shape = nb::cast<nb::tuple>(t[2]), strides = nb::cast<nb::tuple>(t[3]);
  if (shape.size() > Array::most_dims || strides.size() != shape.size()) fail("array: expected at most 5 axes");
  Array a;
  a.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(t[0]));
  a.dtype = nb::cast<int>(t[1]);
  a.ndim = static_cast<int>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    a.shape[i] = nb::cast<int64_t>(shape[i]);
    a.strides[i] = nb::cast<int64_t>(strides[i]);
  }
  return a;
}

inline Array checked(const char* name, nb::handle x, int dtype, std::initializer_list<int64_t> shape) {
  const Array a = array_of(x);
  if (a.dtype != dtype)
    fail(std::string(name) + ": expected " + dtype_names[dtype] + ", got " +
         (a.dtype >= 0 && a.dtype <= 4 ? dtype_names[a.dtype] : "an unknown dtype"));
  if (!a.has_shape(shape))
    fail(std::string(name) + ": expected shape " + Array::text(shape.begin(), static_cast<int>(shape.size())) +
         ", got " + a.shape_text());
  return a;
}

// A (batch, heads, length, dim) array with a unit last stride.
inline Tensor tensor_of(const char* name, nb::handle x, int dtype, std::initializer_list<int64_t> shape) {
  const Array a = checked(name, x, dtype, shape);
  if (a.strides[3] != 1 && a.shape[3] > 1)
    fail(std::string(name) + ": expected a unit last stride, got " + std::to_string(a.strides[3]));
  return {a.data, a.strides[0], a.strides[1], a.strides[2]};
}

// The same, written: in the dtype of the problem, or in float32.
inline Tensor result_of(const char* name, nb::handle x, int dtype, std::initializer_list<int64_t> shape) {
  const bool wide = dtype != 0 && array_of(x).dtype == 0;
  Tensor t = tensor_of(name, x, wide ? 0 : dtype, shape);
  t.wide = wide;
  return t;
}

inline void check_packed(const char* name, const Array& a);

inline Array packed(const char* name, nb::handle x, int dtype, std::initializer_list<int64_t> shape) {
  const Array a = checked(name, x, dtype, shape);
  check_packed(name, a);
  return a;
}

inline void check_packed(const char* name, const Array& a) {
  int64_t stride = 1;
  for (int i = 0; i < a.ndim; ++i)
    if (a.shape[static_cast<size_t>(i)] == 0) return;
  for (int i = a.ndim; i-- > 0; stride *= a.shape[static_cast<size_t>(i)])
    if (a.shape[static_cast<size_t>(i)] > 1 && a.strides[static_cast<size_t>(i)] != stride)
      fail(std::string(name) + ": expected a contiguous array");
}

}  // namespace attnspan
