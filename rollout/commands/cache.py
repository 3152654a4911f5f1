"""`rollout cache`: a proxy that answers groups it has seen from a folder."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.commands.arguments import CacheArgs
from rollout.commands.connecting import connected
from rollout.commands.interrupt import INTERRUPTED
from rollout.commands.progress import write_line
from rollout.config import InputError
from rollout.engine.types import Limits
from rollout.process import check_writable, write_atomically

if TYPE_CHECKING:
    from rollout.cache.proxy import CacheProxy
    from rollout.cache.store import FolderStore


def run(args: CacheArgs) -> int:
    """Serve until Ctrl-C, whose exit status is 130, or SIGTERM: 0. Raises InputError, ServiceLost, KeyRefused."""
    from rollout.cache.store import FolderStore

    check_writable("--ready-file", args.ready_file)
    if not args.gib > 0:
        raise InputError(f"--gib {args.gib}: must be positive")
    try:
        store = FolderStore(Path(args.dir), int(args.gib * 2**30))
    except (ValueError, OSError) as error:
        raise InputError(f"--dir {args.dir}: {error}") from None
    try:
        return serve(args, store, write_line)
    finally:
        store.close()


def serve(args: CacheArgs, store: FolderStore, write: Callable[[str], None]) -> int:
    """Serve from a folder. Returns the exit status."""
    from rollout.transport.sockets import ServiceEnd

    limits = recorded_limits(store) if args.offline else limits_of(args)
    try:
        end = ServiceEnd(args.endpoint, limits)
    except ValueError as error:
        raise InputError(f"--endpoint: {error}") from None
    try:
        proxy = proxy_of(args, store, end, limits)
        signals: list[int] = []

        def stop(number: int, frame: object) -> None:
            signals.append(number)
            proxy.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        behind = "offline" if args.offline else f"in front of {args.address}"
        write(f"rollout cache: {end.endpoint}, {behind}; {len(store)} entries, {store.bytes / 2**30:.2f} GiB, in {args.dir}")
        if args.ready_file:
            write_atomically(Path(args.ready_file), end.endpoint)
        proxy.run()
        write(f"rollout cache: stopped; {proxy.tally.hits} hits, {proxy.tally.misses} misses")
        return INTERRUPTED if signal.SIGINT in signals else 0
    finally:
        end.close(linger=0.5)


def limits_of(args: CacheArgs) -> Limits:
    """Return the limits of the service, which must run. Raises InputError, ServiceLost, KeyRefused."""
    with connected(args.address, "rollout cache", wait_s=args.wait) as client:
        return client.info.limits


def recorded_limits(store: FolderStore) -> Limits:
    """Return the limits of the service that was recorded. Raises InputError if none was."""
    from rollout.cache.recorder import stored_welcome

    welcome = stored_welcome(store, Limits())
    if welcome is None:
        raise InputError("--offline: nothing was recorded in this folder; run once without --offline, in front of a service")
    return welcome.limits


def proxy_of(args: CacheArgs, store: FolderStore, end: object, limits: Limits) -> CacheProxy:
    """Make the proxy, with or without a service behind it."""
    from rollout.cache.offline import OfflineService, OfflineWeights
    from rollout.cache.proxy import CacheProxy, Connect
    from rollout.cache.recorder import stored_welcome
    from rollout.cache.upstream import ServiceBehind

    welcome = stored_welcome(store, limits)
    if args.offline and welcome is not None:
        connect: Connect = partial(OfflineService, OfflineWeights(welcome, store))
    else:
        connect = partial(ServiceBehind, args.address, limits)
    return CacheProxy(end, store, connect, limits, args.offline)  # type: ignore[arg-type]
