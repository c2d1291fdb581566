// Runs one problem that it reads from standard input and writes the results to standard output, so that the tests of
// the kernel can be held against one that was compiled for another machine (under an emulator) or with sanitizers.
// tests/kernel_runner.py is the other end. Everything is little-endian:
//
//   request   Header and OptionsHeader, then bounds, q, k, v, out, lse, for a backward pass dout, dq, dk, dv, dlse, and
//             bias, sinks, seeds, q_index, k_index, dbias, dsinks: a Frame and its bytes each
//   response  Response, then the bytes of out and lse, or of dq, dk, dv and of what is there of dbias and dsinks
//
// `attnspan_run_problem levels` prints the machine, the instruction-set level in use and all that it could use;
// `attnspan_run_problem blocks DIRECTION DTYPE`, both as numbers, prints what a configuration may choose.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../csrc/attention.h"
#include "../../csrc/threads.h"

using namespace attnspan;

namespace {

struct Header {
  int64_t is_backward, dtype, batch, q_heads, kv_heads, q_len, k_len, head_dim, v_dim, runs, bounds_batches,
      bounds_heads, threads, config_block_q, config_block_k, config_threads;
  double scale;
};

struct OptionsHeader {
  int64_t bias_kind, bias_dtype, bias_extents[4], dropout_threshold, seeds_per_head, q_index_rows, k_index_rows;
  double softcap;
};

// Before the bytes of an array: how many, and its strides in elements. An absent array has -1 bytes.
struct Frame {
  int64_t bytes, batch, head, row;
};

enum class Outcome : int64_t { ok, bad_bounds, bad_config };

struct Response {
  Outcome outcome;
  int64_t batch, head, row;
};

#if defined(__aarch64__)
constexpr const char* machine = "aarch64";
#elif defined(__x86_64__)
constexpr const char* machine = "x86_64";
#else
constexpr const char* machine = "another machine";
#endif

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::exit(1);
}

void read_bytes(void* to, size_t bytes) {
  if (bytes > 0 && std::fread(to, bytes, 1, stdin) != 1) fail("the request ends before its last array");
}

void write_bytes(const void* from, size_t bytes) {
  if (bytes > 0 && std::fwrite(from, bytes, 1, stdout) != 1) fail("the response cannot be written");
}

template <class T>
T read_value() {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  read_bytes(&value, sizeof value);
  return value;
}

// A heap block of exactly the bytes that the strides reach: a sanitizer sees a step beyond it.
struct Array {
  std::vector<char> bytes;
  Tensor tensor;
  bool present;

  static Array read() {
    const Frame frame = read_value<Frame>();
    Array a{std::vector<char>(frame.bytes < 0 ? 0 : static_cast<size_t>(frame.bytes)), {}, frame.bytes >= 0};
    read_bytes(a.bytes.data(), a.bytes.size());
    a.tensor = {a.bytes.data(), frame.batch, frame.head, frame.row};
    return a;
  }
  void write() const { write_bytes(bytes.data(), bytes.size()); }
  template <class T>
  T* items() {
    return present ? reinterpret_cast<T*>(bytes.data()) : nullptr;
  }
};

void fill(Problem& p, const Header& h, Array& bounds, const Array& q, const Array& k, const Array& v) {
  p.dtype = static_cast<Dtype>(h.dtype);
  p.batch = h.batch, p.q_heads = h.q_heads, p.kv_heads = h.kv_heads, p.q_len = h.q_len, p.k_len = h.k_len;
  p.head_dim = h.head_dim, p.v_dim = h.v_dim, p.runs = h.runs, p.scale = static_cast<float>(h.scale);
  const int64_t slice = h.q_len * h.runs * 2;
  p.bounds = {bounds.items<int32_t>(), h.bounds_batches == 1 ? 0 : h.bounds_heads * slice,
              h.bounds_heads == 1 ? 0 : slice, h.bounds_batches, h.bounds_heads};
  p.q = q.tensor, p.k = k.tensor, p.v = v.tensor;
  p.config = {h.config_block_q, h.config_block_k, h.config_threads};
}

// What options point to.
struct OptionArrays {
  Array bias = Array::read(), sinks = Array::read(), seeds = Array::read(), q_index = Array::read(),
        k_index = Array::read(), dbias = Array::read(), dsinks = Array::read();
};

Bias bias_of(const Problem& p, const OptionsHeader& h, OptionArrays& arrays) {
  Bias b{static_cast<BiasKind>(h.bias_kind), arrays.bias.items<char>(), static_cast<Dtype>(h.bias_dtype)};
  const auto [first, second, third, last] = h.bias_extents;
  static_cast<void>(last);
  switch (b.kind) {
    case BiasKind::none:
      break;
    case BiasKind::distance:
      b.batches = 1, b.heads = p.q_heads, b.rows = 1, b.head = second, b.reach = second / 2;
      break;
    case BiasKind::dense:
      b.batches = first, b.heads = second, b.rows = third;
      b.batch = first == 1 ? 0 : arrays.bias.tensor.batch, b.head = second == 1 ? 0 : arrays.bias.tensor.head;
      b.row = third == 1 ? 0 : arrays.bias.tensor.row;
      break;
    default:
      b.batches = first, b.heads = p.q_heads, b.rows = 1, b.batch = first == 1 ? 0 : p.q_heads, b.head = 1;
  }
  return b;
}

void fill_options(Problem& p, const OptionsHeader& h, OptionArrays& arrays) {
  Options& o = p.options;
  o.softcap = static_cast<float>(h.softcap);
  o.bias = bias_of(p, h, arrays);
  o.sinks = arrays.sinks.items<float>();
  o.dropout = {static_cast<uint32_t>(h.dropout_threshold), arrays.seeds.items<int64_t>(), h.seeds_per_head != 0};
  o.q_index = {arrays.q_index.items<int32_t>(), h.q_index_rows == 1 ? 0 : p.q_len};
  o.k_index = {arrays.k_index.items<int32_t>(), h.k_index_rows == 1 ? 0 : p.k_len};
}

BiasGradient gradient_of(const Problem& p, OptionArrays& arrays) {
  const Bias& bias = p.options.bias;
  float* data = arrays.dbias.items<float>();
  if (bias.kind != BiasKind::dense) return {data, bias.batch, bias.head, 0};
  const int64_t head = bias.rows * p.k_len;
  return {data, bias.batches == 1 ? 0 : bias.heads * head, bias.heads == 1 ? 0 : head, bias.rows == 1 ? 0 : p.k_len};
}

// The kernel treats subnormals as zero while it runs; whoever called it must find his own again.
void check_subnormals() {
  volatile float tiny = 1e-40f, one = 1.0f;
  if (tiny * one == 0.0f) fail("the kernel left float subnormals flushed to zero");
}

Outcome outcome_of(Status status) {
  switch (status) {
    case Status::ok:
      return Outcome::ok;
    case Status::bad_bounds:
      return Outcome::bad_bounds;
    case Status::bad_config:
      return Outcome::bad_config;
    case Status::out_of_memory:
      fail("out of memory");
  }
  fail("unknown status");
}

void run() {
  const Header header = read_value<Header>();
  const OptionsHeader options = read_value<OptionsHeader>();
  Array bounds = Array::read(), q = Array::read(), k = Array::read(), v = Array::read(), out = Array::read(),
        lse = Array::read();
  const Parallel parallel = make_parallel(static_cast<int>(header.threads));
  std::vector<Array> results;
  Result result;
  if (header.is_backward == 0) {
    ForwardArgs args{};
    fill(args, header, bounds, q, k, v);
    OptionArrays arrays;
    fill_options(args, options, arrays);
    args.out = out.tensor, args.lse = lse.items<float>();
    result = forward(args, isa_active(), parallel);
    results.push_back(std::move(out));
    results.push_back(std::move(lse));
  } else {
    Array dout = Array::read();
    for (int i = 0; i < 3; ++i) results.push_back(Array::read());
    Array dlse = Array::read();
    BackwardArgs args{};
    fill(args, header, bounds, q, k, v);
    OptionArrays arrays;
    fill_options(args, options, arrays);
    args.dbias = gradient_of(args, arrays), args.dsinks = arrays.dsinks.items<float>();
    args.out = out.tensor, args.lse = lse.items<float>(), args.dout = dout.tensor, args.dlse = dlse.items<float>();
    args.dq = results[0].tensor, args.dk = results[1].tensor, args.dv = results[2].tensor;
    result = backward(args, isa_active(), parallel);
    for (Array* x : {&arrays.dbias, &arrays.dsinks})
      if (x->present) results.push_back(std::move(*x));
  }
  check_subnormals();
  const Response response{outcome_of(result.status), result.bad.batch, result.bad.head, result.bad.row};
  write_bytes(&response, sizeof response);
  for (const Array& array : results) array.write();
}

void print_levels() {
  std::printf("%s %s", machine, isa_name(isa_active()));
  for (int i = 0; i < isa_levels; ++i)
    if (isa_supported(static_cast<Isa>(i))) std::printf(" %s", isa_name(static_cast<Isa>(i)));
  std::printf("\n");
}

void print_blocks(const char* direction, const char* dtype) {
  const Blocks b =
      blocks_of(static_cast<Direction>(std::atoi(direction)), static_cast<Dtype>(std::atoi(dtype)), isa_active());
  const auto number = [](int64_t n) { return static_cast<long long>(n); };
  std::printf("%lld %lld %lld %lld %d\n", number(b.q.step), number(b.q.most), number(b.k.step), number(b.k.most),
              b.square);
}

}  // namespace

int main(int argc, char** argv) {
  if (const char* error = isa_request_error()) fail(error);
  if (argc == 1) return run(), 0;
  if (argc == 2 && std::strcmp(argv[1], "levels") == 0) return print_levels(), 0;
  if (argc == 4 && std::strcmp(argv[1], "blocks") == 0) return print_blocks(argv[2], argv[3]), 0;
  fail("expected no arguments, `levels`, or `blocks DIRECTION DTYPE`");
}
