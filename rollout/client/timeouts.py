"""How long a client waits for a service that is gone, and how it tells that the service was started again."""

from __future__ import annotations

from typing import NamedTuple

from transport.errors import NotBelieved
from transport.messages import Welcome


class Timeouts(NamedTuple):
    """How long one client waits, in seconds."""

    link_s: float
    """without a connection, to a service that would come back empty"""
    stall_s: float
    """with a connection, while the service's loop says nothing"""
    restart_s: float
    """to one that comes back with what it had, or gets it again"""
    resubmit: bool
    """open groups are sent again to a service that has lost them"""

    def seconds(self, welcome: Welcome | None) -> float:
        """Return for how long somebody waits for a connection; `welcome`: the service's last one."""
        lasting = self.resubmit or (welcome is not None and welcome.starts > 0)
        return max(self.link_s, self.restart_s) if lasting and welcome is not None else self.link_s


def restarted(old: Welcome, new: Welcome) -> bool:
    """Whether the service was started again in between."""
    return (old.incarnation, old.starts) != (new.incarnation, new.starts)


FACTS = ("model", "vocab_size", "context", "eos_token_ids")


def check_same(old: Welcome | None, new: Welcome) -> None:
    """Raises NotBelieved for a service that was not started again, and says to be another than before."""
    if old is None or restarted(old, new):
        return
    for name in FACTS:
        if getattr(old, name) != getattr(new, name):
            raise NotBelieved(f"{name} {getattr(new, name)!r:.80} of a service that said {getattr(old, name)!r:.80} before")
