"""What `pagefleet top` draws, as plain text."""

from dataclasses import replace

from rich.console import Console
from view_factories import make_cluster_view

from pagefleet.cluster.cluster_watch import ClusterUpdate
from pagefleet.cluster.recent_rates import Rates
from pagefleet.cluster.top_view import TopView, sparkline, strip
from pagefleet.cluster.watch_conversion import update_to_proto

RATES = Rates(10.0, 1234.0, 5.0, 0.12, 0.5)


def make_update(*sizes: int, **changes: object):
    view = replace(make_cluster_view(*sizes), **changes)
    return update_to_proto(ClusterUpdate(view, RATES, 1000, 250))


def text_of(screen: TopView, update, width: int = 140, height: int = 60) -> str:
    console = Console(width=width, height=height, no_color=True)
    with console.capture() as capture:
        console.print(screen.draw(update, width, height))
    return capture.get()


def test_shows_pools_rates_decisions_queue_and_leases():
    screen, update = TopView(), make_update(2, 64, 32)
    screen.take(update)
    text = text_of(screen, update)
    assert text.startswith("replica"), "as `status` begins"
    for words in (
        *("replica-1 host", "1,234 tokens/s", "p50 120 ms, p99 500 ms", "prefix hits 25%"),
        *("chatcmpl-0028", "ms; ", "no replica can start it now", "leases: 112", "17 requests"),
        "<b>umbrella</b>",
    ):
        assert words in text, words


def test_a_pool_is_a_strip_of_signs():
    def cells(*states: int) -> bytes:
        return bytes(state | 31 << 3 for state in states)

    assert strip(cells(0, 1, 2, 3, 4, 5), 80).plain == ".+#%!h"
    assert strip(cells(*[2] * 50, *[0] * 50), 10).plain == "#####....."
    assert strip(cells(0, 4, 0, 4), 2).plain == "!!", "the rarer sight wins a tie"
    assert strip(b"", 10).plain == ""


def test_what_later_updates_leave_out_stays_on_the_screen():
    screen, first = TopView(), make_update(2, 64, 0)
    screen.take(first)
    second = make_update(2, 64, 0, pools=(), decisions=())
    screen.take(second)
    assert text_of(screen, second).count("chatcmpl-0028") == 1
    assert "…" not in text_of(screen, second)
    third = make_update(1, 64, 0, pools=())
    screen.take(third)
    assert set(screen._maps) == {("replica-0", "device")}


def test_64_replicas_fit_a_screen():
    screen, update = TopView(), make_update(64, 100_000, 20_000)
    screen.take(update)
    for height in (40, 60, 100):
        lines = text_of(screen, update, 120, height).splitlines()
        assert len(lines) <= height and max(map(len, lines)) <= 120
    assert "more" in text_of(screen, update)


def test_a_name_with_control_characters_moves_no_cursor():
    view = make_cluster_view(1, 16, 0)
    evil = replace(view.waiting[0], request_id="\x1b[2Jgone\r\n[red]x[/red]")
    update = make_update(1, 16, 0, waiting=(evil,))
    text = text_of(TopView(), update)
    assert "\x1b" not in text and "?[2Jgone??[red]x[/red]" in text


def test_sparkline_is_as_high_as_its_values():
    assert sparkline([0.0, 4.0, 8.0]) == " ▄█"
    assert sparkline([0.0, 0.0]) == "" and sparkline([]) == ""
