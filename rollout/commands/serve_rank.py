"""`rollout serve` as one of several ranks that torchrun, Ray or SLURM has started: rank 0 serves, the others follow it."""

from __future__ import annotations

import os
import sys

from rollout.commands.arguments import ServeArgs
from rollout.config import CannotServe, Config, InputError
from rollout.engine.parallel.placement import RankPosition, position_of
from rollout.engine.values import RankLost


def position(config: Config, args: ServeArgs) -> RankPosition:
    """Return which rank this process is. Raises InputError for options that ranks of torchrun cannot have."""
    others = {
        "--restart": (args.restart, "let torchrun start all ranks again: --max-restarts"),
        "--replicas": (config.fleet.is_router, "start each replica with torchrun, and let it join: --join"),
    }
    for flag, (on, instead) in others.items():
        if on:
            raise InputError(f"{flag} with --engine.tp-launcher torchrun: {instead}")
    try:
        return position_of(os.environ, config.engine.tp)
    except ValueError as error:
        raise InputError(str(error)) from None


def follow(config: Config, place: RankPosition) -> int:
    """Follow rank 0 until it ends. Returns the exit status. Raises CannotServe."""
    from rollout import models

    with models.without_collection():
        from rollout.engine.parallel.follower import FAILED, follow_placed

    models.hide_progress_bars()
    try:
        return follow_placed(place, str(models.resolve(config.engine.model)))
    except models.ModelNotFound as error:
        raise CannotServe(str(error)) from error
    except RankLost as error:
        print(f"rollout serve: rank {place.rank} of {place.ranks}: {error}", file=sys.stderr, flush=True)
        return FAILED
