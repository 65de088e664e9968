"""`kvbaton check` against a gateway: it passes only where a pair of workers served the request."""

from pathlib import Path

import pytest

from services.check import CheckConfig, run
from tests.support.stub_system import stub_system
from tests.support.text_model import make_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "m")


def test_a_pair_passes_and_its_lane_is_shown(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_system(model, ["prefill", "decode"]) as stubs:
        stubs.says("a b c")
        assert run(CheckConfig(url=stubs.url, admin_url=stubs.admin_url)) == 0
    assert "KV moved: 1000 bytes in 0.0 ms over stub" in capsys.readouterr().out


def test_a_system_without_prefill_answers_and_fails(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_system(model, ["decode"]) as stubs:
        stubs.says("a b c")
        assert run(CheckConfig(url=stubs.url, admin_url=stubs.admin_url)) == 1
    assert "no KV was moved for it: no prefill worker is there" in capsys.readouterr().out


def test_nobody_there_fails_within_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CheckConfig(url="http://127.0.0.1:9", within_s=0.1)) == 1
    assert "FAILED" in capsys.readouterr().out
