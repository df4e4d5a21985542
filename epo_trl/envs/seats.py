"""Seats: the right to one environment among those that share a process."""

from __future__ import annotations

from itertools import count


class Seats:
    """Numbered seats. `len()` is how many are taken."""

    def __init__(self) -> None:
        self._seats: set[int] = set()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._seats)

    def take_seat(self) -> int:
        """Returns the number of a new seat."""
        seat = next(self._numbers)
        self._seats.add(seat)
        return seat

    def forget_seat(self, seat: int) -> None:
        """Marks a seat as free."""
        self._seats.discard(seat)
