"""lm-evaluation-harness scores a task over a pair as transformers does.

The harness asks for versions that do not go with ours, so it lives in an environment of its own: `make test-eval`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.cluster import ROOT, running
from tests.support.llama_reference import load_reference, reference_logits
from tests.support.lm_eval_run import QUESTIONS
from tests.support.tiny_model import make_tiny_model

PYTHON = os.environ.get("KVBATON_EVAL_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-eval installs lm-evaluation-harness and runs this")


def evaluate(*arguments: str) -> dict[str, Any]:
    command = [PYTHON, "-m", "tests.support.lm_eval_run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def expected(model: Path) -> list[list[tuple[float, bool]]]:
    """(log likelihood, whether it is the greedy continuation) of each choice of each question."""
    reference, tokenizer = load_reference(model), Tokenizer.from_file(str(model / "tokenizer.json"))

    def score(question: str, choice: str) -> tuple[float, bool]:
        start = len(tokenizer.encode(question, add_special_tokens=False).ids)
        ids = tokenizer.encode(f"{question} {choice}", add_special_tokens=False).ids
        logprobs = reference_logits(reference, ids).log_softmax(-1)
        total = sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids)))
        return total, all(int(logprobs[i - 1].argmax()) == ids[i] for i in range(start, len(ids)))

    return [[score(one["question"], choice) for choice in one["choices"]] for one in QUESTIONS]  # type: ignore[index]


def test_loglikelihoods_of_a_task_agree_with_transformers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    scores = expected(model)
    flags = ["--block-size", "16", "--num-blocks", "100", "--dtype", "float32"]
    with running(model, ["prefill", "decode"], worker_flags={"prefill": flags, "decode": flags}) as cluster:
        found = evaluate(str(model), cluster.gateway.url + "/v1/completions")
        cluster.assert_idle()
    for ours, theirs in zip(found["scores"], scores, strict=True):
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-3)
    best = [max(range(len(one)), key=lambda i, one=one: one[i][0]) for one in scores]  # type: ignore[misc]
    right = [answer == question["answer"] for answer, question in zip(best, QUESTIONS, strict=True)]
    assert found["acc"] == pytest.approx(sum(right) / len(right))
