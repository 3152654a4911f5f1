"""All ways in which a fleet gets weights: adapters, differences, to replicas that share no memory with the router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.client.api import RolloutClient
from rollout.engine.values import Sampling
from rollout.fleet.fleet import Fleet
from rollout.fleet.replica import Replica, State
from rollout.fleet.transaction import ReplicaTransaction
from rollout.transport import messages as m
from rollout.transport.errors import SourceUnreachable, WeightsRefused, WrongBase
from rollout.transport.weights.tensors import Tensors
from tests.support.adapters import write
from tests.support.fleet import WAIT, Threads, fleet_of, router_of, step_until
from tests.support.joined import JoinedFleet, joined_fleet
from tests.support.tiny import tiny, tiny_engine
from tests.support.waiting import until
from tests.support.wire import serving

ASKED = [[5, 6, 7 + i] for i in range(4)], [Sampling(n=4, max_tokens=12, seed=i, ignore_eos=True) for i in range(4)]


def made(client: RolloutClient) -> list[Any]:
    """Tokens, log-probs and versions of some groups, with the digest of the weights."""
    groups = client.generate_groups(*ASKED, timeout=WAIT)
    samples = [(s.token_ids.tolist(), s.logprobs.tolist(), s.weight_versions) for group in groups for s in group]
    return [samples, client.weights_status()["digest"]]


@contextmanager
def fleet_and_one() -> Iterator[tuple[Fleet, Threads, RolloutClient, RolloutClient]]:
    """A fleet of two, a single service of the same model, and a client of each."""
    with (
        fleet_of(2, make=tiny_engine) as (fleet, threads),
        router_of(fleet) as router,
        serving(tiny_engine()) as alone,
        RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client,
        RolloutClient(alone.endpoint, connect_timeout_s=WAIT) as other,
    ):
        yield fleet, threads, client, other


def serve_both(client: RolloutClient) -> bool:
    return bool(client.status()["fleet"]["serving"] == 2)


def test_an_adapter_is_added_everywhere_and_whoever_comes_later_has_it(tmp_path: Path) -> None:
    folder, second = write(tmp_path / "a"), write(tmp_path / "b", lora_alpha=4)
    with fleet_and_one() as (_, threads, client, other):
        base = client.weights_status()["base_digest"]
        assert base == other.weights_status()["base_digest"]
        done, want = client.refresh_lora(folder, base=base), other.refresh_lora(folder, base=base)
        assert (done.digest, done.bytes, done.sent_bytes) == (want.digest, want.bytes, want.sent_bytes)
        assert made(client) == made(other) and client.weights_status()["base_digest"] == base
        threads.die("r0")
        until(lambda: threads.replaced == ["r0"] and serve_both(client), "it is back", WAIT)
        assert made(client) == made(other), "base and adapter"
        with pytest.raises(WrongBase):
            client.refresh_lora(second, base="ab" * 32)
        with pytest.raises(WeightsRefused, match="refresh all tensors of a fleet"):
            client.refresh({"model.norm.weight": torch.ones(64)}, partial=True)
        for one in (client, other):
            one.refresh(tiny("llama", seed=1))
            one.refresh_lora(second)
        threads.die("r1")
        until(lambda: threads.replaced == ["r0", "r1"] and serve_both(client), "it is back", WAIT)
        assert made(client) == made(other), "whole weights first, then the adapter"
        for one in (client, other):
            one.refresh(tiny("llama", seed=2))
        assert made(client) == made(other) and client.weights_status()["base_digest"] == client.weights_status()["digest"]


def moved(module: torch.nn.Module, by: float) -> torch.nn.Module:
    with torch.no_grad():
        module.get_parameter("model.norm.weight").add_(by)
    return module


def test_differences_are_against_what_the_router_has_kept(tmp_path: Path) -> None:
    with fleet_and_one() as (_, threads, client, other):
        model = tiny("llama", seed=1)
        for step in range(3):
            moved(model, 0.25)
            done, want = (one.refresh(model, via="delta") for one in (client, other))
            assert (done.via, done.digest, done.sent_bytes) == (want.via, want.digest, want.sent_bytes), done.reason
            assert (done.via == "delta") == (step > 0) and (step == 0 or done.sent_bytes < 0.01 * done.bytes)
        assert made(client) == made(other)
        threads.die("r0")
        until(lambda: threads.replaced == ["r0"] and serve_both(client), "it is back", WAIT)
        assert made(client) == made(other)
        client.refresh_lora(write(tmp_path))
        assert client.refresh(moved(model, 0.25), via="delta").via != "delta", "what is live is not what the client sent last"


def test_a_replica_that_dies_in_the_middle_of_an_adapter_is_stale_until_it_has_it(tmp_path: Path) -> None:
    stale: list[str] = []
    states: list[tuple[State, int]] = []
    begin, tell = ReplicaTransaction._begun, Replica.set_state

    def told(self: Replica, state: State, why: str) -> None:
        states.extend([(state, self.version)] if self.name == "r0" and stale else [])
        tell(self, state, why)

    with fleet_and_one() as (fleet, threads, client, other):

        def die(self: ReplicaTransaction, replica: Any, answer: Any) -> None:
            if replica.name == "r0" and not stale:
                stale.append("it dies")
                threads.die("r0")
            else:
                begin(self, replica, answer)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ReplicaTransaction, "_begun", die)
            patched.setattr(Replica, "set_state", told)
            done = client.refresh_lora(write(tmp_path))
            until(lambda: serve_both(client), "it is back", WAIT)
        assert other.refresh_lora(tmp_path).digest == done.digest
        assert states[0][0] is State.DEAD and (State.STALE, 0) in states and states[-1] == (State.SERVING, 1)
        assert State.SERVING not in {state for state, _ in states[:-1]}
        assert threads.replaced == ["r0"] and fleet.replicas.by_name["r0"].version == 1
        assert made(client) == made(other)


@pytest.mark.parametrize("via", ["gloo", "nccl", "cuda_ipc"])
def test_what_a_router_cannot_take_is_refused_with_what_it_can(via: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensors, "check_on_gpus", lambda self, via: None)  # as if there were a GPU
    monkeypatch.setattr("rollout.transport.weights.cuda_ipc.gpu_key", lambda device: "gpu:0")
    with fleet_of(1) as (fleet, _), router_of(fleet) as router:
        with RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client:
            with pytest.raises(SourceUnreachable, match="share no GPU" if via == "cuda_ipc" else 'via="inline" takes'):
                client.refresh({f"w{i}": torch.zeros(20_000) for i in range(4)}, via=via)
            assert client.refresh({f"w{i}": torch.zeros(20_000) for i in range(4)}).via == "shm"


# replicas that share no memory with the router


def last(joined: JoinedFleet, name: str) -> Any:
    """What a replica says of its last refresh."""
    asked = joined.fleet.replicas.by_name[name].request(lambda id: m.WeightsRequest(id, True))
    step_until(joined.fleet, asked.done, "it answers")
    found = asked.result()
    assert found["digest"] == found["live_digest"]
    return found["digest"], found["last"]["via"]


def test_replicas_of_other_hosts_get_the_bytes_from_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three is on this host; the others count as elsewhere. One of these comes when the weights are live already."""
    monkeypatch.setattr("rollout.transport.weights.inline.CHUNK_BYTES", 10_000)
    with joined_fleet(None, "here") as joined:
        joined.start("there", 0.0, "elsewhere")
        joined.await_state("there", "serving")
        with router_of(joined.fleet) as router, RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client:
            done = client.refresh({f"w{i}": torch.full((20_000,), 5.0 + i) for i in range(4)}, via="shm")
        joined.start("later", 0.0, "elsewhere")
        joined.await_state("later", "serving")
        assert {name: last(joined, name) for name in ("here", "there", "later")} == {
            "here": (done.digest, "shm"),
            "there": (done.digest, "inline"),
            "later": (done.digest, "inline"),
        }


def test_content_that_is_refused_elsewhere_is_refused_everywhere() -> None:
    with joined_fleet(None, "here") as joined:
        joined.start("there", 0.0, "elsewhere")
        joined.await_state("there", "serving")
        with router_of(joined.fleet) as router, RolloutClient(router.endpoint, connect_timeout_s=WAIT) as client:
            bad = {f"w{i}": torch.full((20_000,), np.nan if i == 3 else 1.0) for i in range(4)}
            with pytest.raises(WeightsRefused, match="holds NaN"):
                client.refresh(bad)
            assert client.refresh({f"w{i}": torch.full((20_000,), 1.0) for i in range(4)}).version == 1
