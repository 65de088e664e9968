// A Llama decoder's whole step as one call: embedding, layers, final norm and the logits of the rows that sample. Between
// the layers activations are float, whatever the format of the weights.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace kvbaton {

struct DecoderShape {
  HeadShape heads;
  int64_t hidden;
  int64_t intermediate;
  float rms_norm_eps;
};

struct LayerWeights {
  std::vector<float> input_norm;
  std::shared_ptr<const PackedLinear> qkv;
  std::shared_ptr<const PackedLinear> o;
  std::vector<float> post_attention_norm;
  std::shared_ptr<const PackedLinear> gate_up;
  std::shared_ptr<const PackedLinear> down;
};

// (num_layers, 2, num_slots, num_kv_heads, head_dim), owned by the caller.
template <typename T>
struct Cache {
  T* data;
  int64_t num_slots;
};

class Decoder {
 public:
  Decoder(const DecoderShape& shape, std::vector<float> inv_freq, std::vector<LayerWeights> layers,
          std::vector<float> norm, std::shared_ptr<const PackedLinear> lm_head);

  // embeddings (num_rows, hidden) -> logits (logit_rows.size(), vocab_size). Writes the keys and values of every row.
  template <typename T>
  void step(const Buffer<float>& embeddings, const std::vector<Sequence>& sequences, Cache<T> cache,
            const std::vector<int64_t>& logit_rows, float* logits);

  const DecoderShape shape;
  const std::shared_ptr<const PackedLinear> lm_head;

 private:
  void set_angles(const std::vector<Sequence>& sequences);
  void encode_normed(const std::vector<float>& weight, const PackedLinear& next);
  template <typename T>
  void rotate_and_store(const std::vector<Sequence>& sequences, T* keys, T* values);
  template <typename T>
  void attend(Attention& attention, const T* keys, const T* values, const PackedLinear& next);
  void activate(const PackedLinear& next);

  const std::vector<float> inv_freq_;
  const std::vector<LayerWeights> layers_;
  const std::vector<float> norm_;

  // Of the step that runs.
  int64_t num_rows_ = 0;
  Buffer<float> x_;          // (rows, hidden): the residual stream
  Buffer<float> projected_;  // (rows, q + k + v) or (rows, gate + up)
  Buffer<float> attended_;   // (rows, num_heads * head_dim)
  Buffer<float> cos_, sin_;  // (rows, head_dim / 2)
  Rows rows_;
};

}  // namespace kvbaton
