"""The lines of appointments: times, shares of tenants, bounds."""

import random

import pytest

from pagefleet.cluster.appointments import AppointmentBook, AppointmentConfig


def make_book(**fields: object) -> AppointmentBook:
    return AppointmentBook(AppointmentConfig(**fields), random.Random(0))  # pyright: ignore


def make(book: AppointmentBook, now: float = 0.0, tenant: str = "a", **times: float):
    return book.make(tenant, now, **({"room_in_s": 1.0, "service_s": 0.5} | times))


def test_appointments_are_laid_end_to_end() -> None:
    book = make_book()
    assert [make(book)[1] for _ in range(3)] == [1.0, 1.5, 2.0]
    assert book.booked_s("a", 0.5) == 2.0
    book.check_integrity()


def test_tenants_have_lines_of_their_own() -> None:
    book = make_book()
    for _ in range(20):
        make(book, tenant="heavy")
    assert make(book, tenant="light")[1] == 1.0
    assert book.tenants == {"heavy", "light"} and book.booked_s("nobody", 0.0) == 0.0
    book.check_integrity()


def test_an_appointment_is_kept_early_or_late() -> None:
    book = make_book(grace_s=5.0)
    token, after_s = make(book, room_in_s=2.0)
    appointment = book.find(token, 1.0)
    assert appointment is not None and book.is_early(appointment, 1.0)
    assert not book.is_early(appointment, after_s)
    assert book.find(token, after_s + 5.1) is None
    book.keep(token)
    assert book.find(token, after_s) is None
    assert (book.num_made, book.num_kept, book.tenants) == (1, 1, set())


def test_no_time_beyond_the_horizon_is_promised() -> None:
    book = make_book(max_retry_after_s=10.0)
    answers = [make(book, service_s=4.0) for _ in range(5)]
    assert [after_s for _, after_s in answers] == [1.0, 5.0, 9.0, 10.0, 10.0]
    assert [bool(token) for token, _ in answers] == [True, True, True, False, False]


def test_clients_that_stay_away_are_forgotten_and_learnt_from() -> None:
    book = make_book()
    for moment in range(0, 1000, 10):
        make(book, float(moment), service_s=0.1)
        book.check_integrity()
    assert len(book) <= 2
    assert book.kept_share < 0.05


def test_the_book_is_bounded() -> None:
    book = make_book(max_appointments=10)
    for _ in range(100):
        make(book, service_s=0.0)
    assert len(book) == 10


@pytest.mark.parametrize("token", ["", "forged"])
def test_an_unknown_token_is_nothing(token: str) -> None:
    assert make_book().find(token, 0.0) is None
