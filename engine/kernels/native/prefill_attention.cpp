// Many queries a sequence, causal over a cached prefix and themselves. Keys and values of the context are gathered once
// into panels, as the weights of linear layers are, and blocks of queries run over blocks of keys with a running softmax
// (Dao et al., FlashAttention, 2022).
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "attention.h"
#include "linear.h"

namespace kvbaton {

namespace {

constexpr int64_t kQueryTokens = 32;              // a block of queries
constexpr int64_t kKeyTokens = 4 * kPanel;        // a block of keys
constexpr float kNever = -std::numeric_limits<float>::infinity();

// c (rows, panel columns) = or += a (rows, depth) times one panel.
void multiply_panel(const float* a, int64_t a_stride, int64_t num_rows, const float* panel, int64_t depth, float* c,
                    int64_t c_stride, bool add) {
  for_each_tile(num_rows, kTileRows, [&]<int64_t kRows>(int64_t first) {
    Vec acc[kRows][kPanelVecs];
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t j = 0; j < kPanelVecs; ++j)
        acc[r][j] = add ? load(c + (first + r) * c_stride + j * kLanes) : Vec(0.0f);
    add_products<kRows>(a + first * a_stride, a_stride, panel, depth, acc);
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t j = 0; j < kPanelVecs; ++j) store(c + (first + r) * c_stride + j * kLanes, acc[r][j]);
  });
}

// Turns the scores of a row, of which `num_keys` count and the rest of `width` are to be zero, into weights.
// Returns the factor for what was summed before.
float update_softmax(float* scores, int64_t num_keys, int64_t width, float& maximum, float& total) {
  for (int64_t t = num_keys; t < width; ++t) scores[t] = kNever;
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

}  // namespace

template <typename T>
void Attention::run_prefill(const Sequence& sequence, const float* queries, int64_t query_stride, const T* keys,
                            const T* values, float* out) {
  const int64_t head_dim = shape_.head_dim, row = shape_.num_kv_heads * head_dim;
  context_ = sequence.start + sequence.num_tokens;
  const int64_t padded = round_up(context_, kPanel), num_dim_panels = round_up(head_dim, kPanel) / kPanel;
  key_panels_.reserve(shape_.num_kv_heads * padded * head_dim);
  value_panels_.reserve(shape_.num_kv_heads * num_dim_panels * padded * kPanel);
  const int64_t num_context_panels = padded / kPanel;
  at::parallel_for(0, shape_.num_kv_heads * num_context_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t kv_head = item / num_context_panels, first = item % num_context_panels * kPanel;
      float* key_panel = key_panels_.data() + kv_head * padded * head_dim + first * head_dim;
      float* value_panels = value_panels_.data() + kv_head * num_dim_panels * padded * kPanel + first * kPanel;
      for (int64_t lane = 0; lane < kPanel; ++lane) {
        const int64_t position = std::min(first + lane, context_ - 1);  // past the end: anything finite
        const T* key = keys + sequence.slots[position] * row + kv_head * head_dim;
        const T* value = values + sequence.slots[position] * row + kv_head * head_dim;
        for (int64_t d = 0; d < head_dim; ++d) key_panel[d * kPanel + lane] = static_cast<float>(key[d]);
        for (int64_t d = 0; d < num_dim_panels * kPanel; ++d)
          value_panels[(d / kPanel * padded + lane) * kPanel + d % kPanel] =
              d < head_dim ? static_cast<float>(value[d]) : 0.0f;
      }
    }
  });
  const int64_t num_blocks = (sequence.num_tokens + kQueryTokens - 1) / kQueryTokens;
  at::parallel_for(0, num_blocks * shape_.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / shape_.num_kv_heads * kQueryTokens;
      run_prefill_block(sequence, item % shape_.num_kv_heads, first,
                        std::min(kQueryTokens, sequence.num_tokens - first), queries, query_stride, out);
    }
  });
}

// Queries of tokens [first, first + num_tokens) of the chunk, all heads of one group: rows are (token, head).
void Attention::run_prefill_block(const Sequence& sequence, int64_t kv_head, int64_t first, int64_t num_tokens,
                                  const float* queries, int64_t query_stride, float* out) const {
  const int64_t head_dim = shape_.head_dim, padded = round_up(context_, kPanel);
  const int64_t num_rows = num_tokens * group_, out_width = round_up(head_dim, kPanel);
  const float* key_panels = key_panels_.data() + kv_head * padded * head_dim;
  const float* value_panels = value_panels_.data() + kv_head * out_width * padded;
  Buffer<float> memory(num_rows * (head_dim + kKeyTokens + out_width + 2));
  float* q = memory.data();
  float* scores = q + num_rows * head_dim;
  float* sums = scores + num_rows * kKeyTokens;
  float* maxima = sums + num_rows * out_width;
  float* totals = maxima + num_rows;
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* source =
        queries + (sequence.first_row + first + r / group_) * query_stride + (kv_head * group_ + r % group_) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) q[r * head_dim + d] = source[d] * scale_;
  }
  std::fill_n(sums, num_rows * out_width, 0.0f);
  std::fill_n(maxima, num_rows, kNever);
  std::fill_n(totals, num_rows, 0.0f);
  const int64_t first_position = sequence.start + first;
  const int64_t num_keys = first_position + num_tokens;
  for (int64_t key = 0; key < num_keys; key += kKeyTokens) {
    const int64_t count = std::min(kKeyTokens, num_keys - key), width = round_up(count, kPanel);
    for (int64_t k = 0; k < width; k += kPanel)
      multiply_panel(q, head_dim, num_rows, key_panels + (key + k) * head_dim, head_dim, scores + k, kKeyTokens, false);
    for (int64_t r = 0; r < num_rows; ++r) {
      // A query of an earlier token may have nothing left to see in the last block.
      const int64_t visible = std::clamp<int64_t>(first_position + r / group_ + 1 - key, 0, count);
      float* row = scores + r * kKeyTokens;
      if (visible == 0) {
        std::fill_n(row, width, 0.0f);
        continue;
      }
      const float factor = update_softmax(row, visible, width, maxima[r], totals[r]);
      for (int64_t d = 0; d < out_width; d += kLanes)
        store(sums + r * out_width + d, load(sums + r * out_width + d) * Vec(factor));
    }
    for (int64_t panel = 0; panel * kPanel < head_dim; ++panel)
      multiply_panel(scores, kKeyTokens, num_rows, value_panels + (panel * padded + key) * kPanel, count,
                     sums + panel * kPanel, out_width, true);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float* target = out + ((sequence.first_row + first + r / group_) * shape_.num_heads + kv_head * group_ + r % group_) *
                              head_dim;
    for (int64_t d = 0; d < head_dim; ++d) target[d] = sums[r * out_width + d] / totals[r];
  }
}

template void Attention::run_prefill(const Sequence&, const float*, int64_t, const float*, const float*, float*);
template void Attention::run_prefill(const Sequence&, const float*, int64_t, const BFloat16*, const BFloat16*, float*);

}  // namespace kvbaton
