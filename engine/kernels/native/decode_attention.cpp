// One query a sequence: each span keeps a running maximum, sum and result (Milakov and Gimelshein, Online normalizer
// calculation for softmax, 2018), and spans are merged as in flash decoding.
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "attention.h"

namespace kvbaton {

namespace {

constexpr int64_t kTile = 64;       // tokens whose scores are kept at once
constexpr int64_t kMaxHeads = 4;    // heads of a group that read a key together
constexpr int64_t kMaxVecs = 4;     // vectors of a value that are summed together

// scores[h][t] = query h times key t.
template <int64_t kHeads, typename T>
void score_tile(const float* queries, int64_t head_dim, const T* const* keys, int64_t num_tokens,
                float (&scores)[kHeads][kTile]) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    Vec acc[kHeads];
    for (auto& value : acc) value = Vec(0.0f);
    for_each_vec(head_dim, [&](int64_t d, int64_t count) {
      const Vec key = load(keys[t] + d, count);
      for (int64_t h = 0; h < kHeads; ++h)
        acc[h] = at::vec::fmadd(load(queries + h * head_dim + d, count), key, acc[h]);
    });
    for (int64_t h = 0; h < kHeads; ++h) scores[h][t] = sum(acc[h]);
  }
}

// out[h] += sum over t of weights[h][t] times value t, over kVecs vectors of the head dimension from `d` on.
template <int64_t kHeads, int64_t kVecs, typename T>
inline void add_values(const float (&weights)[kHeads][kTile], const T* const* values, int64_t num_tokens, int64_t d,
                       int64_t head_dim, float* out) {
  Vec acc[kHeads][kVecs];
  const auto count = [&](int64_t j) { return std::min(kLanes, head_dim - d - j * kLanes); };
  for (int64_t h = 0; h < kHeads; ++h)
    for (int64_t j = 0; j < kVecs; ++j) acc[h][j] = load(out + h * head_dim + d + j * kLanes, count(j));
  for (int64_t t = 0; t < num_tokens; ++t) {
    Vec value[kVecs];
    for (int64_t j = 0; j < kVecs; ++j) value[j] = load(values[t] + d + j * kLanes, count(j));
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t j = 0; j < kVecs; ++j) acc[h][j] = at::vec::fmadd(Vec(weights[h][t]), value[j], acc[h][j]);
  }
  for (int64_t h = 0; h < kHeads; ++h)
    for (int64_t j = 0; j < kVecs; ++j) store(out + h * head_dim + d + j * kLanes, acc[h][j], count(j));
}

// The running state of kHeads heads: maximum, sum, and out (head_dim), which is not yet divided by the sum.
template <int64_t kHeads, typename T>
void run_heads(const float* queries, int64_t head_dim, int64_t row, const int32_t* slots, int64_t num_tokens,
               const T* keys, const T* values, float* maxima, float* sums, float* out) {
  std::fill_n(maxima, kHeads, -std::numeric_limits<float>::infinity());
  std::fill_n(sums, kHeads, 0.0f);
  std::fill_n(out, kHeads * head_dim, 0.0f);
  for (int64_t first = 0; first < num_tokens; first += kTile) {
    const int64_t count = std::min(kTile, num_tokens - first);
    const T* tokens[kTile];
    float scores[kHeads][kTile];
    for (int64_t t = 0; t < count; ++t) tokens[t] = keys + slots[first + t] * row;
    score_tile<kHeads>(queries, head_dim, tokens, count, scores);
    for (int64_t h = 0; h < kHeads; ++h) {
      Vec best(maxima[h]);
      for (int64_t t = count; t < (count + kLanes - 1) / kLanes * kLanes; ++t) scores[h][t] = -std::numeric_limits<float>::infinity();
      for (int64_t t = 0; t < count; t += kLanes) best = at::vec::maximum(best, load(scores[h] + t));
      const float maximum = largest(best);
      const float correction = std::exp(maxima[h] - maximum);
      Vec total(0.0f);
      for (int64_t t = 0; t < count; t += kLanes) {
        const Vec weight = (load(scores[h] + t) - Vec(maximum)).exp_u20();
        store(scores[h] + t, weight);
        total = total + weight;
      }
      maxima[h] = maximum;
      sums[h] = sums[h] * correction + sum(total);
      float* target = out + h * head_dim;
      for_each_vec(head_dim, [&](int64_t d, int64_t n) { store(target + d, load(target + d, n) * Vec(correction), n); });
    }
    for (int64_t t = 0; t < count; ++t) tokens[t] = values + slots[first + t] * row;
    int64_t d = 0;
    for (; d + (kMaxVecs - 1) * kLanes < head_dim; d += kMaxVecs * kLanes)
      add_values<kHeads, kMaxVecs>(scores, tokens, count, d, head_dim, out);
    for (; d < head_dim; d += kLanes) add_values<kHeads, 1>(scores, tokens, count, d, head_dim, out);
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
  Buffer<float> work(kMaxHeads * (2 * head_dim + 2));
  float* scaled = work.data();
  float* out = scaled + kMaxHeads * head_dim;
  float* maxima = out + kMaxHeads * head_dim;
  float* sums = maxima + kMaxHeads;
  for (int64_t head = 0; head < group_; head += kMaxHeads) {
    const int64_t num_heads = std::min(kMaxHeads, group_ - head);
    for (int64_t i = 0; i < num_heads * head_dim; ++i) scaled[i] = source[head * head_dim + i] * scale_;
    const auto run = [&]<int64_t kHeads>() {
      run_heads<kHeads>(scaled, head_dim, row, slots, num_tokens, keys + kv_head * head_dim,
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
    float maximum = -std::numeric_limits<float>::infinity();
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
