"""`rollout http`: the HTTP gateway of a running service."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.commands.arguments import HttpArgs
from rollout.commands.connecting import connected
from rollout.commands.interrupt import INTERRUPTED
from rollout.commands.progress import write_line
from rollout.config import InputError
from rollout.process import check_ready_file, write_atomically
from rollout.transport.keys.files import BadKeys, read_private

if TYPE_CHECKING:
    from rollout.http.settings import Settings


def run(args: HttpArgs) -> int:
    """Serve until Ctrl-C, whose exit status is 130, or SIGTERM: 0. Raises InputError, ModelNotFound, RolloutError."""
    try:
        from rollout.http.gateway import run as run_gateway
        from rollout.http.request_log import log_to_stderr
        from rollout.http.upstream import model_name
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed: pip install 'rl-rollout[http]'") from error
    from rollout import models

    check_ready_file(args.ready_file)
    settings = settings_of(args)
    models.hide_progress_bars()
    log_to_stderr(args.log_level)

    def ready(url: str, admin: str) -> None:
        where = f"{url}/v1" if admin == url else f"{url}/v1, administrators at {admin}"
        names = ", ".join(settings.names or [model_name(client.info)])
        print(f"rollout http: {names} of {args.address} at {where}; {url} lists the routes", file=sys.stderr, flush=True)
        if args.ready_file:
            write_atomically(Path(args.ready_file), f"{url}\n{admin}\n")

    signals: list[int] = []

    def stopping(number: int) -> None:
        if not signals:
            write_line(f"rollout http: stopping; open requests have {settings.limits.grace_s:.0f} s to finish")
        signals.append(number)

    with connected(args.address, "rollout http", wait_s=args.wait) as client:
        tokenizer = models.load_tokenizer(models.resolve(args.tokenizer or client.info.model))
        gc.collect()
        gc.freeze()  # half a million objects of the tokenizer: collecting them takes as long as a hundred requests
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(run_gateway(client, tokenizer, settings, ready, stopping=stopping))
        finally:
            gc.unfreeze()
    write_line("rollout http: stopped")
    return INTERRUPTED if signal.SIGINT in signals else 0


def settings_of(args: HttpArgs) -> Settings:
    """Make the settings of the gateway. Raises InputError."""
    from rollout.http.settings import Settings

    try:
        return Settings(
            host=args.host,
            port=args.port,
            admin_host=args.admin_host,
            admin_port=args.admin_port,
            token=token_of(args.token_file),
            allowed_hosts=args.allowed_hosts,
            names=args.served_model_name,
            overlong=args.overlong,
            request_log=args.access_log,
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def token_of(path: str | None) -> str | None:
    """Read an access token. Raises InputError, also for a file that other users can read."""
    if path is None:
        return None
    try:
        return read_private(path, "--token-file").decode().strip()
    except BadKeys as error:
        raise InputError(str(error)) from None
    except UnicodeDecodeError as error:
        raise InputError(f"--token-file {path}: must be UTF-8: {error}") from error


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop if it is installed, None = asyncio's."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
