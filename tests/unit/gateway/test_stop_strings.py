"""Stop strings: never shown, not even in part; the same cut however the text arrives."""

from __future__ import annotations

import pytest

from services.gateway.text.stop_strings import StopStrings


def feed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What is shown after each piece, and whether a stop string was met."""
    cutter = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, stopped = cutter.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, cutter.flush()], False


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_stop_string_split_anywhere_is_cut_off_whole(cut: int) -> None:
    text = "one STOP two"
    shown, stopped = feed(["STOP"], [text[:cut], text[cut:]])
    assert "".join(shown) == "one "
    assert stopped


def test_nothing_is_shown_that_may_become_a_stop_string() -> None:
    shown, stopped = feed(["\n\nHuman:"], ["Hi", "\n", "\n", "Hum", "our"])
    assert shown == ["Hi", "", "", "", "\n\nHumour", ""]
    assert not stopped


def test_what_was_held_back_comes_at_the_end() -> None:
    assert feed(["END"], ["the E", "N"]) == (["the ", "", "EN"], False)


def test_of_overlapping_candidates_the_later_one_may_be_the_match() -> None:
    assert feed(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], True)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    """Whether or not a longer one had begun before it: as if the text had come character by character."""
    for pieces in (["abcde"], ["ab", "cde"], list("abcde")):
        shown, stopped = feed(["abcde", "c"], pieces)
        assert ("".join(shown), stopped) == ("ab", True)


def test_of_two_that_end_together_the_longer_one_is_cut_off() -> None:
    for pieces in (["xyz"], list("xyz")):
        shown, stopped = feed(["z", "yz"], pieces)
        assert ("".join(shown), stopped) == ("x", True)


def test_without_stop_strings_nothing_is_held() -> None:
    assert feed([], ["a", "b"]) == (["a", "b", ""], False)
