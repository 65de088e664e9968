"""From tokens to text: what counts, what is shown, where it ends."""

from __future__ import annotations

from services.gateway.text.detokenizer import ByteLevelDetokenizer
from services.gateway.text.text_stream import TextStream

TOKENS = [b"", b"He", b"llo", b" wor", b"ld", "漢".encode()[:2], "漢".encode()[2:], b"!"]


def stream(**options: object) -> TextStream:
    return TextStream(ByteLevelDetokenizer(TOKENS), **options)  # type: ignore[arg-type]


def run(text: TextStream, ids: list[int]) -> str:
    shown = ""
    for token_id in ids:
        shown += text.push(token_id)
        if text.stopped:
            return shown
    return shown + text.flush()


def test_the_token_that_ends_the_output_counts_and_spells_nothing() -> None:
    text = stream(stop_token_ids=[4])
    assert run(text, [1, 2, 4]) == "Hello"
    assert text.num_tokens == 3


def test_tokens_after_the_one_that_completes_a_stop_string_do_not_count() -> None:
    text = stream(stops=["lo w"])
    assert run(text, [1, 2, 3, 4, 7]) == "Hel"
    assert text.num_tokens == 3
    assert text.stopped


def test_stop_strings_wait_for_min_tokens() -> None:
    assert run(stream(stops=["Hello"], min_tokens=2), [1, 2, 3]) == "Hello wor"
    assert run(stream(stops=["wor"], min_tokens=2), [1, 2, 3, 4]) == "Hello "


def test_a_character_is_shown_when_its_last_byte_is_there_and_not_before() -> None:
    text = stream()
    assert [text.push(5), text.push(6), text.push(7)] == ["", "漢", "!"]


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert run(stream(), [1, 5]) == "He"


def test_bytes_that_are_no_character_are_replaced_as_in_one_shot_decoding() -> None:
    assert run(stream(), [5, 1]) == b"\xe6\xbc He".decode(errors="replace").replace(" ", "")


def test_a_token_past_the_vocabulary_spells_nothing() -> None:
    assert run(stream(), [1, 900, 2]) == "Hello"
