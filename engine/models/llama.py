"""The Llama decoder in plain torch, on CPU and CUDA tensors alike, over a paged KV cache.

Called by the model runner on the engine thread, under torch.inference_mode. Sequences of a step are packed: T is
the number of tokens of the whole batch. What is particular to a sequence, its cache and its mask, is left to
`attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F

from engine.errors import CheckpointError
from engine.model_config import ModelConfig
from engine.models.checkpoint import Checkpoint, Progress
from engine.models.rotary import cos_sin, inverse_frequencies, rotate

EMBED = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class Attention(Protocol):
    """Stores a layer's new keys and values and attends over each sequence's whole context."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (T, num_heads, head_dim), k and v (T, num_kv_heads, head_dim), rotated -> (T, num_heads * head_dim)."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    """(out, in)"""
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


LinearT = TypeVar("LinearT")
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], LinearT]
"""From a weight (out, in), which need not be kept, and a bias (out,): what multiplies by it."""


@dataclass(frozen=True, slots=True)
class Layer(Generic[LinearT]):
    input_norm: torch.Tensor
    qkv: LinearT
    """Rows of q, k and v stacked: one product instead of three."""
    o: LinearT
    post_attention_norm: torch.Tensor
    gate_up: LinearT
    down: LinearT


@dataclass(frozen=True, slots=True)
class Weights(Generic[LinearT]):
    embed: torch.Tensor
    """(vocab_size, hidden_size)"""
    layers: list[Layer[LinearT]]
    norm: torch.Tensor
    lm_head: LinearT


class LlamaModel:
    """Weights and forward pass. Holds no state of any request."""

    def __init__(self, config: ModelConfig, weights: Weights[Linear]) -> None:
        self.config = config
        self.dtype = weights.embed.dtype
        self.device = weights.embed.device
        self.embed = weights.embed
        self.layers = weights.layers
        self.norm = weights.norm
        self.lm_head = weights.lm_head.weight
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(self.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        attend: Attention,
    ) -> torch.Tensor:
        """token_ids and positions (T,) -> logits (len(logit_rows), vocab_size) of those rows only."""
        config = self.config
        cos, sin = cos_sin(positions, self._inv_freq, self.dtype)
        num_qk_heads = config.num_heads + config.num_kv_heads
        x = F.embedding(token_ids, self.embed)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._rms_norm(x, layer.input_norm)).view(len(x), -1, config.head_dim)
            qk = rotate(qkv[:, :num_qk_heads], cos, sin)
            q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
            x = x + layer.o(attend(index, q, k, qkv[:, num_qk_heads:]))
            gate, up = layer.gate_up(self._rms_norm(x, layer.post_attention_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return F.linear(self._rms_norm(x[logit_rows], self.norm), self.lm_head)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)


def load_llama(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> LlamaModel:
    """Every tensor of the checkpoint is used, tied or refused by name. Raises CheckpointError."""
    return LlamaModel(config, load_weights(directory, config, Linear, dtype=dtype, device=device, progress=progress))


def load_weights(
    directory: str | Path,
    config: ModelConfig,
    make_linear: MakeLinear[LinearT],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Weights[LinearT]:
    """As `load_llama`, with linear layers of any kind. Tensors are read in `dtype`, one linear layer at a time."""
    with Checkpoint.open(Path(directory), dtype=dtype, device=device, progress=progress) as checkpoint:
        embed, lm_head = _embeddings(checkpoint, config)
        layers = [_layer(checkpoint, config, f"model.layers.{i}.", make_linear) for i in range(config.num_layers)]
        norm = checkpoint.take("model.norm.weight", config.hidden_size)
        checkpoint.finish()
    return Weights(embed, layers, norm, make_linear(lm_head, None))


def _embeddings(checkpoint: Checkpoint, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The input embedding and the output head.

    Tied, and one of them absent: both are the one that is there. Tied, and both present: one if they are equal,
    else each its own, as in transformers: the tensors are evidence of training, the flag is only a claim.
    """
    shape = (config.vocab_size, config.hidden_size)
    if config.tie_word_embeddings and EMBED not in checkpoint and LM_HEAD in checkpoint:
        lm_head = checkpoint.take(LM_HEAD, *shape)
        return lm_head, lm_head
    embed = checkpoint.take(EMBED, *shape)
    if LM_HEAD in checkpoint:
        lm_head = checkpoint.take(LM_HEAD, *shape)
        same = config.tie_word_embeddings and torch.equal(embed, lm_head)
        return embed, embed if same else lm_head
    if not config.tie_word_embeddings:
        raise CheckpointError(
            f"the checkpoint has no tensor {LM_HEAD}, and tie_word_embeddings is false in config.json"
        )
    return embed, embed


def _layer(
    checkpoint: Checkpoint, config: ModelConfig, prefix: str, make_linear: MakeLinear[LinearT]
) -> Layer[LinearT]:
    hidden, q_size, kv_size, inner = (
        config.hidden_size,
        config.q_size,
        config.kv_size,
        config.intermediate_size,
    )
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    # A buffer that checkpoints of early transformers releases carry: recomputed here from rope_theta.
    checkpoint.ignore(f"{attention}rotary_emb.inv_freq")

    def linear(bias: bool, num_inputs: int, *parts: tuple[str, int]) -> LinearT:
        weight = checkpoint.take_rows(*((f"{name}.weight", (rows, num_inputs)) for name, rows in parts))
        if not bias:
            return make_linear(weight, None)
        return make_linear(weight, checkpoint.take_rows(*((f"{name}.bias", (rows,)) for name, rows in parts)))

    qkv = ((f"{attention}q_proj", q_size), (f"{attention}k_proj", kv_size), (f"{attention}v_proj", kv_size))
    return Layer(
        input_norm=checkpoint.take(f"{prefix}input_layernorm.weight", hidden),
        qkv=linear(config.attention_bias, hidden, *qkv),
        o=linear(config.attention_bias, q_size, (f"{attention}o_proj", hidden)),
        post_attention_norm=checkpoint.take(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=linear(config.mlp_bias, hidden, (f"{mlp}gate_proj", inner), (f"{mlp}up_proj", inner)),
        down=linear(config.mlp_bias, inner, (f"{mlp}down_proj", hidden)),
    )
