// What a layer does between its products, one row at a time.
#pragma once

#include <cmath>

#include "vec.h"

namespace kvbaton {

// x (size,) over its root mean square, times weight (Zhang and Sennrich, 2019).
inline void rms_norm(const float* x, const float* weight, float epsilon, int64_t size, float* out) {
  Vec squares(0.0f);
  for_each_vec(size, [&](int64_t i, int64_t n) {
    const Vec value = load(x + i, n);
    squares = at::vec::fmadd(value, value, squares);
  });
  const Vec factor(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + epsilon));
  for_each_vec(size, [&](int64_t i, int64_t n) { store(out + i, load(x + i, n) * factor * load(weight + i, n), n); });
}

// gate times its sigmoid, times up.
inline void silu_mul(const float* gate, const float* up, int64_t size, float* out) {
  for_each_vec(size, [&](int64_t i, int64_t n) {
    const Vec x = load(gate + i, n);
    store(out + i, x / (Vec(1.0f) + x.neg().exp_u20()) * load(up + i, n), n);
  });
}

// Rotates head (2 * half,) in place: pairs are (i, i + half), as in Hugging Face checkpoints. cos, sin (half,).
inline void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for_each_vec(half, [&](int64_t i, int64_t n) {
    const Vec a = load(head + i, n), b = load(head + half + i, n), c = load(cos + i, n), s = load(sin + i, n);
    store(head + i, a * c - b * s, n);
    store(head + half + i, b * c + a * s, n);
  });
}

template <typename T>
inline void convert_row(const T* source, int64_t size, float* out) {
  for_each_vec(size, [&](int64_t i, int64_t n) { store(out + i, load(source + i, n), n); });
}

inline void store_row(const float* source, int64_t size, float* out) {
  std::memcpy(out, source, size * sizeof(float));
}

inline void store_row(const float* source, int64_t size, BFloat16* out) {
  for_each_vec(size, [&](int64_t i, int64_t n) { store(out + i, load(source + i, n), n); });
}

}  // namespace kvbaton
