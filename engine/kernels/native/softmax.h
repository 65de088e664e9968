// A softmax over scores that come in blocks (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
#pragma once

#include <cmath>
#include <limits>

#include "vec.h"

namespace kvbaton {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Turns a block of scores into weights relative to the maximum so far. Only the first `num_keys` >= 1 count; the rest
// of `width`, whole vectors, becomes zero. Returns the factor for everything that was summed before.
inline float update_softmax(float* scores, int64_t num_keys, int64_t width, float& maximum, float& total) {
  std::fill(scores + num_keys, scores + width, kNever);
  Vec best(maximum);
  for (int64_t t = 0; t < width; t += kLanes) best = at::vec::maximum(best, load(scores + t));
  const float new_maximum = largest(best);
  Vec added(0.0f);
  for (int64_t t = 0; t < width; t += kLanes) {
    const Vec weight = (load(scores + t) - Vec(new_maximum)).exp_u20();
    store(scores + t, weight);
    added = added + weight;
  }
  const float factor = std::exp(maximum - new_maximum);
  maximum = new_maximum;
  total = total * factor + sum(added);
  return factor;
}

inline void scale_row(float* row, float factor, int64_t size) {
  if (factor == 1.0f) return;
  for_each_vec(size, [&](int64_t i, int64_t n) { store(row + i, load(row + i, n) * Vec(factor), n); });
}

}  // namespace kvbaton
