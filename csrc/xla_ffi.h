// XLA's foreign function interface as its C ABI fixes it (xla/ffi/api/c_api.h, API 0.1 and later), as far as it is
// used. Written out here so that no build needs XLA's headers and one module serves every JAX;
// tests/jax/test_ffi_layout.py compares it with the header of the JAX that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnspan::ffi {

struct Error;
struct Context;

struct Extension {
  size_t struct_size;
  int type;  // 1: metadata are asked for
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extension;
  int major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  size_t struct_size;
  Extension* extension;
  int dtype;  // as XLA numbers them
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Scalar {
  int dtype;
  void* value;
};

struct Text {
  const char* data;
  size_t size;
};

struct Buffers {  // arguments, or results
  size_t struct_size;
  Extension* extension;
  int64_t size;
  int* types;
  void** values;
};

struct Attributes {
  size_t struct_size;
  Extension* extension;
  int64_t size;
  int* types;
  Text** names;
  void** values;
};

struct ErrorCreate {
  size_t struct_size;
  Extension* extension;
  const char* message;
  int code;
};

struct Schedule {
  size_t struct_size;
  Extension* extension;
  Context* context;
  void (*task)(void*);
  void* data;
};

struct NumThreads {
  size_t struct_size;
  Extension* extension;
  Context* context;
  int64_t* threads;
};

struct ErrorDestroy {
  size_t struct_size;
  Extension* extension;
  Error* error;
};

struct Api {
  size_t struct_size;
  Extension* extension;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void* error_get_message;
  void (*error_destroy)(ErrorDestroy*);
  void* unused[8];
  Error* (*thread_pool_schedule)(Schedule*);
  Error* (*thread_pool_num_threads)(NumThreads*);
};

enum class Stage : int { instantiate = 0, prepare = 1, initialize = 2, execute = 3 };

struct CallFrame {
  size_t struct_size;
  Extension* extension;
  const Api* api;
  Context* context;
  Stage stage;
  Buffers arguments, results;
  Attributes attributes;
};

enum Codes : int { invalid_argument = 3, resource_exhausted = 8, internal = 13 };
enum Types : int { s32 = 4, s64 = 5, u32 = 8, f16 = 10, f32 = 11, f64 = 12, bf16 = 16 };
enum AttributeTypes : int { scalar = 3 };

using Handler = Error* (*)(CallFrame*);

}  // namespace attnspan::ffi
