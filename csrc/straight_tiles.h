// The two products of a few query rows with the keys and values of a block, on matrix tiles. Keys are the rows of A,
// where they lie: only queries are packed, once. Element for element the same sums as products of packed keys.
#pragma once

#include "pack.h"

namespace attnspan::ATTNSPAN_ISA {

// What is packed at once: a step of keys, or some columns of a block of values. Up to 128 dims it stays in L1.
template <class E>
struct StraightRoom {
  static constexpr int64_t off = panel * E::pair;  // planes and panels lie off powers of two
  static constexpr int64_t columns = E::pieces == 1 ? 64 : 32;
  static constexpr int64_t key_plane(int64_t depth) { return key_step * depth + off; }
  static constexpr int64_t value_panel(int64_t block) { return block * panel + off; }
  static constexpr int64_t value_plane(int64_t block) { return columns / panel * value_panel(block); }
};

template <class T, class E>
class StraightTiles : StraightRoom<E> {
  using C = typename E::Element;
  using Pack = PackerFor<T, E>;
  using Place = typename Lines<T>::Place;
  using StraightRoom<E>::columns;
  static constexpr int64_t step = key_step, half = step / 2;

 public:
  // Panels of rows that are packed as A.
  static void queries(Side<C> rows, int64_t count, Target<C> panels) {
    for (int piece = 0; piece < E::pieces; ++piece)
      Packer<C, C>::keys(rows.data + piece * rows.plane, rows.stride, count, rows.stride,
                         {panels.data + piece * panels.plane}, rows.stride * panel, 0, round_up(count, panel),
                         rows.stride);
  }

  // A block of keys and values, `valid` of those before `end`. `copies` has room for a step of rows that lie in pieces.
  StraightTiles(const KeyValues<T>& x, int64_t key, int64_t valid, int64_t end, T* copies)
      : x_(x), key_(key), valid_(valid), end_(end), copies_(copies) {}

  // The scores of `rows` queries.
  void scores(Side<C> queries, int64_t depth, int64_t rows, float* s, int64_t lds, C* room) const {
    alignas(64) float turned[step * step];
    for (int64_t i = 0; i < valid_; i += step) {
      const Keys keys = rows_of_a(i, depth, room);
      for (int64_t m = 0; m < rows; m += step) {
        const int64_t count = min(step, rows - m);
        for (int64_t n = 0; n < step; n += keys.rows)
          E::template product<(E::pieces > 1)>(keys.part[n / half], queries.from(m * depth), turned + n * step, step,
                                               keys.rows, round_up(count, panel), depth, false);
        for (int64_t r = 0; r < count; r += 4)
          for (int64_t j = 0; j < step; j += Vec::width) {
            Vec row[4];
            load_units(turned + j * step + r, step * 4, row);
            for (int64_t n = 0; n < 4; ++n) store(s + (m + r + n) * lds + i + j, row[n]);
          }
      }
    }
  }

  // Adds weights times values to `cols` columns of `out`. `block`: the most keys that there are.
  void values(Side<C> weights, int64_t rows, int64_t block, float* out, int64_t cols, C* room) const {
    const int64_t n = round_up(valid_, step), size = this->value_panel(block), plane = this->value_plane(block);
    for (int64_t d = 0; d < cols; d += columns) {
      const int64_t count = min(columns, cols - d);
      for (int64_t i = 0; i < n; i += step) pack_values(i, d, count, {room + i * panel, plane}, size);
      E::product(weights, {room, size, plane}, out + d, cols, round_up(rows, E::rows), count, n, true);
    }
  }

 private:
  // A step of rows in two halves of a tile's 16 rows: a page may hold no more. What lies in smaller pieces is copied.
  struct Halves {
    Place of[2];
    bool together;
  };
  Halves halves_of(const Lines<T>& x, int64_t i, int64_t dim) const {
    const int64_t row = key_ + i, valid = min(step, valid_ - i);
    if (valid == step && x.run(row, step) < step)
      return {{x.together(row, half, dim, copies_), x.together(row + half, half, dim, copies_ + half * dim)}, false};
    const Place all = x.together(row, valid, dim, copies_);
    return {{all, {all.data + half * all.stride, all.stride}}, true};
  }

  // A step of keys as rows of A. What is split, incomplete or no multiple of a tile's depth cannot stay where it is.
  struct Keys {
    Side<C> part[2];
    int64_t rows;  // of a part
  };
  Keys rows_of_a(int64_t i, int64_t depth, C* room) const {
    const int64_t valid = min(step, valid_ - i), plane = this->key_plane(depth);
    const Halves k = halves_of(x_.k, i, x_.dim);
    const bool complete = valid == step && x_.dim == depth;
    if constexpr (E::pieces == 1) {
      if (complete) return {{{k.of[0].data, k.of[0].stride}, {k.of[1].data, k.of[1].stride}}, k.together ? step : half};
    } else if (complete) {
      Place soon = rows_later(x_.k, x_.dim, i, 0, k.of[0].data);
      for (int64_t h = 0; h < 2; ++h, soon.data += half * soon.stride)
        split_keys(k.of[h], depth, {room + h * half * depth, plane}, soon);
      return {{{room, depth, plane}}, step};
    } else {
      ask(x_.k, x_.dim, i, 0);
    }
    for (int64_t h = 0; h < 2; ++h)
      Pack::rows(k.of[h].data, k.of[h].stride, valid - h * half, x_.dim, {room + h * half * depth, plane}, depth, half,
                 false);
    return {{{room, depth, plane}}, step};
  }
  static void split_keys(Place k, int64_t depth, Target<C> to, Place soon) {
    for (int64_t r = 0; r < half; ++r, k.data += k.stride, soon.data += soon.stride)
      for (int64_t d = 0; d < depth; d += 32, to.data += 32) {
        fetch<32>(soon.data + d);
        E::store_group(to.data, 0, to.plane, load(k.data + d), load(k.data + d + panel));
      }
  }

  // Columns [d, d + cols) of a step of values.
  void pack_values(int64_t i, int64_t d, int64_t cols, Target<C> to, int64_t size) const {
    const int64_t valid = min(step, valid_ - i), dim = x_.v_dim - d, width = min(columns, dim);
    Lines<T> values = x_.v;
    values.data += d;
    if (valid < step || dim < columns) {
      ask(x_.v, x_.v_dim, i, d);
      if (E::pieces == 1) ask(x_.k, x_.dim, i, d);
      const Place v = values.together(key_ + i, valid, width, copies_);
      return Pack::dims(v.data, v.stride, valid, width, to, size, 0, step, cols);
    }
    const Halves v = halves_of(values, i, columns);
    Place soon = rows_later(x_.v, x_.v_dim, i, d, v.of[0].data);
    if constexpr (E::pieces == 1) {
      // Keys are read by tiles in place, which fetch nothing: later ones are asked for here.
      Place keys = rows_later(x_.k, x_.dim, i, d, v.of[0].data);
      for (const Place& rows : v.of) {
        const T* row = rows.data;
        for (int64_t r = 0; r < half; r += 2, row += 2 * rows.stride, to.data += 2 * panel) {
          for (Place* x : {&soon, &keys})
            for (int64_t n = 0; n < 2; ++n, x->data += x->stride) fetch<columns>(x->data);
          Pack::whole_dims(row, rows.stride, columns, to.data, size);
        }
      }
    } else {
      const T *x = v.of[0].data, *y = v.of[1].data;
      for (int64_t r = 0; r < half; ++r, x += v.of[0].stride, y += v.of[1].stride, to.data += 2 * panel) {
        fetch<columns>(soon.data), fetch<columns>(soon.data + half * soon.stride);
        soon.data += soon.stride;
#pragma GCC unroll 2
        for (int64_t c = 0; c < columns; c += panel)
          E::store_line(to.data + c / panel * size, to.plane, {load(x + c), load(y + c)});
      }
    }
  }

  // Where columns from d on of the step of rows lie that is wanted later. Its lines are asked for one by one while
  // others are packed, since a core waits for few at a time. If it does not lie in one piece it is asked for at once,
  // and `other` takes its place, which is near.
  Place rows_later(const Lines<T>& x, int64_t dim, int64_t i, int64_t d, const T* other) const {
    const int64_t from = later(i, dim);
    if (from + step <= end_ && d < dim && x.run(from, step) == step) return {x.at(from) + d, x.stride};
    ask(x, dim, i, d);
    return {other, 0};
  }
  // The same columns at once; all of them if keys are split, which is done for all together.
  void ask(const Lines<T>& x, int64_t dim, int64_t i, int64_t d) const {
    const int64_t from = later(i, dim), last = &x == &x_.k && E::pieces > 1 ? dim : min(dim, d + columns);
    if (from >= end_) return;
    x.each_run(from, min(from + step, end_), [&](int64_t, int64_t n, const T* row) {
      for (int64_t r = 0; r < n; ++r, row += x.stride)
        for (int64_t at = d; at < last; at += 32) fetch<32>(row + at);
    });
  }
  int64_t later(int64_t i, int64_t dim) const {
    constexpr int64_t bytes = int64_t{1} << 15;
    return key_ + i + bytes / (dim * static_cast<int64_t>(sizeof(T)));
  }
  template <int64_t n>
  static void fetch(const T* p) {
    constexpr int64_t line = 64 / sizeof(T);
#pragma GCC unroll 4
    for (int64_t d = 0; d < n; d += line) __builtin_prefetch(p + d, 0, 2);  // not for L1, which is in use
  }

  const KeyValues<T>& x_;
  const int64_t key_, valid_, end_;
  T* const copies_;
};

}  // namespace attnspan::ATTNSPAN_ISA
