from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from services import settings


class Sizes(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    num_blocks: int = Field(8, ge=1, description="100 % of the pool")
    port: int = 80
    names: list[str] = []
    caching: bool = True
    secret: SecretStr | None = Field(None, json_schema_extra={"secret": True})


def load(argv: list[str], environ: dict[str, str] | None = None) -> Sizes:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    settings.add_arguments(parser, Sizes)
    return settings.load(Sizes, parser.parse_args(argv), prog="test", environ=environ or {}, known={"elsewhere"})


def test_a_flag_wins_over_the_environment_which_wins_over_the_default() -> None:
    environ = {"KVBATON__NUM_BLOCKS": "5", "KVBATON__PORT": "81", "KVBATON__MODEL": "/m"}
    loaded = load(["--num-blocks", "6"], environ)
    assert (loaded.num_blocks, loaded.port, loaded.model) == (6, 81, Path("/m"))
    assert load(["--model", "/m"]).num_blocks == 8


def test_lists_and_booleans_from_both_sources() -> None:
    assert load(["--model", "m", "--names", "a, b", "--no-caching"]).names == ["a", "b"]
    loaded = load([], {"KVBATON__MODEL": "m", "KVBATON__NAMES": "c", "KVBATON__CACHING": "false"})
    assert loaded.names == ["c"]
    assert loaded.caching is False


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--model", "m", "--num-blocks", "none"], {}, "--num-blocks 'none'"),
        (["--model", "m", "--num-blocks", "0"], {}, "--num-blocks '0'"),
        (["--model", "m"], {"KVBATON__PORT": "tcp://10.0.0.1:80"}, "KVBATON__PORT 'tcp://10.0.0.1:80'"),
        (["--model", "m"], {"KVBATON__NUM_BLOKS": "4"}, "KVBATON__NUM_BLOKS"),
        ([], {}, "--model (or KVBATON__MODEL) is required"),
    ],
)
def test_a_bad_or_unknown_setting_stops_the_process_and_is_named(
    argv: list[str], environ: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(argv, environ)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_an_unknown_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--model", "m", "--num-block", "3"])
    assert "--num-block" in capsys.readouterr().err


def test_what_kubernetes_injects_for_a_service_of_any_name_is_no_setting() -> None:
    links = {
        "KVBATON_PORT": "tcp://10.0.0.1:80",
        "KVBATON_SERVICE_HOST": "10.0.0.1",
        "KVBATON__PREFILL_SERVICE_HOST": "10.0.0.1",
        "KVBATON__PREFILL_PORT": "tcp://10.0.0.1:80",
        "KVBATON__PREFILL_PORT_8100_TCP_ADDR": "10.0.0.1",
        "KVBATON__PREFILL_SERVICE_PORT_HTTP": "8100",
    }
    assert load(["--model", "m"], links).port == 80


def test_a_setting_of_another_process_may_share_the_environment() -> None:
    assert load(["--model", "m"], {"KVBATON__ELSEWHERE": "1"}).port == 80


def test_a_secret_has_no_flag_and_is_not_shown() -> None:
    with pytest.raises(SystemExit):
        load(["--model", "m", "--secret", "x"])
    loaded = load(["--model", "m"], {"KVBATON__SECRET": "do not show"})
    assert "do not show" not in repr(loaded)
