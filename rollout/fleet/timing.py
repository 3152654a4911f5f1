"""Time limits of a router for its replicas: restarts, joins, links, answers."""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds. Tests shorten them; users do not set them."""

    poll_s: float = 0.2
    """interval between two polls of the replicas while nothing arrives from them"""
    status_s: float = 1.0
    """interval between two status requests to a replica"""

    # processes
    first_pause_s: float = 0.5
    """delay before a process is started again; doubles each time"""
    max_pause_s: float = 30.0
    steady_s: float = 10.0
    """a process that ran longer than this starts again with the first delay"""
    start_s: float = 600.0
    """longest time from the start of a process until it joins"""
    return_s: float = 5.0
    """after the router was killed: time for its replicas to join again, before others are started in their places"""
    stop_s: float = 15.0
    """longest time that a process may take to stop; then it is killed"""

    # joins
    silent_s: float = 4.0
    """a name is free for another process once its own has not reported for this long"""
    forget_s: float = 60.0
    """a lost replica is removed once it has not reported for this long"""

    # links
    welcome_s: float = 10.0
    """longest time from connecting to a replica until its Welcome"""
    lost_s: float = 1.5
    """a replica whose link is down for this long is lost; libzmq notices a stopped process after 4 s"""
    answer_s: float = 120.0
    """longest wait for replicas to pause, sleep or wake"""
    stopping_s: float = 10.0
    """longest time that a replica may take to stop, once it has returned children that were not aborted"""
    overdue_s: float = 600.0
    """longest time for an answer, including one for a whole refresh"""
    stalled_s: float = 300.0
    """longest time without any message from a connected replica; one step may take minutes"""
    no_progress_s: float = 60.0
    """longest time that the counters of a replica with groups may stay the same"""


TIMING = Timing()
