// Vectors of floats in ATen's portable types, loaded from and stored to rows of float or bfloat16.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace kvbaton {

using c10::BFloat16;
using Vec = at::vec::Vectorized<float>;
using IntVec = at::vec::Vectorized<int32_t>;

constexpr int64_t kLanes = Vec::size();

constexpr int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

inline Vec load(const float* source) {
  return Vec::loadu(source);
}

inline Vec load(const BFloat16* source) {
  Vec result;
  at::vec::load_fp32_from_bf16(source, result);
  return result;
}

// The first `count` elements, 0 < count <= kLanes; the other lanes are zero. Reads no byte past them.
template <typename T>
inline Vec load(const T* source, int64_t count) {
  if (count == kLanes) return load(source);
  T buffer[kLanes] = {};
  std::memcpy(buffer, source, count * sizeof(T));
  return load(buffer);
}

inline void store(float* target, const Vec& value, int64_t count = kLanes) {
  value.store(target, static_cast<int>(count));
}

inline void store(BFloat16* target, const Vec& value, int64_t count = kLanes) {
  // Two vectors of floats make one of bfloat16.
  const at::vec::Vectorized<BFloat16> packed = at::vec::convert_float_bfloat16(value, value);
  BFloat16 buffer[2 * kLanes];
  packed.store(buffer);
  std::memcpy(target, buffer, count * sizeof(BFloat16));
}

inline float sum(const Vec& value) {
  return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, value);
}

inline float largest(const Vec& value) {
  return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }, value);
}

// Lane i of the result is the sum of vectors[i], which are lost.
inline Vec sum_each(Vec (&vectors)[kLanes]) {
#pragma GCC unroll 8
  for (int64_t count = kLanes; count > 1; count /= 2) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < count / 2; ++i) {
      const auto [even, odd] = at::vec::deinterleave2(vectors[2 * i], vectors[2 * i + 1]);
      vectors[i] = even + odd;
    }
  }
  return vectors[0];
}

// Calls body(offset, count) for [0, size) in steps of a vector; count is kLanes but for a last, shorter step.
template <typename Body>
inline void for_each_vec(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, size - i);
}

}  // namespace kvbaton
