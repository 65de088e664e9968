// One query a sequence: each span of its context keeps a running maximum, sum and result, and spans are merged as in
// flash decoding (Dao et al., 2023).
#include <ATen/Parallel.h>

#include <cmath>

#include "attention.h"
#include "dot.h"
#include "elementwise.h"
#include "softmax.h"

namespace kvbaton {

namespace {

constexpr int64_t kTile = 64;     // tokens whose scores are kept at once
constexpr int64_t kMaxHeads = 4;  // heads of a group that read a value together
constexpr int64_t kMaxVecs = 4;   // vectors of a value that are summed together
static_assert(kTile % kLanes == 0);

// What one step of a dot product takes from a key: floats, or pairs of bfloat16 (the query is rounded to it too).
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int64_t kSize = kLanes;
  using Operand = Vec;
  static Operand read(const float* source) { return load(source); }
  static Vec add(const Vec& acc, const Operand& a, const Operand& b) { return at::vec::fmadd(a, b, acc); }
};

template <>
struct Step<BFloat16> {
  static constexpr int64_t kSize = 2 * kLanes;
  using Operand = IntVec;
  static Operand read(const BFloat16* source) { return IntVec::loadu(source); }
  static Vec add(const Vec& acc, const Operand& a, const Operand& b) { return dot_pair(acc, a, b); }
};

// Reads the last, shorter step without a byte past it.
template <typename T>
typename Step<T>::Operand read_part(const T* source, int64_t count) {
  T buffer[Step<T>::kSize] = {};
  std::memcpy(buffer, source, count * sizeof(T));
  return Step<T>::read(buffer);
}

// scores[t] = query times key t, times scale. kSteps 0: any head_dim; else it is kSteps whole steps.
template <int64_t kSteps, typename T>
void score_tile(const T* query, int64_t head_dim, float scale, const T* const* keys, int64_t num_tokens,
                float* scores) {
  using S = Step<T>;
  for (int64_t t = 0; t < num_tokens; t += kLanes) {
    Vec acc[kLanes];
#pragma GCC unroll 16
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const T* key = keys[t + lane];
      Vec total(0.0f);
      if constexpr (kSteps > 0) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < kSteps; ++i)
          total = S::add(total, S::read(query + i * S::kSize), S::read(key + i * S::kSize));
      } else {
        int64_t d = 0;
        for (; d + S::kSize <= head_dim; d += S::kSize) total = S::add(total, S::read(query + d), S::read(key + d));
        if (d < head_dim) total = S::add(total, read_part(query + d, head_dim - d), read_part(key + d, head_dim - d));
      }
      acc[lane] = total;
    }
    store(scores + t, sum_each(acc) * Vec(scale));
  }
}

template <typename T>
void score_tile(const T* query, int64_t head_dim, float scale, const T* const* keys, int64_t num_tokens,
                float* scores) {
  switch (head_dim % Step<T>::kSize ? 0 : head_dim / Step<T>::kSize) {
    case 2: return score_tile<2>(query, head_dim, scale, keys, num_tokens, scores);
    case 4: return score_tile<4>(query, head_dim, scale, keys, num_tokens, scores);
    case 8: return score_tile<8>(query, head_dim, scale, keys, num_tokens, scores);
    default: return score_tile<0>(query, head_dim, scale, keys, num_tokens, scores);
  }
}

// out[h] += sum over t of weights[h][t] times value t, over kVecs vectors of the head dimension from `d` on; of the
// last one `count` lanes.
template <int64_t kHeads, int64_t kVecs, bool kWhole, typename T>
inline void add_values(const float (&weights)[kHeads][kTile], const T* const* values, int64_t num_tokens, int64_t d,
                       int64_t head_dim, int64_t count, float* out) {
  Vec acc[kHeads][kVecs];
  for (int64_t h = 0; h < kHeads; ++h)
    for (int64_t j = 0; j < kVecs; ++j) {
      const float* source = out + h * head_dim + d + j * kLanes;
      acc[h][j] = kWhole ? load(source) : load(source, count);
    }
  for (int64_t t = 0; t < num_tokens; ++t) {
    Vec value[kVecs];
    for (int64_t j = 0; j < kVecs; ++j) {
      const T* source = values[t] + d + j * kLanes;
      value[j] = kWhole ? load(source) : load(source, count);
    }
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t j = 0; j < kVecs; ++j) acc[h][j] = at::vec::fmadd(Vec(weights[h][t]), value[j], acc[h][j]);
  }
  for (int64_t h = 0; h < kHeads; ++h)
    for (int64_t j = 0; j < kVecs; ++j) store(out + h * head_dim + d + j * kLanes, acc[h][j], kWhole ? kLanes : count);
}

// A row of keys or values is short and far from the next: processors do not see them coming.
template <typename T>
inline void prefetch_row(const T* row, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + d);
}

// The running state of kHeads heads: maximum, sum, and out (head_dim), which is not yet divided by the sum.
template <int64_t kHeads, typename T>
void run_heads(const T* queries, int64_t head_dim, float scale, int64_t row, const int32_t* slots, int64_t num_tokens,
               const T* keys, const T* values, float* maxima, float* sums, float* out) {
  std::fill_n(maxima, kHeads, kNever);
  std::fill_n(sums, kHeads, 0.0f);
  std::fill_n(out, kHeads * head_dim, 0.0f);
  for (int64_t first = 0; first < num_tokens; first += kTile) {
    const int64_t count = std::min(kTile, num_tokens - first);
    const T* tokens[kTile];
    float scores[kHeads][kTile];
    for (int64_t t = 0; t < kTile; ++t) tokens[t] = keys + slots[first + std::min(t, count - 1)] * row;
    for (int64_t t = 0; t < count; ++t) prefetch_row(values + slots[first + t] * row, head_dim);
    for (int64_t h = 0; h < kHeads; ++h)
      score_tile(queries + h * head_dim, head_dim, scale, tokens, count, scores[h]);
    for (int64_t t = first + kTile; t < std::min(first + 2 * kTile, num_tokens); ++t)
      prefetch_row(keys + slots[t] * row, head_dim);
    for (int64_t h = 0; h < kHeads; ++h) {
      const float factor = update_softmax(scores[h], count, round_up(count, kLanes), maxima[h], sums[h]);
      scale_row(out + h * head_dim, factor, head_dim);
    }
    for (int64_t t = 0; t < count; ++t) tokens[t] = values + slots[first + t] * row;
    int64_t d = 0;
    for (; d + kMaxVecs * kLanes <= head_dim; d += kMaxVecs * kLanes)
      add_values<kHeads, kMaxVecs, true>(scores, tokens, count, d, head_dim, kLanes, out);
    for (; d + kLanes <= head_dim; d += kLanes)
      add_values<kHeads, 1, true>(scores, tokens, count, d, head_dim, kLanes, out);
    if (d < head_dim) add_values<kHeads, 1, false>(scores, tokens, count, d, head_dim, head_dim - d, out);
  }
}

}  // namespace

// A span's partial result of one head: maximum, sum, result.
int64_t Attention::partial_size() const {
  return 2 + shape_.head_dim;
}

template <typename T>
void Attention::run_span(const Span& span, int64_t kv_head, const float* queries, int64_t query_stride, const T* keys,
                         const T* values, float* partial) const {
  const Sequence& sequence = sequences_[span.sequence];
  const int64_t head_dim = shape_.head_dim, row = shape_.num_kv_heads * head_dim;
  const float* source = queries + sequence.first_row * query_stride + kv_head * group_ * head_dim;
  const int32_t* slots = sequence.slots + span.begin;
  const int64_t num_tokens = span.end - span.begin;
  thread_local Buffer<T> rounded;
  thread_local Buffer<float> work;
  rounded.reserve(group_ * head_dim);
  work.reserve(kMaxHeads * (head_dim + 2));
  store_row(source, group_ * head_dim, rounded.data());
  float* out = work.data();
  float* maxima = out + kMaxHeads * head_dim;
  float* sums = maxima + kMaxHeads;
  for (int64_t head = 0; head < group_; head += kMaxHeads) {
    const int64_t num_heads = std::min(kMaxHeads, group_ - head);
    const auto run = [&]<int64_t kHeads>() {
      run_heads<kHeads>(rounded.data() + head * head_dim, head_dim, scale_, row, slots, num_tokens, keys + kv_head * head_dim,
                        values + kv_head * head_dim, maxima, sums, out);
    };
    switch (num_heads) {
      case 1: run.template operator()<1>(); break;
      case 2: run.template operator()<2>(); break;
      case 3: run.template operator()<3>(); break;
      default: run.template operator()<4>(); break;
    }
    for (int64_t h = 0; h < num_heads; ++h) {
      float* target = partial + (head + h) * partial_size();
      target[0] = maxima[h];
      target[1] = sums[h];
      std::copy_n(out + h * head_dim, head_dim, target + 2);
    }
  }
}

// partials of the spans of one sequence, each (num_heads, partial_size) -> out (num_heads, head_dim)
void Attention::merge_spans(int64_t first_span, int64_t num_spans, float* out) const {
  const int64_t stride = shape_.num_heads * partial_size();
  for (int64_t head = 0; head < shape_.num_heads; ++head) {
    const float* partials = partials_.data() + first_span * stride + head * partial_size();
    float maximum = kNever;
    for (int64_t s = 0; s < num_spans; ++s) maximum = std::max(maximum, partials[s * stride]);
    float total = 0;
    float* target = out + head * shape_.head_dim;
    std::fill_n(target, shape_.head_dim, 0.0f);
    for (int64_t s = 0; s < num_spans; ++s) {
      const float* partial = partials + s * stride;
      const float weight = std::exp(partial[0] - maximum);
      total += weight * partial[1];
      for (int64_t d = 0; d < shape_.head_dim; ++d) target[d] += weight * partial[2 + d];
    }
    for (int64_t d = 0; d < shape_.head_dim; ++d) target[d] /= total;
  }
}

template <typename T>
void Attention::run(const float* queries, int64_t query_stride, const T* keys, const T* values, float* out) {
  const int64_t num_items = static_cast<int64_t>(spans_.size()) * shape_.num_kv_heads;
  at::parallel_for(0, num_items, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t span = item / shape_.num_kv_heads, kv_head = item % shape_.num_kv_heads;
      float* partial = partials_.data() + (span * shape_.num_heads + kv_head * group_) * partial_size();
      run_span(spans_[span], kv_head, queries, query_stride, keys, values, partial);
    }
  });
  const int64_t row = shape_.num_heads * shape_.head_dim;
  for (size_t i = 0; i + 1 < first_spans_.size(); ++i) {
    const int64_t first = first_spans_[i];
    merge_spans(first, first_spans_[i + 1] - first, out + sequences_[spans_[first].sequence].first_row * row);
  }
  for (const Sequence& sequence : sequences_)
    if (sequence.num_tokens > 1) run_prefill(sequence, queries, query_stride, keys, values, out);
}

Attention::Attention(const HeadShape& shape, std::vector<Sequence> sequences)
    : shape_(shape),
      group_(shape.num_heads / shape.num_kv_heads),
      scale_(1.0f / std::sqrt(static_cast<float>(shape.head_dim))),
      sequences_(std::move(sequences)) {
  for (size_t i = 0; i < sequences_.size(); ++i) {
    if (sequences_[i].num_tokens != 1) continue;
    first_spans_.push_back(static_cast<int64_t>(spans_.size()));
    const int64_t context = sequences_[i].start + 1;
    for (int64_t begin = 0; begin < context; begin += kSpan)
      spans_.push_back({static_cast<int64_t>(i), begin, std::min(begin + kSpan, context)});
  }
  first_spans_.push_back(static_cast<int64_t>(spans_.size()));
  partials_.reserve(static_cast<int64_t>(spans_.size()) * shape_.num_heads * partial_size());
}

template void Attention::run(const float*, int64_t, const float*, const float*, float*);
template void Attention::run(const float*, int64_t, const BFloat16*, const BFloat16*, float*);

}  // namespace kvbaton
