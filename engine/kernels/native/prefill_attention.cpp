// Many queries a sequence, causal over a cached prefix and themselves. Keys and values of the context are gathered once
// into panels, as the weights of linear layers are, and blocks of queries run over blocks of keys with a running softmax
// (Dao et al., FlashAttention, 2022).
#include <ATen/Parallel.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "softmax.h"

namespace kvbaton {

namespace {

constexpr int64_t kQueryTokens = 32;              // a block of queries
constexpr int64_t kKeyTokens = 4 * kPanel;        // a block of keys

// c (rows, panel columns) = or += a (rows, depth) times one panel.
template <typename T>
void multiply_panel(const T* a, int64_t a_stride, int64_t num_rows, const T* panel, int64_t depth, float* c,
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

}  // namespace

template <typename T>
void Attention::run_prefill(const Sequence& sequence, const float* queries, int64_t query_stride, const T* keys,
                            const T* values, float* out) {
  const int64_t num_kv_heads = shape_.num_kv_heads;
  context_ = sequence.start + sequence.num_tokens;
  const int64_t num_panels = round_up(context_, kPanel) / kPanel;
  const int64_t head_size = round_up(context_, kPanel) * (shape_.head_dim + round_up(shape_.head_dim, kPanel));
  panels_.reserve(num_kv_heads * head_size * static_cast<int64_t>(sizeof(T)));
  at::parallel_for(0, num_kv_heads * num_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item)
      pack_context(sequence, item / num_panels, item % num_panels * kPanel, keys, values);
  });
  const int64_t num_blocks = (sequence.num_tokens + kQueryTokens - 1) / kQueryTokens;
  at::parallel_for(0, num_blocks * num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / num_kv_heads * kQueryTokens;
      run_prefill_block<T>(sequence, item % num_kv_heads, first, std::min(kQueryTokens, sequence.num_tokens - first),
                           queries, query_stride, out);
    }
  });
}

// Of one head of keys: panels (context / kPanel) of depth head_dim, then for the values (head_dim / kPanel) panels of
// depth context, both padded to whole panels.
template <typename T>
T* Attention::key_panels(int64_t kv_head) const {
  const int64_t padded = round_up(context_, kPanel);
  return reinterpret_cast<T*>(panels_.data()) + kv_head * padded * (shape_.head_dim + round_up(shape_.head_dim, kPanel));
}

template <typename T>
T* Attention::value_panels(int64_t kv_head) const {
  return key_panels<T>(kv_head) + round_up(context_, kPanel) * shape_.head_dim;
}

// Positions [first, first + kPanel).
template <typename T>
void Attention::pack_context(const Sequence& sequence, int64_t kv_head, int64_t first, const T* keys, const T* values) {
  const int64_t head_dim = shape_.head_dim, padded = round_up(context_, kPanel);
  T* key_panel = key_panels<T>(kv_head) + first * head_dim;
  T* value_panel = value_panels<T>(kv_head);
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    const int64_t position = std::min(first + lane, context_ - 1);  // past the end: anything finite
    const int64_t at = (sequence.slots[position] * shape_.num_kv_heads + kv_head) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) key_panel[panel_index(d, lane, kUnit<T>)] = keys[at + d];
    for (int64_t d = 0; d < round_up(head_dim, kPanel); ++d)
      value_panel[d / kPanel * padded * kPanel + panel_index(first + lane, d % kPanel, kUnit<T>)] =
          d < head_dim ? values[at + d] : T(0.0f);
  }
}

// Queries of tokens [first, first + num_tokens) of the chunk, all heads of one group: rows are (token, head). With
// bfloat16 keys, queries and weights are rounded to bfloat16 too.
template <typename T>
void Attention::run_prefill_block(const Sequence& sequence, int64_t kv_head, int64_t first, int64_t num_tokens,
                                  const float* queries, int64_t query_stride, float* out) const {
  const int64_t head_dim = shape_.head_dim, padded = round_up(context_, kPanel);
  const int64_t num_rows = num_tokens * group_, out_width = round_up(head_dim, kPanel);
  thread_local Buffer<T> rounded;
  thread_local Buffer<float> work;
  rounded.reserve(num_rows * (head_dim + kKeyTokens));
  work.reserve(num_rows * (kKeyTokens + out_width + 2));
  T* q = rounded.data();
  T* weights = q + num_rows * head_dim;
  float* scores = work.data();
  float* sums = scores + num_rows * kKeyTokens;
  float* maxima = sums + num_rows * out_width;
  float* totals = maxima + num_rows;
  const auto row_of = [&](int64_t r) { return sequence.first_row + first + r / group_; };
  const auto head_of = [&](int64_t r) { return kv_head * group_ + r % group_; };
  for (int64_t r = 0; r < num_rows; ++r)
    store_row(queries + row_of(r) * query_stride + head_of(r) * head_dim, head_dim, q + r * head_dim);
  std::fill_n(sums, num_rows * out_width, 0.0f);
  std::fill_n(maxima, num_rows, kNever);
  std::fill_n(totals, num_rows, 0.0f);
  const int64_t first_position = sequence.start + first;
  const int64_t num_keys = first_position + num_tokens;
  for (int64_t key = 0; key < num_keys; key += kKeyTokens) {
    const int64_t count = std::min(kKeyTokens, num_keys - key), width = round_up(count, kPanel);
    for (int64_t k = 0; k < width; k += kPanel)
      multiply_panel(q, head_dim, num_rows, key_panels<T>(kv_head) + (key + k) * head_dim, head_dim, scores + k,
                     kKeyTokens, false);
    for (int64_t r = 0; r < num_rows; ++r) {
      // A query of an earlier token may have nothing left to see in the last block.
      const int64_t visible = std::clamp<int64_t>(first_position + r / group_ + 1 - key, 0, count);
      float* row = scores + r * kKeyTokens;
      if (visible == 0) {
        std::fill_n(row, width, 0.0f);
      } else {
        scale_row(row, scale_, visible);
        const float factor = update_softmax(row, visible, width, maxima[r], totals[r]);
        scale_row(sums + r * out_width, factor, out_width);
      }
      store_row(row, width, weights + r * kKeyTokens);
    }
    for (int64_t panel = 0; panel * kPanel < head_dim; ++panel)
      multiply_panel(weights, kKeyTokens, num_rows, value_panels<T>(kv_head) + (panel * padded + key) * kPanel,
                     round_up(count, kUnit<T>), sums + panel * kPanel, out_width, true);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float* target = out + (row_of(r) * shape_.num_heads + head_of(r)) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) target[d] = sums[r * out_width + d] / totals[r];
  }
}

template void Attention::run_prefill(const Sequence&, const float*, int64_t, const float*, const float*, float*);
template void Attention::run_prefill(const Sequence&, const float*, int64_t, const BFloat16*, const BFloat16*, float*);

}  // namespace kvbaton
