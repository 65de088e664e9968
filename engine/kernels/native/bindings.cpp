// The Python side: tensors in, tensors out, every shape checked. See engine/kernels/native.py for what each one means.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "decoder.h"
#include "elementwise.h"

namespace py = pybind11;
namespace kvbaton {

namespace {

using at::Tensor;
using Tables = std::vector<std::vector<int32_t>>;

void check(const Tensor& tensor, std::vector<int64_t> shape, at::ScalarType dtype, const char* name) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == dtype && tensor.sizes() == at::IntArrayRef(shape), name,
              " must be contiguous, of ", dtype, " and shape ", at::IntArrayRef(shape));
}

Tensor empty_floats(at::IntArrayRef shape) {
  return at::empty(shape, at::TensorOptions().dtype(at::kFloat));
}

std::vector<float> to_vector(const Tensor& tensor) {
  check(tensor, {tensor.numel()}, at::kFloat, "a vector");
  const float* data = tensor.const_data_ptr<float>();
  return {data, data + tensor.numel()};
}

std::shared_ptr<PackedLinear> pack_linear(const std::string& name, const Tensor& weight,
                                          const std::optional<Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.numel() > 0, "weight must be a contiguous matrix");
  TORCH_CHECK(name == "float32" || name == "bfloat16" || name == "int8", "unknown format ", name);
  const Format format =
      name == "float32" ? Format::kFloat : name == "bfloat16" ? Format::kBFloat16 : Format::kInt8;
  const int64_t num_out = weight.size(0), num_in = weight.size(1);
  const float* bias_data = nullptr;
  if (bias) {
    check(*bias, {num_out}, at::kFloat, "bias");
    bias_data = bias->const_data_ptr<float>();
  }
  if (weight.scalar_type() == at::kFloat)
    return std::make_shared<PackedLinear>(format, weight.const_data_ptr<float>(), bias_data, num_out, num_in);
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16, "weight must be float32 or bfloat16");
  return std::make_shared<PackedLinear>(format, weight.const_data_ptr<BFloat16>(), bias_data, num_out, num_in);
}

Tensor linear(const PackedLinear& weight, const Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix");
  check(x, {x.size(0), weight.num_in}, at::kFloat, "x");
  Rows rows;
  rows.reset(weight.format, x.size(0), weight.num_in);
  for (int64_t row = 0; row < x.size(0); ++row) rows.encode(row, x.const_data_ptr<float>() + row * weight.num_in);
  Tensor out = empty_floats({x.size(0), weight.num_out});
  weight.multiply(rows, out.mutable_data_ptr<float>(), weight.num_out, Store::kSet);
  return out;
}

Tensor normed(const Tensor& x, const Tensor& weight, double epsilon) {
  TORCH_CHECK(x.dim() == 2, "x must be a matrix");
  check(x, {x.size(0), x.size(1)}, at::kFloat, "x");
  check(weight, {x.size(1)}, at::kFloat, "weight");
  Tensor out = empty_floats({x.size(0), x.size(1)});
  for (int64_t row = 0; row < x.size(0); ++row)
    rms_norm(x.const_data_ptr<float>() + row * x.size(1), weight.const_data_ptr<float>(), static_cast<float>(epsilon),
             x.size(1), out.mutable_data_ptr<float>() + row * x.size(1));
  return out;
}

Tensor activated(const Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be a matrix of an even width");
  check(gate_up, {gate_up.size(0), gate_up.size(1)}, at::kFloat, "gate_up");
  const int64_t size = gate_up.size(1) / 2;
  Tensor out = empty_floats({gate_up.size(0), size});
  for (int64_t row = 0; row < gate_up.size(0); ++row) {
    const float* gate = gate_up.const_data_ptr<float>() + row * 2 * size;
    silu_mul(gate, gate + size, size, out.mutable_data_ptr<float>() + row * size);
  }
  return out;
}

Tensor rotated(const Tensor& heads, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(heads.dim() == 2 && heads.size(1) % 2 == 0, "heads must be a matrix of an even width");
  const int64_t half = heads.size(1) / 2;
  check(heads, {heads.size(0), 2 * half}, at::kFloat, "heads");
  check(cos, {half}, at::kFloat, "cos");
  check(sin, {half}, at::kFloat, "sin");
  Tensor out = empty_floats({heads.size(0), 2 * half});
  std::copy_n(heads.const_data_ptr<float>(), heads.numel(), out.mutable_data_ptr<float>());
  for (int64_t row = 0; row < heads.size(0); ++row)
    rotate(out.mutable_data_ptr<float>() + row * 2 * half, cos.const_data_ptr<float>(), sin.const_data_ptr<float>(),
           half);
  return out;
}

// The sequences of a step, and the slots of their contexts, on which they stand.
class StepLayout {
 public:
  StepLayout(const std::vector<int64_t>& starts, const std::vector<int64_t>& lens, const Tables& tables,
             int64_t block_size, int64_t num_slots) {
    TORCH_CHECK(starts.size() == lens.size() && starts.size() == tables.size(), "starts, lens and tables differ");
    TORCH_CHECK(block_size > 0, "block_size must be positive");
    int64_t num_slots_in_all = 0;
    for (size_t i = 0; i < starts.size(); ++i) {
      TORCH_CHECK(lens[i] > 0 && starts[i] >= 0, "a sequence must have tokens");
      num_slots_in_all += starts[i] + lens[i];
    }
    slots_.reserve(num_slots_in_all);
    for (size_t i = 0; i < starts.size(); ++i) {
      const int64_t context = starts[i] + lens[i];
      TORCH_CHECK(static_cast<int64_t>(tables[i].size()) * block_size >= context, "a block table is too short");
      sequences.push_back({num_rows, lens[i], starts[i], slots_.data() + slots_.size()});
      for (int64_t begin = 0; begin < context; begin += block_size) {
        const int64_t first = tables[i][begin / block_size] * block_size;
        TORCH_CHECK(first >= 0 && first + block_size <= num_slots, "a block is outside the cache");
        for (int64_t offset = 0; offset < std::min(block_size, context - begin); ++offset)
          slots_.push_back(static_cast<int32_t>(first + offset));
      }
      num_rows += lens[i];
    }
  }

  std::vector<Sequence> sequences;
  int64_t num_rows = 0;

 private:
  std::vector<int32_t> slots_;  // never grows past what was reserved: sequences point into it
};

Tensor paged_attention(const Tensor& queries, const Tensor& keys, const Tensor& values, int64_t block_size,
                       const std::vector<int64_t>& starts, const std::vector<int64_t>& lens, const Tables& tables) {
  TORCH_CHECK(queries.dim() == 3 && keys.dim() == 3, "queries and keys must have three dimensions");
  const HeadShape shape{queries.size(1), keys.size(1), keys.size(2)};
  TORCH_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "heads must come in whole groups");
  const StepLayout layout(starts, lens, tables, block_size, keys.size(0));
  check(queries, {layout.num_rows, shape.num_heads, shape.head_dim}, at::kFloat, "queries");
  check(keys, {keys.size(0), shape.num_kv_heads, shape.head_dim}, keys.scalar_type(), "keys");
  check(values, {keys.size(0), shape.num_kv_heads, shape.head_dim}, keys.scalar_type(), "values");
  Tensor out = empty_floats({layout.num_rows, shape.num_heads, shape.head_dim});
  Attention attention(shape, layout.sequences);
  const float* q = queries.const_data_ptr<float>();
  const int64_t stride = shape.num_heads * shape.head_dim;
  if (keys.scalar_type() == at::kFloat) {
    attention.run(q, stride, keys.const_data_ptr<float>(), values.const_data_ptr<float>(),
                  out.mutable_data_ptr<float>());
  } else {
    TORCH_CHECK(keys.scalar_type() == at::kBFloat16, "keys must be float32 or bfloat16");
    attention.run(q, stride, keys.const_data_ptr<BFloat16>(), values.const_data_ptr<BFloat16>(),
                  out.mutable_data_ptr<float>());
  }
  return out;
}

using Linear = std::shared_ptr<PackedLinear>;
using PyLayer = std::tuple<Tensor, Linear, Linear, Tensor, Linear, Linear>;

class PyDecoder {
 public:
  PyDecoder(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, double rms_norm_eps, const Tensor& inv_freq,
            const Tensor& embed, const std::vector<PyLayer>& layers, const Tensor& norm, const Linear& lm_head)
      : embed_(embed), num_layers_(static_cast<int64_t>(layers.size())) {
    TORCH_CHECK(embed.dim() == 2 && embed.is_contiguous(), "embed must be a contiguous matrix");
    TORCH_CHECK(embed.scalar_type() == at::kFloat || embed.scalar_type() == at::kBFloat16, "embed: bad dtype");
    TORCH_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0 && head_dim % 2 == 0, "bad heads");
    TORCH_CHECK(!layers.empty(), "a decoder has layers");
    const int64_t hidden = embed.size(1), q_size = num_heads * head_dim;
    const int64_t inner = std::get<5>(layers[0])->num_in;
    std::vector<LayerWeights> weights;
    for (const auto& [input_norm, qkv, o, post_norm, gate_up, down] : layers) {
      TORCH_CHECK(input_norm.numel() == hidden && post_norm.numel() == hidden, "a norm of another width");
      TORCH_CHECK(qkv->num_in == hidden && qkv->num_out == q_size + 2 * num_kv_heads * head_dim, "qkv: bad shape");
      TORCH_CHECK(o->num_in == q_size && o->num_out == hidden, "o: bad shape");
      TORCH_CHECK(gate_up->num_in == hidden && gate_up->num_out == 2 * inner, "gate_up: bad shape");
      TORCH_CHECK(down->num_in == inner && down->num_out == hidden, "down: bad shape");
      weights.push_back({to_vector(input_norm), qkv, o, to_vector(post_norm), gate_up, down});
    }
    TORCH_CHECK(norm.numel() == hidden && lm_head->num_in == hidden, "norm or lm_head: bad shape");
    TORCH_CHECK(inv_freq.numel() == head_dim / 2, "inv_freq: bad shape");
    const DecoderShape shape{{num_heads, num_kv_heads, head_dim}, hidden, inner, static_cast<float>(rms_norm_eps)};
    decoder_ = std::make_unique<Decoder>(shape, to_vector(inv_freq), std::move(weights), to_vector(norm), lm_head);
  }

  Tensor step(const std::vector<std::vector<int64_t>>& token_ids, const std::vector<int64_t>& starts,
              const Tables& tables, const std::vector<int64_t>& logit_rows, const Tensor& cache, int64_t block_size) {
    const HeadShape& heads = decoder_->shape.heads;
    TORCH_CHECK(cache.dim() == 5, "cache must have five dimensions");
    check(cache, {num_layers_, 2, cache.size(2), heads.num_kv_heads, heads.head_dim}, cache.scalar_type(), "cache");
    std::vector<int64_t> lens;
    for (const auto& ids : token_ids) lens.push_back(static_cast<int64_t>(ids.size()));
    const StepLayout layout(starts, lens, tables, block_size, cache.size(2));
    for (size_t i = 0; i < logit_rows.size(); ++i)
      TORCH_CHECK(logit_rows[i] < layout.num_rows && logit_rows[i] >= (i ? logit_rows[i - 1] + 1 : 0),
                  "logit_rows must ascend within the step");
    Tensor logits = empty_floats({static_cast<int64_t>(logit_rows.size()), decoder_->lm_head->num_out});
    {
      py::gil_scoped_release release;
      gather_embeddings(token_ids, layout.num_rows);
      float* out = logits.mutable_data_ptr<float>();
      if (cache.scalar_type() == at::kFloat) {
        const Cache<float> pages{cache.mutable_data_ptr<float>(), cache.size(2)};
        decoder_->step(embeddings_, layout.sequences, pages, logit_rows, out);
      } else {
        const Cache<BFloat16> pages{cache.mutable_data_ptr<BFloat16>(), cache.size(2)};
        decoder_->step(embeddings_, layout.sequences, pages, logit_rows, out);
      }
    }
    return logits;
  }

 private:
  void gather_embeddings(const std::vector<std::vector<int64_t>>& token_ids, int64_t num_rows) {
    const int64_t hidden = embed_.size(1), vocab_size = embed_.size(0);
    embeddings_.reserve(num_rows * hidden);
    float* target = embeddings_.data();
    for (const auto& ids : token_ids) {
      for (const int64_t id : ids) {
        TORCH_CHECK(id >= 0 && id < vocab_size, "a token id is outside the vocabulary");
        if (embed_.scalar_type() == at::kFloat)
          convert_row(embed_.const_data_ptr<float>() + id * hidden, hidden, target);
        else
          convert_row(embed_.const_data_ptr<BFloat16>() + id * hidden, hidden, target);
        target += hidden;
      }
    }
  }

  const Tensor embed_;
  const int64_t num_layers_;
  std::unique_ptr<Decoder> decoder_;
  Buffer<float> embeddings_;
};

}  // namespace

}  // namespace kvbaton

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace kvbaton;
  py::class_<PackedLinear, std::shared_ptr<PackedLinear>>(module, "PackedLinear")
      .def_property_readonly("num_bytes", &PackedLinear::num_bytes);
  module.def("pack_linear", &pack_linear, py::arg("format"), py::arg("weight"), py::arg("bias") = py::none());
  module.def("linear", &linear);
  module.def("rms_norm", &normed);
  module.def("silu_mul", &activated);
  module.def("rotate", &rotated);
  module.def("paged_attention", &paged_attention);
  py::class_<PyDecoder>(module, "Decoder")
      .def(py::init<int64_t, int64_t, int64_t, double, const Tensor&, const Tensor&, const std::vector<PyLayer>&,
                    const Tensor&, const std::shared_ptr<PackedLinear>&>())
      .def("step", &PyDecoder::step);
}
