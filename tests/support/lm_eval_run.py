"""One tiny task of lm-evaluation-harness, offline, over a server's completions; prints what came out as JSON.

    python -m tests.support.lm_eval_run TOKENIZER_DIRECTORY COMPLETIONS_URL

In a process of its own: the harness brings warnings, threads and network habits along.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "a runner", "42"], "answer": 0},
    {"question": "The baton passes from the", "choices": ["moon", "first runner", "déjà vu 漢字"], "answer": 1},
    {"question": "In 1969 two people", "choices": ["walked on the moon", "are bytes like any other"], "answer": 0},
    {"question": "Naïve café owners", "choices": ["watched them do it.", "déjà vu: emoji 👩‍💻"], "answer": 1},
]


def task() -> Any:
    import datasets
    from lm_eval.api.task import ConfigurableTask

    config = {
        "task": "tiny_questions",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(QUESTIONS)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    return ConfigurableTask(config=config)


def main(directory: str, url: str) -> None:
    import lm_eval

    arguments = {"model": "tiny", "base_url": url, "tokenizer": directory, "tokenizer_backend": "huggingface"}
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments | {"num_concurrent": 4, "max_length": 512},
        tasks=[task()],
        log_samples=True,
        batch_size=2,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["tiny_questions"], key=lambda sample: sample["doc_id"])
    scores = [[(float(one[0][0]), str(one[0][1]) == "True") for one in sample["resps"]] for sample in samples]
    print(json.dumps({"scores": scores, "acc": found["results"]["tiny_questions"]["acc,none"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
