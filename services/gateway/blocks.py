"""The output of one choice as a row of blocks, for APIs that number them: a thought, a text, a call. Pure.

Only the last block is open; what belongs to another kind closes it and opens a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.gateway.output import Delta, Result, ScoredToken

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    text: str = ""
    """Of a call: its arguments."""
    call_id: str = ""
    name: str = ""
    scored: list[ScoredToken] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Added:
    block: Block
    text: str
    scored: Sequence[ScoredToken] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Added | Closed


class BlockRow:
    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False
        self._held_scores: list[ScoredToken] = []
        """Of tokens whose text has not come out yet."""

    def add(self, delta: Delta) -> list[Change]:
        changes: list[Change] = []
        self._held_scores += delta.scored
        if delta.reasoning:
            self._held_scores = []
            self._add("reasoning", delta.reasoning, [], changes)
        if delta.content:
            scored, self._held_scores = self._held_scores, []
            self._add("text", delta.content, scored, changes)
        for call in delta.tool_calls:
            if call.name is not None:
                self._begin(Block(len(self.blocks), "call", "", call.id or "", call.name), changes)
            if call.arguments:
                block = self.blocks[-1]
                block.text += call.arguments
                changes.append(Added(block, call.arguments))
        return changes

    def finish(self) -> list[Change]:
        """An answer without any output has one empty text."""
        changes: list[Change] = []
        if not self.blocks:
            self._begin(Block(0, "text"), changes)
        if self._held_scores and self.blocks[-1].kind == "text":
            self._add("text", "", self._held_scores, changes)
        self._close(changes)
        return changes

    def _add(self, kind: Kind, text: str, scored: Sequence[ScoredToken], changes: list[Change]) -> None:
        if not (self._open and self.blocks[-1].kind == kind):
            self._begin(Block(len(self.blocks), kind), changes)
        block = self.blocks[-1]
        block.text += text
        block.scored += scored
        changes.append(Added(block, text, scored))

    def _begin(self, block: Block, changes: list[Change]) -> None:
        self._close(changes)
        self.blocks.append(block)
        self._open = True
        changes.append(Opened(block))

    def _close(self, changes: list[Change]) -> None:
        if self._open:
            self._open = False
            changes.append(Closed(self.blocks[-1]))


def blocks_of(result: Result) -> list[Block]:
    """Of a whole answer."""
    row = BlockRow()
    row.add(Delta(result.content, result.reasoning, (), result.scored))
    for call in result.tool_calls:
        row.blocks.append(Block(len(row.blocks), "call", call.arguments, call.id, call.name))
    row.finish()
    return row.blocks
