// Attention over the paged cache: keys and values (num_slots, kv_heads, head_dim) of one layer, queries and results in
// float. Heads of queries come in groups of num_heads / kv_heads that share a head of keys.
#pragma once

#include <vector>

#include "buffer.h"
#include "vec.h"

namespace kvbaton {

struct HeadShape {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
};

// One sequence's part of a step: `num_tokens` queries from position `start` on, over its context, themselves included.
struct Sequence {
  int64_t first_row;
  int64_t num_tokens;
  int64_t start;
  const int32_t* slots;  // of positions [0, start + num_tokens)
};

class Attention {
 public:
  Attention(const HeadShape& shape, std::vector<Sequence> sequences);

  // queries: row r at queries + r * query_stride, (num_heads, head_dim). out: (rows, num_heads * head_dim).
  template <typename T>
  void run(const float* queries, int64_t query_stride, const T* keys, const T* values, float* out);

 private:
  // A decoding sequence's context is cut into spans, so that one long context keeps every thread busy. Where they are
  // cut depends on the context alone: results do not depend on the number of threads.
  static constexpr int64_t kSpan = 1024;

  struct Span {
    int64_t sequence;
    int64_t begin;
    int64_t end;
  };

  template <typename T>
  void run_span(const Span& span, int64_t kv_head, const float* queries, int64_t query_stride, const T* keys,
                const T* values, float* partial) const;
  void merge_spans(int64_t first_span, int64_t num_spans, float* out) const;
  template <typename T>
  void run_prefill(const Sequence& sequence, const float* queries, int64_t query_stride, const T* keys,
                   const T* values, float* out);
  template <typename T>
  T* key_panels(int64_t kv_head) const;
  template <typename T>
  T* value_panels(int64_t kv_head) const;
  template <typename T>
  void pack_context(const Sequence& sequence, int64_t kv_head, int64_t first, const T* keys, const T* values);
  template <typename T>
  void run_prefill_block(const Sequence& sequence, int64_t kv_head, int64_t first, int64_t num_tokens,
                         const float* queries, int64_t query_stride, float* out) const;

  int64_t partial_size() const;

  const HeadShape shape_;
  const int64_t group_;
  const float scale_;
  std::vector<Sequence> sequences_;
  std::vector<Span> spans_;
  std::vector<int64_t> first_spans_;  // of each decoding sequence, and the end
  Buffer<float> partials_;
  Buffer<uint8_t> panels_;  // keys and values of the sequence that is prefilled, as T
  int64_t context_ = 0;     // of that sequence
};

}  // namespace kvbaton
