"""Seats: each is the right to one environment among those that share a process."""

from __future__ import annotations

from itertools import count


class Seats:
    """Numbered seats. `len()` is the number of seats in use."""

    def __init__(self) -> None:
        self._seats: set[int] = set()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._seats)

    def take_seat(self) -> int:
        """Reserves a seat and returns its number."""
        seat = next(self._numbers)
        self._seats.add(seat)
        return seat

    def forget_seat(self, seat: int) -> None:
        """Frees a seat."""
        self._seats.discard(seat)
