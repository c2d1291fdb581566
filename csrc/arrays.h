// Arrays as they come from Python: a tuple that names everything, or any object whose type has DLPack's C exchange
// table (torch from 2.10 on), which is read without a Python call. No framework header.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <string>

#include "array.h"
#include "torch_edge.h"

namespace attnspan {

namespace nb = nanobind;

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

inline int dtype_code(const dlpack::Tensor& t) {
  constexpr int integer = 0, floating = 2, brain = 4;
  if (t.lanes != 1) return -1;
  if (t.code == floating) return t.bits == 32 ? code_f32 : t.bits == 16 ? 2 : t.bits == 64 ? code_f64 : -1;
  if (t.code == brain && t.bits == 16) return 1;
  if (t.code != integer) return -1;
  return t.bits == 32 ? 3 : t.bits == 64 ? 4 : -1;
}

// DLPack says nothing of storages. Torch's tensors tell where their TensorImpl is; other arrays own their memory.
inline void check_storage(nb::handle x, const Array& a) {
  static PyObject* const name = PyUnicode_InternFromString("_cdata");
  const nb::object impl = nb::steal(PyObject_GetAttr(x.ptr(), name));
  if (!impl.is_valid()) return PyErr_Clear();
  check_torch_storage(PyLong_AsVoidPtr(impl.ptr()), a);
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
  check_storage(x, a);
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

}  // namespace attnspan
