"""A fleet on a Ray of this machine, as a user starts it. Run by `make ray`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rollout.client.api import RolloutClient
from rollout.config import Config, FleetConfig
from rollout.engine.values import Sampling
from rollout.process import service_process
from tests.support.ranks import saved
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
WAIT = 300.0
"""for what comes: a bound for hangs only"""
ASKED = [[5, 6, 7 + i] for i in range(4)], [Sampling(n=3, max_tokens=16, seed=i) for i in range(4)]


def replicas(client: RolloutClient) -> dict[str, Any]:
    return {one["name"]: one for one in client.status()["replicas"]}


def serves_both(client: RolloutClient) -> bool:
    return bool(client.status()["fleet"]["serving"] == 2)


def told(client: RolloutClient) -> list[Any]:
    groups = client.generate_groups(*ASKED, timeout=WAIT)
    return [(s.token_ids.tolist(), s.logprobs.tolist(), s.weight_versions) for group in groups for s in group]


def test_an_actor_that_is_killed_is_back_and_serves_the_live_version(tiny_config: Config) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    named = AutoModelForCausalLM.from_pretrained(tiny_config.engine.model, dtype=torch.float32).state_dict()
    new = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in named.items()}
    config = msgspec.structs.replace(tiny_config, fleet=FleetConfig(replicas=2, ray="local"))
    with (
        service_process(config, start_timeout_s=WAIT) as router,
        RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client,
    ):
        assert "libtorch" not in Path(f"/proc/{router.pid}/maps").read_text()
        assert set(replicas(client)) == {"ray-0", "ray-1"} and serves_both(client)
        first = told(client)
        client.refresh(new, timeout=WAIT)
        live = told(client)
        assert live != first
        victim = psutil.Process(replicas(client)["ray-0"]["pid"])
        actor = victim.parent()
        assert actor is not None and actor.pid != router.pid and "ray" in " ".join(actor.cmdline()).lower()
        os.kill(actor.pid, signal.SIGKILL)
        until(lambda: ended(victim), "it ends with its actor", WAIT)
        assert told(client) == live, "the other one serves"
        until(lambda: serves_both(client), "it is back", WAIT)
        back = replicas(client)["ray-0"]
        assert back["version"] == 1 and back["pid"] != victim.pid and back["deaths"] == 1
        assert told(client) == live
        os.kill(back["pid"], signal.SIGKILL)  # the process alone: its actor starts another
        until(lambda: replicas(client)["ray-0"]["deaths"] == 2, "it is noticed", WAIT)
        until(lambda: serves_both(client), "it is back", WAIT)
        assert told(client) == live
        client.change_replicas("scale", count=1)
        until(lambda: len(replicas(client)) == 1, "one has gone", WAIT)
        assert told(client) == live
        left = [psutil.Process(one["pid"]) for one in replicas(client).values()]
        left += psutil.Process(router.pid).children(recursive=True)
    until(lambda: all(map(ended, left)), "all have ended with the router", WAIT)


def test_a_replica_of_two_ranks_is_two_actors_with_one_fate(tiny_config: Config, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "float32")
    engine = msgspec.structs.replace(tiny_config.engine, model=model, tp=2, threads=1)
    one = msgspec.structs.replace(tiny_config, engine=msgspec.structs.replace(engine, tp=1, tree_sums=True))
    with service_process(one, start_timeout_s=WAIT) as alone, RolloutClient(alone.endpoint, connect_timeout_s=WAIT) as client:
        wanted = told(client)
    config = msgspec.structs.replace(tiny_config, engine=engine, fleet=FleetConfig(replicas=1, ray="local"))
    with (
        service_process(config, start_timeout_s=WAIT) as router,
        RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client,
    ):
        assert told(client) == wanted, "the bits of one rank"
        for victim in ("actor", "rank"):
            ranks = ranks_of(router.pid)
            assert len(ranks) == 2 and ranks[0].parent() != ranks[1].parent(), "an actor each"
            parent = ranks[1].parent()
            assert parent is not None
            os.kill(parent.pid if victim == "actor" else ranks[1].pid, signal.SIGKILL)
            until(lambda ranks=ranks: all(map(ended, ranks)), "both end", WAIT)
            until(lambda: client.status()["fleet"]["serving"] == 1, "it is back", WAIT)
            assert told(client) == wanted
        left = ranks_of(router.pid)
    until(lambda: all(map(ended, left)), "all have ended with the router", WAIT)


def ranks_of(router: int) -> list[psutil.Process]:
    """Return the processes of the ranks of a replica, by rank."""
    found = {}
    for each in psutil.process_iter():
        try:
            variables = each.environ() if "rollout" in each.cmdline() else {}
        except psutil.Error:
            continue
        if {"RANK", "WORLD_SIZE"} <= variables.keys() and each.status() != psutil.STATUS_ZOMBIE:
            found[int(variables["RANK"])] = each
    return [each for _, each in sorted(found.items())]


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
