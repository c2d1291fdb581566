// An array as edges hand it over: address, element type, shape and strides; and the checks of single arrays. No
// framework header.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace attnspan {

constexpr int code_f32 = 0, code_i32 = 3, code_i64 = 4, code_f64 = 5;  // indices of dtype_names

[[noreturn]] inline void fail(const std::string& text) { throw std::invalid_argument(text); }

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
  bool empty() const {  // its strides mean nothing
    for (int i = 0; i < ndim; ++i)
      if (shape[static_cast<size_t>(i)] == 0) return true;
    return false;
  }
  std::string shape_text() const { return text(shape.data(), ndim); }
  static std::string text(const int64_t* shape, int ndim) {
    std::string text = "(";
    for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
  }
};

// Throws for an array that reaches beyond its storage, which has been freed or made smaller meanwhile: `bytes` of it,
// in which the array starts at element `offset`.
inline void check_within(const Array& a, int64_t offset, int64_t bytes) {
  constexpr int64_t sizes[] = {4, 2, 2, 4, 8, 8};
  if (a.dtype < 0 || a.empty()) return;  // an unknown dtype is refused by its name
  int64_t end = offset + 1;
  for (int i = 0; i < a.ndim; ++i) end += (a.shape[static_cast<size_t>(i)] - 1) * a.strides[static_cast<size_t>(i)];
  if (end * sizes[a.dtype] > bytes)
    fail("array of shape " + a.shape_text() + ": expected a storage of at least " +
         std::to_string(end * sizes[a.dtype]) + " bytes, got " + std::to_string(bytes) +
         ": it was freed or shrunk by untyped_storage().resize_(). Restore it before this call (FSDP: unshard the "
         "module first); what backward reads must stay until it has run");
}

inline Array checked(const char* name, const Array& a, int dtype, std::initializer_list<int64_t> shape) {
  if (a.dtype != dtype)
    fail(std::string(name) + ": expected " + dtype_names[dtype] + ", got " +
         (a.dtype >= 0 && a.dtype <= code_f64 ? dtype_names[a.dtype] : "an unknown dtype"));
  if (!a.has_shape(shape))
    fail(std::string(name) + ": expected shape " + Array::text(shape.begin(), static_cast<int>(shape.size())) +
         ", got " + a.shape_text());
  return a;
}

// A (batch, heads, length, dim) array with a unit last stride.
inline Tensor tensor_of(const char* name, const Array& x, int dtype, std::initializer_list<int64_t> shape) {
  const Array a = checked(name, x, dtype, shape);
  if (a.strides[3] != 1 && a.shape[3] > 1 && !a.empty())
    fail(std::string(name) + ": expected a unit last stride, got " + std::to_string(a.strides[3]));
  return {a.data, a.strides[0], a.strides[1], a.strides[2]};
}

// The same, written: in the dtype of the problem, or in float32.
inline Tensor result_of(const char* name, const Array& x, int dtype, std::initializer_list<int64_t> shape) {
  const bool wide = dtype != code_f32 && x.dtype == code_f32;
  Tensor t = tensor_of(name, x, wide ? code_f32 : dtype, shape);
  t.wide = wide;
  return t;
}

inline void check_packed(const char* name, const Array& a) {
  int64_t stride = 1;
  if (a.empty()) return;
  for (int i = a.ndim; i-- > 0; stride *= a.shape[static_cast<size_t>(i)])
    if (a.shape[static_cast<size_t>(i)] > 1 && a.strides[static_cast<size_t>(i)] != stride)
      fail(std::string(name) + ": expected a contiguous array");
}

inline Array packed(const char* name, const Array& x, int dtype, std::initializer_list<int64_t> shape) {
  const Array a = checked(name, x, dtype, shape);
  check_packed(name, a);
  return a;
}

}  // namespace attnspan
