#include <nanobind/nanobind.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "xla.h"

namespace nb = nanobind;

namespace attnspan {
namespace {

// Guarded by the GIL, and never released: XLA's threads may outlive the module.
PyObject* callback = nullptr;

nb::list described(const ffi::Buffers& all) {
  nb::list found;
  for (int64_t i = 0; i < all.size; ++i) {
    const auto& buffer = *static_cast<const ffi::Buffer*>(all.values[i]);
    nb::list shape;
    for (int64_t axis = 0; axis < buffer.rank; ++axis) shape.append(buffer.dims[axis]);
    found.append(nb::make_tuple(reinterpret_cast<uintptr_t>(buffer.data), buffer.dtype, nb::tuple(shape)));
  }
  return found;
}

int64_t key_of(const ffi::Attributes& all) {
  for (int64_t i = 0; i < all.size; ++i)
    if (std::string_view(all.names[i]->data, all.names[i]->size) == "key" && all.types[i] == ffi::scalar) {
      const auto& scalar = *static_cast<const ffi::Scalar*>(all.values[i]);
      if (scalar.dtype == ffi::s64) return *static_cast<const int64_t*>(scalar.value);
    }
  throw std::invalid_argument("attribute key: expected int64, got none");
}

// What went wrong, or nothing.
std::string run(const ffi::CallFrame& frame) {
  const int64_t key = key_of(frame.attributes);
  const nb::gil_scoped_acquire gil;
  if (callback == nullptr) return "attnspan_callback: expected a function from set_xla_callback, got none";
  try {
    const nb::object told = nb::handle(callback)(key, described(frame.arguments), described(frame.results));
    return told.is_none() ? "" : nb::str(told).c_str();
  } catch (const std::exception& error) {  // Read and destroyed here, where the GIL is held.
    return error.what();
  }
}

ffi::Error* handle(ffi::CallFrame* frame) {
  if (answered_metadata(*frame) || frame->stage != ffi::Stage::execute) return nullptr;
  try {
    const std::string wrong = run(*frame);
    return wrong.empty() ? nullptr : error_of(*frame, ffi::internal, wrong.c_str());
  } catch (const std::invalid_argument& error) {
    return error_of(*frame, ffi::invalid_argument, error.what());
  } catch (const std::exception& error) {
    return error_of(*frame, ffi::internal, error.what());
  }
}

}  // namespace

ffi::Handler xla_callback() { return &handle; }

void set_xla_callback(PyObject* callable) {
  Py_INCREF(callable);
  Py_XDECREF(callback);
  callback = callable;
}

}  // namespace attnspan
