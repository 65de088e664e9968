from __future__ import annotations

from pathlib import Path

import pytest

from services.cli import _parser
from services.serve.config import ServeConfig
from services.serve.plan import plan, share_cores


def test_cores_are_disjoint_where_there_are_enough_and_left_alone_otherwise() -> None:
    assert share_cores([0, 1, 2, 3, 4], 2) == [(0, 1), (2, 3)]
    assert share_cores([7], 2) == [(), ()]
    assert share_cores([0, 1], 0) == []


def test_every_planned_command_line_is_one_the_cli_accepts() -> None:
    config = ServeConfig(prefill=2, decode=2, both=1, port=0, num_blocks=9, max_model_len=77, dtype="float32")
    layout = plan(config, Path("/models/m"), [0, 1])
    ports = set()
    for process in (*layout.workers, layout.gateway):
        parsed = _parser().parse_args(list(process.arguments))
        assert parsed.command == process.arguments[0]
        ports.add(parsed.listen)
    assert len(ports) == 6
    assert [w.name for w in layout.workers] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "both-0"]


def test_a_system_needs_somebody_who_decodes() -> None:
    with pytest.raises(ValueError, match="--decode"):
        ServeConfig(decode=0)
