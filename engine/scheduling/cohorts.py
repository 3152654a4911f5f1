"""Which of a client's groups are ordered together where an order goes by lengths: those that came at about the same time.

    groups   a b c …………… d ………… e          steps →
    waves    └── 0 ──┘  └ 3 ┘  └ 4 ┘       each has the number of its first group

Such an order starts long children before short ones, and the longest of each group last. In a stream without end a short child,
or a longest one, would so wait for ever. Waves are served oldest first, and a wave takes groups for WAVE_STEPS steps only: so
whoever waits, waits for a number of others that does not grow any more."""

from __future__ import annotations

WAVE_STEPS = 256
"""steps of the engine for which a wave takes groups: a trainer sends those of its step within a few of them"""


class Cohorts:
    """The open wave of each client that has unfinished groups. Written by `Groups`."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, int]] = {}
        """its number, and the step from which on it takes no group"""

    def join(self, client: str, number: int, step: int) -> int:
        """Return the wave of group `number`, which comes at a step: the open one, else one that it opens."""
        wave, closes = self._open.get(client, (number, step))
        if step >= closes:
            wave = number
            self._open[client] = wave, step + WAVE_STEPS
        return wave

    def left(self, client: str) -> None:
        """Forget a client, whose last group has ended."""
        self._open.pop(client, None)
