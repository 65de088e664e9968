from __future__ import annotations

from pathlib import Path

import pytest

from services import auth

SECRET = "sixteen characters"


def test_every_field_of_a_handoff_changes_its_key() -> None:
    fields = (b"0123456789abcdef", 1, "p", "d", 100)
    keys = {
        auth.handoff_key(SECRET, *fields),
        auth.handoff_key("another secret of ours", *fields),
        auth.handoff_key(SECRET, b"0123456789abcdeg", 1, "p", "d", 100),
        auth.handoff_key(SECRET, b"0123456789abcdef", 2, "p", "d", 100),
        auth.handoff_key(SECRET, b"0123456789abcdef", 1, "pd", "", 100),
        auth.handoff_key(SECRET, b"0123456789abcdef", 1, "", "pd", 100),
        auth.handoff_key(SECRET, b"0123456789abcdef", 1, "p", "d", 101),
    }
    assert len(keys) == 7
    assert auth.handoff_key(SECRET, *fields) in keys


def test_only_the_token_of_the_same_secret_is_accepted() -> None:
    header = auth.request_headers(SECRET)["authorization"]
    assert auth.authorized(SECRET, header)
    for wrong in (None, "", "Bearer ", header + "x", header.removeprefix("Bearer "), "Bearer é"):
        assert not auth.authorized(SECRET, wrong)
    assert SECRET not in header


def test_a_secret_comes_from_a_value_or_a_file_and_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("from a file, long enough\n")
    assert auth.read_secret(None, path) == "from a file, long enough"
    for value in (None, "", "short"):
        with pytest.raises(ValueError, match="secret"):
            auth.read_secret(value, None)
