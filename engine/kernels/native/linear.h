// Linear layers over weights packed once, at load: x (rows, num_in) times w (num_out, num_in) transposed.
//
// Weights lie in panels of kPanel outputs, inputs innermost in the units that one instruction takes:
//
//     float       (panel, num_in, kPanel)
//     bfloat16    (panel, num_in / 2, kPanel, 2)
//     int8        (panel, num_in / 4, kPanel, 4), one scale an output; activations are quantised row by row in groups
//                 of kGroup inputs, each with a scale of its own, which keeps one outlier from costing the whole row
//                 its precision
//
// A row's result depends on that row alone, bit by bit: every sum runs over the inputs in one order, whatever the
// number of rows or threads.
#pragma once

#include <type_traits>

#include "buffer.h"
#include "dot.h"
#include "vec.h"

namespace kvbaton {

enum class Format { kFloat, kBFloat16, kInt8 };

// Registers: kTileRows * kPanelVecs accumulators, kPanelVecs weights and one activation fit 32 (16 on AVX2).
constexpr int64_t kPanelVecs = kLanes == 8 ? 2 : 4;
constexpr int64_t kPanel = kPanelVecs * kLanes;
constexpr int64_t kTileRows = 6;
constexpr int64_t kInt8TileRows = kLanes == 8 ? 3 : 4;  // integer sums and their floats at once
constexpr int64_t kGroup = 64;

// Activations as the products of one format read them.
class Rows {
 public:
  // Room for `num_rows` rows; their content is set by `encode`.
  void reset(Format format, int64_t num_rows, int64_t num_in);
  void encode(int64_t row, const float* values);

  Format format = Format::kFloat;
  int64_t num_rows = 0;
  int64_t num_in = 0;
  int64_t stride = 0;      // elements from row to row
  int64_t num_groups = 0;  // int8 only
  Buffer<float> floats;
  Buffer<BFloat16> halves;
  Buffer<int8_t> bytes;
  Buffer<float> scales;      // (num_rows, num_groups)
  Buffer<int32_t> offsets;   // (num_rows, num_groups): -128 times the sum of the group, as weights are stored + 128
};

enum class Store { kSet, kAdd };

class PackedLinear {
 public:
  // weight (num_out, num_in), contiguous; bias (num_out,) or null. Both are copied.
  template <typename T>
  PackedLinear(Format format, const T* weight, const float* bias, int64_t num_out, int64_t num_in);

  // out[r * out_stride + o] = or += row r times the weights of o (+ bias). `rows` is of this format.
  void multiply(const Rows& rows, float* out, int64_t out_stride, Store mode) const;

  int64_t num_bytes() const;

  const Format format;
  const int64_t num_out;
  const int64_t num_in;

 private:
  template <typename T>
  void pack_panel(int64_t panel, const T* weight);
  void multiply_panel(int64_t panel, const Rows& rows, float* out, int64_t out_stride, Store mode) const;

  Weights<float> floats_;
  Weights<BFloat16> halves_;
  Weights<uint8_t> bytes_;
  Weights<float> scales_;
  Weights<float> bias_;
};

// Inputs that one instruction takes of a row and of a panel: one float, or a pair of bfloat16. Panels hold
// (depth / unit, kPanel, unit) elements, of which this is the index.
template <typename T>
constexpr int64_t kUnit = std::is_same_v<T, float> ? 1 : 2;

constexpr int64_t panel_index(int64_t k, int64_t lane, int64_t unit) {
  return (k / unit * kPanel + lane) * unit + k % unit;
}

// Adds a (kRows, depth) times one panel to acc, for attention as for linear layers. depth: whole units.
template <int64_t kRows>
inline __attribute__((always_inline)) void add_products(
    const float* a, int64_t a_stride, const float* panel, int64_t depth, Vec (&acc)[kRows][kPanelVecs]) {
  for (int64_t k = 0; k < depth; ++k) {
    Vec w[kPanelVecs];
    for (int64_t j = 0; j < kPanelVecs; ++j) w[j] = load(panel + k * kPanel + j * kLanes);
    for (int64_t r = 0; r < kRows; ++r) {
      const Vec x(a[r * a_stride + k]);
      for (int64_t j = 0; j < kPanelVecs; ++j) acc[r][j] = at::vec::fmadd(x, w[j], acc[r][j]);
    }
  }
}

template <int64_t kRows>
inline __attribute__((always_inline)) void add_products(
    const BFloat16* a, int64_t a_stride, const BFloat16* panel, int64_t depth, Vec (&acc)[kRows][kPanelVecs]) {
  for (int64_t k = 0; k < depth; k += 2) {
    IntVec w[kPanelVecs];
    for (int64_t j = 0; j < kPanelVecs; ++j) w[j] = IntVec::loadu(panel + k * kPanel + 2 * j * kLanes);
    for (int64_t r = 0; r < kRows; ++r) {
      const IntVec pair(read_int(a + r * a_stride + k));
      for (int64_t j = 0; j < kPanelVecs; ++j) acc[r][j] = dot_pair(acc[r][j], w[j], pair);
    }
  }
}

// Calls body.template operator()<rows>(first_row) over tiles of at most `max_rows` <= 6 rows, as even as they go.
template <typename Body>
inline void for_each_tile(int64_t num_rows, int64_t max_rows, const Body& body) {
  const int64_t num_tiles = (num_rows + max_rows - 1) / max_rows;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = num_rows * tile / num_tiles;
    switch (num_rows * (tile + 1) / num_tiles - first) {
      case 1: body.template operator()<1>(first); break;
      case 2: body.template operator()<2>(first); break;
      case 3: body.template operator()<3>(first); break;
      case 4: body.template operator()<4>(first); break;
      case 5: body.template operator()<5>(first); break;
      default: body.template operator()<6>(first); break;
    }
  }
}

}  // namespace kvbaton
