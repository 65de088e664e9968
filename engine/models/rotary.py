"""Rotary position embedding (Su et al., RoFormer, 2021), with the scalings of linear interpolation and Llama 3.1.

Pairs are (i, i + head_dim / 2), as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import torch

from engine.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 (head_dim / 2,): radians a position, fastest first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    blend = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    slow = inv_freq / rope.factor
    blended = (1 - blend) * slow + blend * inv_freq
    scaled = torch.where(wavelength > context / rope.low_freq_factor, slow, blended)
    return torch.where(wavelength < context / rope.high_freq_factor, inv_freq, scaled)


def cos_sin(positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """For positions (T,): two of (T, 1, head_dim), computed in float32. The sine's first half is negated, which
    saves `rotate` a negation a layer."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), dim=-1).to(dtype)[:, None, :],
        torch.cat((-sin, sin), dim=-1).to(dtype)[:, None, :],
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """x (T, heads, head_dim), with the pair of `cos_sin`."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.roll(x, half, dims=-1), signed_sin)
