"""Pinned vectors: every process, on every machine, in every release of this format gives these."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine.block_hash import block_key, extend_keys, root_key
from engine.counter_rng import uniform


def test_vectors() -> None:
    root = root_key(b"model", b"tenant")
    assert root.hex() == "26b54d356b9e7dfe03815b91b569d521259a4981697bfe35e4a7d54e2333ab09"
    assert block_key(root, [1, 2, 3, 4]).hex() == "957d1bc0080bac7dc447f51571fbd06335378259344401ab1b1e4f00528bbbea"
    assert [uniform(42, 0, 0), uniform(42, 0, 1)] == [0.5691415953830432, 0.2717808397222896]
    assert uniform(-1, 3, 7) == 0.2717174092888256


def test_identities_that_concatenate_alike_have_different_keys() -> None:
    names = [b"", b"x", b"ab", b"abc", b"a", b"bc", b"c"]
    roots = {root_key(model, domain) for model, domain in itertools.product(names, names)}
    assert len(roots) == len(names) ** 2


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), block_size=st.integers(1, 7))
def test_full_blocks_only_each_chained_to_all_before_it(tokens: list[int], block_size: int) -> None:
    root = root_key(b"m", b"")
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, block_size)
    assert len(keys) == len(tokens) // block_size
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_keys(grown, root, tokens[:end], block_size)
    assert grown == keys, "the same a token at a time"
    if keys:
        changed: list[bytes] = []
        extend_keys(changed, root, [tokens[0] ^ 1, *tokens[1:]], block_size)
        assert not set(changed) & set(keys), "another first token, another key for every block"


def test_draws_are_spread_over_the_unit_interval() -> None:
    draws = [uniform(seed, choice, index) for seed in range(10) for choice in range(5) for index in range(200)]
    assert len(set(draws)) == len(draws)
    assert 0.0 <= min(draws) < 0.01
    assert 0.99 < max(draws) < 1.0
    assert abs(sum(draws) / len(draws) - 0.5) < 0.01
