"""The file of API keys: what it may say, that no key is in it, and that it may change."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from services import cli
from services.gateway.tenants.keys import KeyFileError, KeyRing, hash_key, new_key, read_keys


def entry(name: str, key: str, more: str = "") -> str:
    return f'[[key]]\nname = "{name}"\nhash = "{hash_key(key)}"\n{more}\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_key_is_found_by_itself_alone(tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    ring = KeyRing(write(tmp_path / "keys", entry("a", first, 'tenant = "t"') + entry("b", second)))
    found = ring.find(first)
    assert found is not None
    assert (found.name, found.tenant) == ("a", "t")
    other = ring.find(second)
    assert other is not None
    assert other.tenant == "b", "a key without a tenant is its own"
    for wrong in ("", first[:-1], first + "x", first.upper(), hash_key(first), "\ud800"):
        assert ring.find(wrong) is None
    assert first not in (tmp_path / "keys").read_text()


def test_tenants_and_salts_never_meet_in_the_cache(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("a", "ab")}
    ring = KeyRing(write(tmp_path / "keys", "".join(entry(name, key) for name, key in keys.items())))
    identities = [ring.find(key) for key in keys.values()]
    domains = [identity.cache_domain(salt) for identity in identities if identity for salt in ("", "b", "c")]
    assert len(set(domains)) == 6


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not toml", "keys"),
        ('[[key]]\nname = "a"\n', "hash"),
        ('[[key]]\nname = "a"\nhash = "sha256:123"\n', "hash"),
        ('[[key]]\nname = "a"\nhash = "kvb_the-key-itself"\n', "hash"),
        (entry("a", "x", "colour = 1"), "colour"),
        (entry("a", "x", "requests_per_minute = 0"), "requests_per_minute"),
        (entry("a", "x", 'models = "m"'), "models"),
        (entry("a", "x") + entry("a", "y"), "same name"),
        (entry("a", "x") + entry("b", "x"), "same hash"),
        ("[[keys]]\n", "keys"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(KeyFileError, match=named):
        read_keys(write(tmp_path / "keys", text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="nowhere"):
        KeyRing(tmp_path / "nowhere")


def touch(path: Path, text: str, at: int) -> None:
    path.write_text(text)
    os.utime(path, ns=(at, at))


def test_keys_change_with_the_file_and_what_was_used_stays_used(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    path = write(tmp_path / "keys", entry("a", old, "requests_per_minute = 1"))
    ring = KeyRing(path)
    before = ring.find(old)
    assert before is not None
    assert before.meter.begin(0.0) is None
    assert not ring.reload_if_changed()
    touch(path, entry("a", old, "requests_per_minute = 1") + entry("b", new), 10)
    assert ring.reload_if_changed()
    after = ring.find(old)
    assert after is not None
    assert after.meter.begin(0.0) is not None, "a new file is no new minute"
    assert ring.find(new) is not None
    touch(path, entry("b", new), 20)
    assert ring.reload_if_changed()
    assert ring.find(old) is None


def test_a_bad_new_file_leaves_the_keys_as_they_were_and_is_told_once(tmp_path: Path) -> None:
    key = new_key()
    path = write(tmp_path / "keys", entry("a", key))
    ring = KeyRing(path)
    touch(path, "rubbish", 10)
    with pytest.raises(KeyFileError):
        ring.reload_if_changed()
    assert not ring.reload_if_changed()
    assert ring.find(key) is not None


def test_the_command_makes_a_key_and_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["key", "new", "laptop", "--tenant", "research"]) == 0
    shown = capsys.readouterr()
    key = shown.err.split()[-1]
    assert key not in shown.out
    assert tomllib.loads(shown.out)["key"][0]["tenant"] == "research"
    assert KeyRing(write(tmp_path / "keys", shown.out)).find(key) is not None
