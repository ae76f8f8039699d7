"""The desk at which other threads ask the coordinator's loop."""

from __future__ import annotations

import threading

import pytest

from eroica.desk import Desk
from eroica.errors import UnavailableError


def test_who_asks_for_what_takes_too_long_is_told_so_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eroica.desk.PATIENCE_S", 0.05)
    desk = Desk()
    has_begun, may_end = threading.Event(), threading.Event()

    def slow() -> bool:
        has_begun.set()
        return may_end.wait(60)

    def loop() -> None:
        while not has_begun.is_set():
            desk.attend()

    thread = threading.Thread(target=loop)
    thread.start()
    with pytest.raises(UnavailableError, match="busy"):
        desk.call(slow)
    may_end.set()
    thread.join()
    desk.close()


def test_a_time_out_within_a_call_is_the_calls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()

    def fails() -> None:
        raise TimeoutError("of a disk")

    said: list[BaseException] = []

    def asks() -> None:
        try:
            desk.call(fails)
        except TimeoutError as error:
            said.append(error)

    thread = threading.Thread(target=asks)
    thread.start()
    while thread.is_alive():
        desk.attend()
    assert [str(error) for error in said] == ["of a disk"]
    desk.close()
