"""Which rows of a step need logits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.runner import ScheduledSeq


def logit_rows(seqs: Sequence[ScheduledSeq], order: Iterable[int]) -> list[int]:
    """The last row of each sequence with `sample`, then every row of those with `score` whose next token is scored;
    both in the order of `seqs`. Rows are counted in a batch whose sequences are laid out in `order`."""
    first_row, row = {}, 0
    for index in order:
        first_row[index] = row
        row += len(seqs[index].token_ids)
    rows = [first_row[i] + len(seq.token_ids) - 1 for i, seq in enumerate(seqs) if seq.sample is not None]
    for index, seq in enumerate(seqs):
        if seq.score is not None:
            first = first_row[index] + seq.score.first_row
            rows += range(first, first + len(seq.score.token_ids))
    return rows
