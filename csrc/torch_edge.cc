// The torch edge: the kernel as the CPU implementation of attnspan::attention and attention_backward.
//
// It takes C functions alone, which torch keeps from version to version (torch/csrc/stable/c/shim.h, and
// torch/csrc/inductor/aoti_torch/c/shim.h), and looks them up in the torch of the process: nothing of torch is needed
// to compile, and one build serves every version that has them.
#include "torch_edge.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "threads.h"

namespace attnspan {
namespace {

using Handle = struct OpaqueTensor*;
using Library = struct OpaqueLibrary*;
// An argument or result: a number's bits, a tensor's handle, or a pointer to an optional's value.
using Value = uint64_t;
using Kernel = void (*)(Value* stack, uint64_t arguments, uint64_t results);

// Functions return 0, or what they would have thrown as another number.
struct Torch {
  int32_t (*init_library)(const char* name, const char* key, const char* file, uint32_t line, Library*);
  int32_t (*implement)(Library, const char* name, Kernel, uint64_t version);
  int32_t (*get_num_threads)(uint32_t*);
  int32_t (*get_data_ptr)(Handle, void**);
  int32_t (*get_dim)(Handle, int64_t*);
  int32_t (*get_sizes)(Handle, int64_t**);
  int32_t (*get_strides)(Handle, int64_t**);
  int32_t (*get_dtype)(Handle, int32_t*);
  int32_t (*get_storage_size)(Handle, int64_t*);  // in bytes
  int32_t (*get_storage_offset)(Handle, int64_t*);
  int32_t (*empty_strided)(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device,
                           int32_t index, Handle*);
  int32_t (*copy)(Handle to, Handle from, int32_t non_blocking);
  int32_t (*zero)(Handle);
  int32_t (*delete_tensor)(Handle);
  int32_t (*delete_value)(Value*);  // from 2.13 on; before, whoever gets one deletes it
  std::array<int32_t, 6> dtypes;    // in the order of dtype_names
  int32_t cpu;
};

Torch torch{};

void check(int32_t error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string("torch: ") + what + " failed");
}

// Functions of torch's library, which is loaded. On Linux Python keeps it out of what the process shares.
class Lookup {
 public:
  Lookup() : library_(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)) {}
  ~Lookup() {
    if (library_ != nullptr) dlclose(library_);
  }
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;

  template <class Function>
  bool find(const char* name, Function& to) const {
    to = reinterpret_cast<Function>(dlsym(library_ == nullptr ? RTLD_DEFAULT : library_, name));
    return to != nullptr;
  }
  bool constant(const char* name, int32_t& to) const {
    int32_t (*get)() = nullptr;
    if (!find(name, get)) return false;
    to = get();
    return true;
  }

 private:
  void* const library_;
};

bool look_up(Torch& t) {
  const Lookup in;
  in.find("torch_delete_stable_ivalue", t.delete_value);
  constexpr const char* names[] = {"float32", "bfloat16", "float16", "int32", "int64", "float64"};
  for (size_t i = 0; i < t.dtypes.size(); ++i)
    if (!in.constant((std::string("aoti_torch_dtype_") + names[i]).c_str(), t.dtypes[i])) return false;
  return in.constant("aoti_torch_device_type_cpu", t.cpu) && in.find("aoti_torch_library_init_impl", t.init_library) &&
         in.find("torch_library_impl", t.implement) && in.find("torch_get_num_threads", t.get_num_threads) &&
         in.find("aoti_torch_get_data_ptr", t.get_data_ptr) && in.find("aoti_torch_get_dim", t.get_dim) &&
         in.find("aoti_torch_get_sizes", t.get_sizes) && in.find("aoti_torch_get_strides", t.get_strides) &&
         in.find("aoti_torch_get_dtype", t.get_dtype) && in.find("aoti_torch_get_storage_size", t.get_storage_size) &&
         in.find("aoti_torch_get_storage_offset", t.get_storage_offset) &&
         in.find("aoti_torch_empty_strided", t.empty_strided) && in.find("aoti_torch_copy_", t.copy) &&
         in.find("aoti_torch_zero_", t.zero) && in.find("aoti_torch_delete_tensor_object", t.delete_tensor);
}

// A tensor that is deleted with this.
class Held {
 public:
  explicit Held(Handle handle) : handle_(handle) {}
  Held(Held&& other) noexcept : handle_(other.release()) {}
  Held& operator=(Held&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Held() {
    if (handle_ != nullptr) torch.delete_tensor(handle_);
  }
  Handle get() const { return handle_; }
  Handle release() {
    Handle mine = handle_;
    handle_ = nullptr;
    return mine;
  }
  Value value() { return reinterpret_cast<Value>(release()); }

 private:
  Handle handle_;
};

// Tensors promise nothing of their storage: it may have been freed since they were made.
void check_storage(Handle x, const Array& a) {
  int64_t offset = 0, bytes = 0;
  check(torch.get_storage_offset(x, &offset), "get_storage_offset");
  check(torch.get_storage_size(x, &bytes), "get_storage_size");
  check_within(a, offset, bytes);
}

Array array_of(const Held& x) {
  Array a;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  check(torch.get_dim(x.get(), &dims), "get_dim");
  if (dims > Array::most_dims) fail("array: expected at most 5 axes, got " + std::to_string(dims));
  check(torch.get_sizes(x.get(), &sizes), "get_sizes");
  check(torch.get_strides(x.get(), &strides), "get_strides");
  check(torch.get_dtype(x.get(), &dtype), "get_dtype");
  check(torch.get_data_ptr(x.get(), &a.data), "get_data_ptr");
  const auto* found = std::find(torch.dtypes.begin(), torch.dtypes.end(), dtype);
  a.dtype = found == torch.dtypes.end() ? -1 : static_cast<int>(found - torch.dtypes.begin());
  a.ndim = static_cast<int>(dims);
  std::copy_n(sizes, dims, a.shape.begin());
  std::copy_n(strides, dims, a.strides.begin());
  check_storage(x.get(), a);
  return a;
}

Held empty(const int64_t* sizes, const int64_t* strides, int dims, int dtype) {
  Handle made = nullptr;
  // Sizes were checked: what is missing is memory.
  if (torch.empty_strided(dims, sizes, strides, torch.dtypes[static_cast<size_t>(dtype)], torch.cpu, 0, &made) != 0)
    throw std::bad_alloc();
  return Held(made);
}

Held empty(const int64_t* sizes, int dims, int dtype) {
  std::array<int64_t, Array::most_dims> strides{};
  int64_t dense = 1;
  for (int i = dims; i-- > 0; dense *= std::max<int64_t>(1, sizes[i])) strides[static_cast<size_t>(i)] = dense;
  return empty(sizes, strides.data(), dims, dtype);
}

// (batch, heads, length, dim), stored as (batch, length, heads, dim).
Held empty_bshd(const Array& like, int64_t heads, int64_t length, int64_t dim) {
  const int64_t sizes[] = {like.shape[0], heads, length, dim}, d = std::max<int64_t>(1, dim),
                h = std::max<int64_t>(1, heads), s = std::max<int64_t>(1, length);
  const int64_t strides[] = {s * h * d, d, h * d, 1};
  return empty(sizes, strides, 4, like.dtype);
}

bool is_packed(const Array& a) {
  int64_t dense = 1;
  for (int i = a.ndim; i-- > 0; dense *= a.shape[static_cast<size_t>(i)])
    if (a.shape[static_cast<size_t>(i)] > 1 && a.strides[static_cast<size_t>(i)] != dense) return false;
  return true;
}

// The arguments of a call, in the order of the operator's schema. All of them are taken, whatever is thrown.
class Arguments {
 public:
  explicit Arguments(Value* stack) : next_(stack) {}

  double number() {
    double x = 0.0;
    std::memcpy(&x, next_++, sizeof x);
    return x;
  }
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  bool flag() { return (*next_++ & 1) != 0; }
  Held tensor() { return Held(reinterpret_cast<Handle>(*next_++)); }
  std::optional<Held> optional() {
    auto* const at = reinterpret_cast<Value*>(*next_++);
    if (at == nullptr) return std::nullopt;
    Held found(reinterpret_cast<Handle>(*at));
    torch.delete_value != nullptr ? static_cast<void>(torch.delete_value(at)) : delete at;
    return found;
  }

 private:
  Value* next_;
};

// A tensor as the kernel can read it: itself, or a copy.
struct Read {
  Held tensor;
  Array array;
};

Read copied(Read x) {
  if (x.array.dtype < 0) return x;  // whose dtype is refused by its name
  Held made = empty(x.array.shape.data(), x.array.ndim, x.array.dtype);
  check(torch.copy(made.get(), x.tensor.get(), 0), "copy_");
  Array array = array_of(made);
  return {std::move(made), array};
}

// Rows of elements side by side.
Read rows(Held tensor) {
  Read x{std::move(tensor), {}};
  x.array = array_of(x.tensor);
  const auto last = static_cast<size_t>(x.array.ndim > 0 ? x.array.ndim - 1 : 0);
  return x.array.ndim == 0 || x.array.strides[last] == 1 ? std::move(x) : copied(std::move(x));
}

Read contiguous(Held tensor) {
  Read x{std::move(tensor), {}};
  x.array = array_of(x.tensor);
  return is_packed(x.array) ? std::move(x) : copied(std::move(x));
}

// The options of a call, and what keeps their arrays alive.
class CallOptions {
 public:
  explicit CallOptions(Arguments& in) : softcap_(in.number()), bias_(in.optional()) {
    kind_ = static_cast<int>(in.integer()), sinks_ = in.optional(), dropout_ = in.number();
    for (auto* x : {&seed_, &q_index_, &k_index_}) *x = in.optional();
  }

  // Null where none is given.
  void apply(Problem& p) {
    if (softcap_ == 0.0 && !bias_ && !sinks_ && dropout_ == 0.0) return;
    OptionArrays given;
    given.softcap = softcap_, given.bias_kind = kind_;
    constexpr int dense = static_cast<int>(BiasKind::dense);
    if (bias_) given.bias = keep(kind_ == dense ? rows(std::move(*bias_)) : contiguous(std::move(*bias_)));
    given.sinks = packed(sinks_), given.dropout_seed = packed(seed_);
    given.q_index = packed(q_index_), given.k_index = packed(k_index_);
    if (dropout_ != 0.0) given.dropout_threshold = std::min<int64_t>(std::llrint(dropout_ * 65536), 65535);
    p.options = options_of(given, p);
    bias_array_ = given.bias, sinks_array_ = given.sinks;
  }

  // Uninitialised; without elements where none is wanted.
  Held gradient_of_bias(bool wanted) const { return gradient_of(wanted ? bias_array_ : std::nullopt); }
  Held gradient_of_sinks() const { return gradient_of(sinks_array_); }

 private:
  Array keep(Read x) {
    kept_.push_back(std::move(x.tensor));
    return x.array;
  }
  std::optional<Array> packed(std::optional<Held>& x) {
    return x ? std::optional(keep(contiguous(std::move(*x)))) : std::nullopt;
  }
  static Held gradient_of(const std::optional<Array>& x) {
    constexpr int64_t none = 0;
    return x ? empty(x->shape.data(), x->ndim, code_f32) : empty(&none, 1, code_f32);
  }

  double softcap_, dropout_ = 0.0;
  int kind_ = 0;
  std::optional<Held> bias_, sinks_, seed_, q_index_, k_index_;
  std::vector<Held> kept_;
  std::optional<Array> bias_array_, sinks_array_;
};

template <class Args>
void run(Result (*pass)(const Args&, Isa, const Parallel&), const Args& args, Direction direction) {
  const Isa isa = level();
  uint32_t threads = 1;
  check(torch.get_num_threads(&threads), "get_num_threads");
  raise_unless_ok(pass(args, isa, make_parallel(static_cast<int>(threads))), args, direction, isa);
}

// A mask that was lowered for another number of keys; the same words as check_k_len in call.py.
void check_k_len(const std::optional<Held>& own, int64_t k_len) {
  if (!own) return;
  const Array a = checked("k_len", array_of(*own), code_i64, {});
  const int64_t given = *static_cast<const int64_t*>(a.data);
  if (given != k_len)
    fail("mask: expected spans over k_len=" + std::to_string(k_len) + " keys (as k), got spans over " +
         std::to_string(given) + ". Lower the mask for these keys, or pass the layout of q, k and v.");
}

// Arguments: q, k, v, bounds, scale, options, k_len.
void forward_kernel(Value* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Held tensors[] = {in.tensor(), in.tensor(), in.tensor(), in.tensor()};
  const double scale = in.number();
  CallOptions options(in);
  const std::optional<Held> own_k_len = in.optional();
  const Read q = rows(std::move(tensors[0])), k = rows(std::move(tensors[1])), v = rows(std::move(tensors[2])),
             bounds = contiguous(std::move(tensors[3]));
  ForwardArgs args{};
  static_cast<Problem&>(args) = problem_of(q.array, k.array, v.array, bounds.array, static_cast<float>(scale));
  check_k_len(own_k_len, args.k_len);
  options.apply(args);
  Held out = empty_bshd(q.array, args.q_heads, args.q_len, args.v_dim), lse = empty(q.array.shape.data(), 3, code_f64);
  fill(args, array_of(out), array_of(lse));
  if (args.batch * args.q_heads * args.q_len > 0) run(forward, args, Direction::forward);
  stack[0] = out.value(), stack[1] = lse.value();
}

// Arguments: dout, dlse, q, k, v, bounds, out, lse, scale, options, want_dbias.
void backward_kernel(Value* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Held dout_given = in.tensor();
  std::optional<Held> dlse_given = in.optional();
  Held given[] = {in.tensor(), in.tensor(), in.tensor(), in.tensor(), in.tensor(), in.tensor()};
  const double scale = in.number();
  CallOptions options(in);
  const bool want_dbias = in.flag();
  const Read dout = rows(std::move(dout_given)), q = rows(std::move(given[0])), k = rows(std::move(given[1])),
             v = rows(std::move(given[2])), bounds = contiguous(std::move(given[3])), out = rows(std::move(given[4])),
             lse = contiguous(std::move(given[5]));
  std::optional<Read> dlse;
  if (dlse_given) dlse = contiguous(std::move(*dlse_given));
  BackwardArgs args{};
  static_cast<Problem&>(args) = problem_of(q.array, k.array, v.array, bounds.array, static_cast<float>(scale));
  options.apply(args);
  Held dq = empty_bshd(q.array, args.q_heads, args.q_len, args.head_dim),
       dk = empty_bshd(q.array, args.kv_heads, args.k_len, args.head_dim),
       dv = empty_bshd(q.array, args.kv_heads, args.k_len, args.v_dim);
  Held dbias = options.gradient_of_bias(want_dbias), dsinks = options.gradient_of_sinks();
  std::optional<Array> of_bias, of_sinks;
  if (const Array x = array_of(dbias); !x.empty()) of_bias = x;
  if (const Array x = array_of(dsinks); !x.empty()) of_sinks = x;
  fill(args, {dout.array,
              dlse ? std::optional(dlse->array) : std::nullopt,
              out.array,
              lse.array,
              array_of(dq),
              array_of(dk),
              array_of(dv),
              of_bias,
              of_sinks,
              {},
              false});
  if (lse.array.empty())  // no query, so nothing has a gradient
    for (const Held* x : {&dk, &dv, &dbias, &dsinks}) check(torch.zero(x->get()), "zero_");
  else
    run(backward, args, Direction::backward);
  Held* const results[] = {&dq, &dk, &dv, &dbias, &dsinks};
  for (size_t i = 0; i < 5; ++i) stack[i] = results[i]->value();
}

}  // namespace

void check_torch_storage(void* impl, const Array& a) {
  static const bool found = torch.get_storage_size != nullptr || look_up(torch);
  // A tensor is a pointer to its TensorImpl, and a handle points to a tensor.
  if (found) check_storage(reinterpret_cast<Handle>(&impl), a);
}

bool register_torch_operators() {
  Torch found{};
  if (!look_up(found)) return false;
  torch = found;
  constexpr uint64_t version = uint64_t{2} << 56 | uint64_t{10} << 48;  // what the functions above are of
  Library library = nullptr;                                            // lives as long as the process
  check(torch.init_library("attnspan", "CPU", __FILE__, __LINE__, &library), "init_library");
  check(torch.implement(library, "attention", &forward_kernel, version), "implementing forward");
  check(torch.implement(library, "attention_backward", &backward_kernel, version), "implementing backward");
  return true;
}

}  // namespace attnspan
