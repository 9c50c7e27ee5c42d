"""Stop strings: nothing of one is ever shown, what only looked like one is shown once."""

from hypothesis import given
from hypothesis import strategies as st

from pagefleet.cluster.stop_strings import StopStrings


def run(stops, pieces):
    """The text shown after each piece, and whether it stopped."""
    matcher = StopStrings(tuple(stops))
    shown = [matcher.push(piece) for piece in pieces]
    return shown, matcher


def test_the_beginning_of_a_stop_string_never_leaks():
    shown, matcher = run(["DEFGHIJ"], ["DEF", "G", "HI", "J"])
    assert shown == ["", "", "", ""]
    assert matcher.stopped


def test_what_was_withheld_in_vain_is_shown_once():
    shown, matcher = run(["DEFGHIJ"], ["DEF", "x"])
    assert shown == ["", "DEFx"]
    assert matcher.flush() == ""
    assert not matcher.stopped


def test_the_end_of_the_text_shows_what_was_withheld():
    shown, matcher = run(["DEFGHIJ"], ["abcDEF"])
    assert shown == ["abc"]
    assert matcher.flush() == "DEF"
    assert matcher.flush() == ""


def test_text_before_a_stop_string_inside_one_piece_is_shown():
    shown, matcher = run(["stop"], ["go on, stop there"])
    assert shown == ["go on, "]
    assert matcher.stopped
    assert matcher.push("more") == ""


def test_a_stop_string_inside_the_beginning_of_another():
    shown, _ = run(["abcd", "bc"], ["xab", "c"])
    assert shown == ["x", "a"]


def test_of_two_that_complete_together_the_longer_counts():
    shown, _ = run(["c", "abc"], ["xab", "c"])
    assert shown == ["x", ""]


def test_a_repeated_beginning_is_walked_back_rightly():
    shown, matcher = run(["aab"], ["a", "a", "a", "b"])
    assert "".join(shown) == "a"
    assert matcher.stopped


def test_without_stop_strings_all_passes():
    shown, matcher = run([], ["a", "b"])
    assert shown == ["a", "b"]
    assert matcher.flush() == ""


def plain_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The slow and obvious way."""
    for end in range(1, len(text) + 1):
        fits = [stop for stop in stops if text[:end].endswith(stop)]
        if fits:
            return text[: end - max(map(len, fits))], True
    return text, False


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_any_pieces_give_the_same_text(stops, pieces):
    expected, stops_there = plain_cut("".join(pieces), stops)
    matcher = StopStrings(tuple(stops))
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert expected.startswith(shown), "the beginning of a stop string leaked"
    assert matcher.stopped == stops_there
    assert shown + ("" if stops_there else matcher.flush()) == expected
