"""`rollout http`: other people's dialects in front of a running service."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from pathlib import Path

from rollout.commands.arguments import HttpArgs
from rollout.commands.connecting import connected
from rollout.config import InputError
from rollout.process import write_atomically


def run(args: HttpArgs) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status. Raises InputError, ModelNotFound, RolloutError."""
    try:
        from rollout.http.facade import Settings
        from rollout.http.facade import run as run_facade
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed: pip install 'rollout[http]'") from error
    from rollout import models

    try:
        settings = Settings(
            host=args.host,
            port=args.port,
            admin_host=args.admin_host,
            admin_port=args.admin_port,
            token=token_of(args.token_file),
            names=args.model_name,
            overlong=args.overlong,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    models.hide_progress_bars()

    def ready(url: str, admin: str) -> None:
        where = url if admin == url else f"{url}, administrators at {admin}"
        print(f"rollout: {client.info.model} of {args.address} at {where}", file=sys.stderr, flush=True)
        if args.ready_file:
            write_atomically(Path(args.ready_file), f"{url}\n{admin}\n")

    with connected(args.address, "rollout http") as client:
        tokenizer = models.load_tokenizer(models.resolve(args.tokenizer or client.info.model))
        gc.collect()
        gc.freeze()  # a tokenizer's library has half a million objects: walking them takes longer than a hundred requests
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(run_facade(client, tokenizer, settings, ready))
        finally:
            gc.unfreeze()
    return 0


def token_of(path: str | None) -> str | None:
    """Read a token. Raises InputError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"--token-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--token-file {path}: {error}") from error


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's maker of event loops where it is installed, else asyncio's."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    maker: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return maker
