#include "decoder.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "elementwise.h"

namespace kvbaton {

namespace {

// Rows a thread takes at least: what costs less than handing it over.
constexpr int64_t kRowGrain = 4;

template <typename Body>
void for_each_row(int64_t num_rows, const Body& body) {
  at::parallel_for(0, num_rows, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace

Decoder::Decoder(const DecoderShape& s, std::vector<float> inv_freq, std::vector<LayerWeights> layers,
                 std::vector<float> norm, std::shared_ptr<const PackedLinear> head)
    : shape(s),
      lm_head(std::move(head)),
      inv_freq_(std::move(inv_freq)),
      layers_(std::move(layers)),
      norm_(std::move(norm)) {}

template <typename T>
void Decoder::step(const Buffer<float>& embeddings, const std::vector<Sequence>& sequences, Cache<T> cache,
                   const std::vector<int64_t>& logit_rows, float* logits) {
  num_rows_ = 0;
  for (const Sequence& sequence : sequences) num_rows_ += sequence.num_tokens;
  x_.reserve(num_rows_ * shape.hidden);
  std::copy_n(embeddings.data(), num_rows_ * shape.hidden, x_.data());
  set_angles(sequences);
  Attention attention(shape.heads, sequences);
  const int64_t layer_size = cache.num_slots * shape.heads.num_kv_heads * shape.heads.head_dim;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const LayerWeights& layer = layers_[i];
    T* keys = cache.data + 2 * i * layer_size;
    T* values = keys + layer_size;
    encode_normed(layer.input_norm, *layer.qkv);
    projected_.reserve(num_rows_ * layer.qkv->num_out);
    layer.qkv->multiply(rows_, projected_.data(), layer.qkv->num_out, Store::kSet);
    rotate_and_store(sequences, keys, values);
    attend(attention, keys, values, *layer.o);
    layer.o->multiply(rows_, x_.data(), shape.hidden, Store::kAdd);
    encode_normed(layer.post_attention_norm, *layer.gate_up);
    projected_.reserve(num_rows_ * layer.gate_up->num_out);
    layer.gate_up->multiply(rows_, projected_.data(), layer.gate_up->num_out, Store::kSet);
    activate(*layer.down);
    layer.down->multiply(rows_, x_.data(), shape.hidden, Store::kAdd);
  }
  for (size_t i = 0; i < logit_rows.size(); ++i)  // rows move up only
    if (logit_rows[i] != static_cast<int64_t>(i))
      std::copy_n(x_.data() + logit_rows[i] * shape.hidden, shape.hidden, x_.data() + i * shape.hidden);
  num_rows_ = static_cast<int64_t>(logit_rows.size());
  encode_normed(norm_, *lm_head);
  lm_head->multiply(rows_, logits, lm_head->num_out, Store::kSet);
}

void Decoder::set_angles(const std::vector<Sequence>& sequences) {
  const int64_t half = static_cast<int64_t>(inv_freq_.size());
  cos_.reserve(num_rows_ * half);
  sin_.reserve(num_rows_ * half);
  for (const Sequence& sequence : sequences) {
    for_each_row(sequence.num_tokens, [&](int64_t token) {
      const int64_t at = (sequence.first_row + token) * half;
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(sequence.start + token) * inv_freq_[i];
        cos_.data()[at + i] = std::cos(angle);
        sin_.data()[at + i] = std::sin(angle);
      }
    });
  }
}

// x, normed and times `weight`, is what `next` will read.
void Decoder::encode_normed(const std::vector<float>& weight, const PackedLinear& next) {
  rows_.reset(next.format, num_rows_, next.num_in);
  for_each_row(num_rows_, [&](int64_t row) {
    thread_local std::vector<float> normed;
    normed.resize(shape.hidden);
    rms_norm(x_.data() + row * shape.hidden, weight.data(), shape.rms_norm_eps, shape.hidden, normed.data());
    rows_.encode(row, normed.data());
  });
}

template <typename T>
void Decoder::rotate_and_store(const std::vector<Sequence>& sequences, T* keys, T* values) {
  const auto [num_heads, num_kv_heads, head_dim] = shape.heads;
  const int64_t half = head_dim / 2, kv_size = num_kv_heads * head_dim;
  const int64_t width = num_heads * head_dim + 2 * kv_size;
  for (const Sequence& sequence : sequences) {
    for_each_row(sequence.num_tokens, [&](int64_t token) {
      const int64_t row = sequence.first_row + token;
      float* heads = projected_.data() + row * width;
      for (int64_t head = 0; head < num_heads + num_kv_heads; ++head)
        rotate(heads + head * head_dim, cos_.data() + row * half, sin_.data() + row * half, half);
      const int64_t at = sequence.slots[sequence.start + token] * kv_size;
      store_row(heads + num_heads * head_dim, kv_size, keys + at);
      store_row(heads + num_heads * head_dim + kv_size, kv_size, values + at);
    });
  }
}

template <typename T>
void Decoder::attend(Attention& attention, const T* keys, const T* values, const PackedLinear& next) {
  const auto [num_heads, num_kv_heads, head_dim] = shape.heads;
  const int64_t q_size = num_heads * head_dim;
  attended_.reserve(num_rows_ * q_size);
  attention.run(projected_.data(), q_size + 2 * num_kv_heads * head_dim, keys, values, attended_.data());
  rows_.reset(next.format, num_rows_, q_size);
  for_each_row(num_rows_, [&](int64_t row) { rows_.encode(row, attended_.data() + row * q_size); });
}

void Decoder::activate(const PackedLinear& next) {
  rows_.reset(next.format, num_rows_, shape.intermediate);
  for_each_row(num_rows_, [&](int64_t row) {
    float* gate = projected_.data() + row * 2 * shape.intermediate;
    silu_mul(gate, gate + shape.intermediate, shape.intermediate, gate);
    rows_.encode(row, gate);
  });
}

template void Decoder::step(const Buffer<float>&, const std::vector<Sequence>&, Cache<float>,
                            const std::vector<int64_t>&, float*);
template void Decoder::step(const Buffer<float>&, const std::vector<Sequence>&, Cache<BFloat16>,
                            const std::vector<int64_t>&, float*);

}  // namespace kvbaton
