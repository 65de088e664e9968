"""Every native kernel against the same arithmetic in float64, over shapes, block sizes and lengths of any kind."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import build
from tests.support.llama_reference import skip_without_kernels

GROUP = 64
"""Inputs that share a scale in int8 (native/linear.h)."""
seeds = st.integers(0, 2**31 - 1)


@pytest.fixture(scope="module")
def kernels():
    skip_without_kernels()
    return build.load()


def rounded(x, fmt):
    return x.bfloat16().double() if fmt == "bfloat16" else x.double()


def quantised(x, group):
    """The values that int8 leaves of float32 `x`, in groups along the last dimension; as native/linear.cpp rounds."""
    parts = []
    for part in x.split(group, dim=-1):
        most = part.abs().amax(-1, keepdim=True)
        # Not 127 / most, which torch computes as 127 times the reciprocal.
        inverse = torch.where(most > 0, torch.full_like(most, 127) / most, torch.zeros_like(most))
        parts.append((part * inverse).round().double() * (most / 127).double())
    return torch.cat(parts, -1)


def random_floats(generator, *shape):
    return torch.randn(*shape, generator=generator)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 20), num_out=st.integers(1, 200), num_in=st.integers(1, 200), biased=st.booleans(), seed=seeds,
    fmt=st.sampled_from(["float32", "bfloat16", "int8"]), stored=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_linear_layers(kernels, rows, num_out, num_in, biased, seed, fmt, stored):
    generator = torch.Generator().manual_seed(seed)
    x, weight = random_floats(generator, rows, num_in), random_floats(generator, num_out, num_in).to(stored)
    bias = random_floats(generator, num_out) if biased else None
    packed = kernels.pack_linear(fmt, weight, bias)
    out = kernels.linear(packed, x)
    if fmt == "int8":
        wanted = quantised(x, GROUP) @ quantised(weight.float(), num_in).T
    else:
        wanted = rounded(x, fmt) @ rounded(weight.float(), fmt).T
    if bias is not None:
        wanted = wanted + bias
    assert (out - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max())) * math.sqrt(num_in)
    # A row alone is the same row, bit by bit.
    assert torch.equal(kernels.linear(packed, x[-1:]), out[-1:])


def test_rows_of_zeros_and_of_outliers_survive_int8(kernels):
    weight = torch.eye(130)
    x = torch.zeros(3, 130)
    x[1, 0] = 1e4  # must not cost the other groups of its row their precision
    x[1, 64:] = 1.0
    out = kernels.linear(kernels.pack_linear("int8", weight), x)
    assert torch.equal(out[0], torch.zeros(130))
    assert (out[1, 64:] - 1).abs().max() < 1e-6


@st.composite
def paged_steps(draw):
    group, num_kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    head_dim, block_size = draw(st.integers(1, 40).map(lambda half: 2 * half)), draw(st.integers(1, 40))
    sequences = draw(
        st.lists(st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(2, 80))), min_size=1, max_size=4)
    )
    return group, num_kv_heads, head_dim, block_size, sequences, draw(seeds)


def paged_inputs(group, num_kv_heads, head_dim, block_size, sequences, seed, dtype):
    """Queries, keys, values and block tables, with NaN in every slot that nobody may read."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-(start + length) // block_size) for start, length in sequences]
    ids = torch.randperm(sum(num_blocks) + 1, generator=generator).tolist()
    tables, keys = [], torch.full(((sum(num_blocks) + 1) * block_size, num_kv_heads, head_dim), float("nan"))
    values = keys.clone()
    for (start, length), count in zip(sequences, num_blocks, strict=True):
        tables.append([ids.pop() for _ in range(count)])
        slots = context_slots(tables[-1], start + length, block_size)
        keys[slots] = random_floats(generator, start + length, num_kv_heads, head_dim)
        values[slots] = random_floats(generator, start + length, num_kv_heads, head_dim)
    num_rows = sum(length for _, length in sequences)
    queries = 3 * random_floats(generator, num_rows, group * num_kv_heads, head_dim)
    return queries, keys.to(dtype), values.to(dtype), tables


def context_slots(table, context, block_size):
    return [table[position // block_size] * block_size + position % block_size for position in range(context)]


def attention_in_float64(queries, keys, values, block_size, sequences, tables):
    outputs, row = [], 0
    group = queries.shape[1] // keys.shape[1]
    for (start, length), table in zip(sequences, tables, strict=True):
        slots = context_slots(table, start + length, block_size)
        k = keys[slots].double().repeat_interleave(group, dim=1)
        v = values[slots].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", queries[row : row + length].double(), k) / math.sqrt(queries.shape[2])
        hidden = torch.arange(start + length)[None, :] > torch.arange(start, start + length)[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        row += length
    return torch.cat(outputs)


def check_attention(kernels, step, dtype):
    *_, block_size, sequences, _ = step
    queries, keys, values, tables = paged_inputs(*step, dtype)
    starts, lens = [start for start, _ in sequences], [length for _, length in sequences]
    out = kernels.paged_attention(queries, keys, values, block_size, starts, lens, tables)
    # With bfloat16 keys the query is rounded to bfloat16, and in prefill chunks the weights are too.
    wanted = attention_in_float64(queries.to(dtype), keys, values, block_size, sequences, tables)
    rounds_weights = dtype == torch.bfloat16 and max(lens) > 1
    assert (out - wanted).abs().max() < (2e-2 if rounds_weights else 2e-5)


@settings(deadline=None, max_examples=60)
@given(step=paged_steps(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_paged_attention(kernels, step, dtype):
    check_attention(kernels, step, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 70])
def test_paged_attention_over_a_context_of_several_spans(kernels, dtype, length):
    check_attention(kernels, (3, 2, 64, 16, [(2500, length), (1023, 1), (1024, 1), (0, 1)], 7), dtype)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 4), size=st.integers(1, 100), seed=seeds, scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_norms_activations_and_rotations(kernels, rows, size, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    x, weight = scale * random_floats(generator, rows, 2 * size), random_floats(generator, 2 * size)
    double = x.double()
    wanted = double / (double.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-5).double(), wanted, rtol=1e-5, atol=1e-5)
    wanted = torch.nn.functional.silu(double[:, :size]) * double[:, size:]
    assert torch.allclose(kernels.silu_mul(x).double(), wanted, rtol=1e-5, atol=1e-5 * scale)
    angle = random_floats(generator, size).double()
    a, b = double[:, :size], double[:, size:]
    wanted = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    rotated = kernels.rotate(x, angle.cos().float(), angle.sin().float())
    assert torch.allclose(rotated.double(), wanted, rtol=1e-5, atol=1e-5 * scale)


def test_sizes_that_do_not_fit_are_refused(kernels):
    q, kv = torch.zeros(1, 2, 8), torch.zeros(32, 1, 8)
    with pytest.raises(RuntimeError, match="block table is too short"):
        kernels.paged_attention(q, kv, kv, 16, [16], [1], [[0]])
    with pytest.raises(RuntimeError, match="outside the cache"):
        kernels.paged_attention(q, kv, kv, 16, [0], [1], [[2]])
    with pytest.raises(RuntimeError, match="outside the cache"):
        kernels.paged_attention(q, kv, kv, 16, [0], [1], [[-1]])
    with pytest.raises(RuntimeError, match="values"):
        kernels.paged_attention(q, kv, kv[:16], 16, [0], [1], [[0]])
    with pytest.raises(RuntimeError, match="x must be"):
        kernels.linear(kernels.pack_linear("float32", torch.zeros(4, 4)), torch.zeros(1, 5))
