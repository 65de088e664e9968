#include "linear.h"

#include <ATen/Parallel.h>

#include <cmath>

namespace kvbaton {

namespace {

int64_t inputs_a_unit(Format format) {
  return format == Format::kFloat ? 1 : format == Format::kBFloat16 ? 2 : kGroup;
}

float magnitude(const float* values, int64_t count) {
  Vec most(0.0f);
  for_each_vec(count, [&](int64_t i, int64_t n) { most = at::vec::maximum(most, load(values + i, n).abs()); });
  return largest(most);
}

void quantize_group(const float* values, int64_t count, int8_t* bytes, float& scale, int32_t& offset) {
  const float most = magnitude(values, count);
  scale = most / 127;
  const float inverse = most > 0 ? 127 / most : 0;
  int32_t rounded[kGroup] = {};
  for_each_vec(count, [&](int64_t i, int64_t n) {
    at::vec::convert<int32_t>((load(values + i, n) * Vec(inverse)).round()).store(rounded + i, static_cast<int>(n));
  });
  int32_t total = 0;
  for (int64_t i = 0; i < kGroup; ++i) {
    bytes[i] = static_cast<int8_t>(rounded[i]);
    total += rounded[i];
  }
  offset = -128 * total;
}

template <int64_t kRows>
using Accumulators = Vec[kRows][kPanelVecs];

// One group of inputs: integer sums, scaled into acc.
template <int64_t kRows>
inline __attribute__((always_inline)) void add_group(
    const int8_t* a, int64_t a_stride, const float* scales, const int32_t* offsets, int64_t num_groups,
    const uint8_t* panel, Accumulators<kRows>& acc) {
  IntVec sums[kRows][kPanelVecs];
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t j = 0; j < kPanelVecs; ++j) sums[r][j] = IntVec(offsets[r * num_groups]);
  for (int64_t k = 0; k < kGroup; k += 4) {
    IntVec w[kPanelVecs];
    for (int64_t j = 0; j < kPanelVecs; ++j) w[j] = IntVec::loadu(panel + k * kPanel + 4 * j * kLanes);
    for (int64_t r = 0; r < kRows; ++r) {
      const int32_t quad = read_int(a + r * a_stride + k);
      for (int64_t j = 0; j < kPanelVecs; ++j) sums[r][j] = dot_quad(sums[r][j], w[j], quad);
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    const Vec scale(scales[r * num_groups]);
    for (int64_t j = 0; j < kPanelVecs; ++j)
      acc[r][j] = at::vec::fmadd(at::vec::convert<float>(sums[r][j]), scale, acc[r][j]);
  }
}

}  // namespace

void Rows::reset(Format new_format, int64_t new_num_rows, int64_t new_num_in) {
  format = new_format;
  num_rows = new_num_rows;
  num_in = new_num_in;
  stride = round_up(num_in, inputs_a_unit(format));
  num_groups = stride / kGroup;
  switch (format) {
    case Format::kFloat: floats.reserve(num_rows * stride); break;
    case Format::kBFloat16: halves.reserve(num_rows * stride); break;
    case Format::kInt8:
      bytes.reserve(num_rows * stride);
      scales.reserve(num_rows * num_groups);
      offsets.reserve(num_rows * num_groups);
      break;
  }
}

void Rows::encode(int64_t row, const float* values) {
  switch (format) {
    case Format::kFloat:
      std::memcpy(floats.data() + row * stride, values, num_in * sizeof(float));
      break;
    case Format::kBFloat16: {
      BFloat16* target = halves.data() + row * stride;
      for_each_vec(num_in, [&](int64_t i, int64_t count) { store(target + i, load(values + i, count), count); });
      if (stride > num_in) target[num_in] = BFloat16(0.0f);
      break;
    }
    case Format::kInt8:
      for (int64_t g = 0; g < num_groups; ++g)
        quantize_group(
            values + g * kGroup, std::min(kGroup, num_in - g * kGroup), bytes.data() + row * stride + g * kGroup,
            scales.data()[row * num_groups + g], offsets.data()[row * num_groups + g]);
      break;
  }
}

template <typename T>
PackedLinear::PackedLinear(Format f, const T* weight, const float* bias, int64_t rows, int64_t columns)
    : format(f), num_out(rows), num_in(columns) {
  const int64_t num_panels = round_up(num_out, kPanel) / kPanel;
  const int64_t size = num_panels * kPanel * round_up(num_in, inputs_a_unit(format));
  switch (format) {
    case Format::kFloat: floats_ = Weights<float>(size); break;
    case Format::kBFloat16: halves_ = Weights<BFloat16>(size); break;
    case Format::kInt8:
      bytes_ = Weights<uint8_t>(size);
      scales_ = Weights<float>(num_panels * kPanel);
      break;
  }
  at::parallel_for(0, num_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) pack_panel(panel, weight);
  });
  if (bias != nullptr) {
    bias_ = Weights<float>(num_panels * kPanel);
    std::fill_n(bias_.data(), num_panels * kPanel, 0.0f);
    std::copy_n(bias, num_out, bias_.data());
  }
}

template <typename T>
void PackedLinear::pack_panel(int64_t panel, const T* weight) {
  const int64_t depth = round_up(num_in, inputs_a_unit(format));
  const int64_t unit = format == Format::kFloat ? 1 : format == Format::kBFloat16 ? 2 : 4;
  Buffer<float> row(depth);
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    const int64_t out = panel * kPanel + lane;
    std::fill_n(row.data(), depth, 0.0f);
    if (out < num_out)
      for (int64_t k = 0; k < num_in; ++k) row.data()[k] = static_cast<float>(weight[out * num_in + k]);
    float inverse = 0;
    if (format == Format::kInt8) {
      const float most = magnitude(row.data(), num_in);
      scales_.data()[out] = most / 127;
      inverse = most > 0 ? 127 / most : 0;
    }
    for (int64_t k = 0; k < depth; ++k) {
      const int64_t at = panel * kPanel * depth + panel_index(k, lane, unit);
      const float value = row.data()[k];
      switch (format) {
        case Format::kFloat: floats_.data()[at] = value; break;
        case Format::kBFloat16: halves_.data()[at] = BFloat16(value); break;
        case Format::kInt8: bytes_.data()[at] = static_cast<uint8_t>(128 + std::lrint(value * inverse)); break;
      }
    }
  }
}

template PackedLinear::PackedLinear(Format, const float*, const float*, int64_t, int64_t);
template PackedLinear::PackedLinear(Format, const BFloat16*, const float*, int64_t, int64_t);

int64_t PackedLinear::num_bytes() const {
  return 4 * (floats_.size() + scales_.size() + bias_.size()) + 2 * halves_.size() + bytes_.size();
}

void PackedLinear::multiply(const Rows& rows, float* out, int64_t out_stride, Store mode) const {
  const int64_t num_panels = round_up(num_out, kPanel) / kPanel;
  // Not worth a second thread below about 100,000 products.
  const int64_t grain = std::max<int64_t>(1, 100000 / std::max<int64_t>(1, rows.num_rows * num_in * kPanel));
  at::parallel_for(0, num_panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) multiply_panel(panel, rows, out, out_stride, mode);
  });
}

void PackedLinear::multiply_panel(int64_t panel, const Rows& rows, float* out, int64_t out_stride, Store mode) const {
  const int64_t depth = rows.stride;
  const int64_t start = panel * kPanel * depth;
  const int64_t columns = std::min(kPanel, num_out - panel * kPanel);
  const int64_t max_rows = format == Format::kInt8 ? kInt8TileRows : kTileRows;
  for_each_tile(rows.num_rows, max_rows, [&]<int64_t kRows>(int64_t first) {
    Accumulators<kRows> acc;
    for (auto& row : acc)
      for (Vec& value : row) value = Vec(0.0f);
    if (format == Format::kFloat) {
      add_products<kRows>(rows.floats.data() + first * depth, depth, floats_.data() + start, depth, acc);
    } else if (format == Format::kBFloat16) {
      add_products<kRows>(rows.halves.data() + first * depth, depth, halves_.data() + start, depth, acc);
    } else {
      for (int64_t g = 0; g < rows.num_groups; ++g)
        add_group<kRows>(
            rows.bytes.data() + first * depth + g * kGroup, depth, rows.scales.data() + first * rows.num_groups + g,
            rows.offsets.data() + first * rows.num_groups + g, rows.num_groups,
            bytes_.data() + start + g * kGroup * kPanel, acc);
    }
    for (int64_t j = 0; j * kLanes < columns; ++j) {
      const int64_t column = panel * kPanel + j * kLanes;
      const int64_t count = std::min(kLanes, columns - j * kLanes);
      for (int64_t r = 0; r < kRows; ++r) {
        float* target = out + (first + r) * out_stride + column;
        Vec value = acc[r][j];
        if (scales_.size()) value = value * load(scales_.data() + column);
        if (bias_.size()) value = value + load(bias_.data() + column);
        if (mode == Store::kAdd) value = value + load(target, count);
        store(target, value, count);
      }
    }
  });
}

}  // namespace kvbaton
