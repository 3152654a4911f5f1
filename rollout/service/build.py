"""Builds a service: chooses what it stores, records and measures, and connects the parts."""

from __future__ import annotations

from rollout.config import ServiceConfig
from rollout.metrics.tracker import Tracker
from rollout.service.engine_api import EngineLike
from rollout.service.engine_groups import EngineGroups
from rollout.service.journal import Journal
from rollout.service.loop import Service, ServiceTiming
from rollout.service.persistence import Persistence
from rollout.service.recording import Ledger
from rollout.service.restoring import restore
from rollout.service.session import SendLimits, Sessions
from rollout.transport.sockets import ServiceEnd, ServiceTransport


def open_service(
    engine: EngineLike,
    config: ServiceConfig | None = None,
    *,
    transport: ServiceTransport | None = None,
    journal: Journal | None = None,
    ledger: Ledger | None = None,
    tracker: Tracker | None = None,
    timing: ServiceTiming | None = None,
    send_limits: SendLimits | None = None,
) -> Service:
    """Bind the address of a service, restore its journal, and return the service, ready to `run`.

    Example:
        service = open_service(engine, ServiceConfig(endpoint="tcp://127.0.0.1:*"))
        print(service.endpoint)
        service.run()

    Args:
        config: `endpoint` is tcp://127.0.0.1:PORT (0 or *: any free one), tcp://[::1]:PORT or ipc://PATH; with `keys` any
            tcp://HOST:PORT. `journal`, `ledger` and `exit_when_stalled_s` are not read.
        transport: replaces the endpoint and the keys of `config`, e.g. `rollout.transport.loopback.LoopbackService()`.
        journal: stores sessions so that they survive the process; closed with the service.
        ledger: records groups, samples and refreshes; closed with the service.
        tracker: records the metrics; closed with the service.
        timing, send_limits: durations of the loop; sizes of messages to a client.

    Raises:
        ValueError: other hosts can reach the address and there are no keys, or it cannot be bound.
        InputError: the journal is damaged, or the ledger cannot be written.
    """
    config, timing = config or ServiceConfig(), timing or ServiceTiming()
    transport = transport if transport is not None else ServiceEnd(config.endpoint, engine.limits, config.keys)
    persistence = Persistence() if journal is None else journal
    sessions = Sessions(engine.limits.max_clients, persistence, send_limits or SendLimits(), timing.clock)
    tracker = tracker if tracker is not None else Tracker()
    groups = EngineGroups(engine, tracker, config.max_outbox_bytes, timing.clock, ledger)
    service = Service(groups, sessions, transport, config, timing)
    groups.ledger.started(engine)
    if journal is not None:
        restore(journal, sessions, groups, engine)
    return service
