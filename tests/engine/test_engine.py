"""The engine as its user sees it: fork, limits, bad input, faults, fairness, status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollout.engine import memory
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.memory import VERSIONS, free_memory
from rollout.engine.values import Group, Limits, Sampling
from tests.support.invariants import check
from tests.support.tiny import tiny_engine
from tests.support.toy import ToyModel, engine, expected, group, run


def test_samples_are_what_they_must_be() -> None:
    groups = [group(f"g{i}", range(1, 6 + i), n=3, seed=i, max_tokens=12) for i in range(6)]
    samples = run(engine(), groups)
    for each in groups:
        for index, want in enumerate(expected(each)):
            sample = samples[each.id, index]
            assert sample.token_ids.tolist() == want
            assert sample.finish_reason == ("stop" if want[-1] == 0 else "length")
            assert sample.prompt_tokens == len(each.prompt) and sample.weight_versions == [(0, 0)]
            assert len(sample.logprobs) == len(want) and sample.logprobs.dtype == np.float32


def test_fork_saves_the_work() -> None:
    """One prompt of 2,048 tokens, n = 64: prefilled once, its blocks shared, at most two more for each child."""
    e = tiny_engine(kv_tokens=16_384, block_size=32, max_batch_tokens=512, model=None, max_num_seqs=64, name="llama-long")
    e.submit(
        Group(
            "g", np.random.default_rng(0).integers(3, 199, 2048).astype(np.int32), Sampling(n=64, max_tokens=4, ignore_eos=True)
        )
    )
    while e.status()["forks"] == 0:
        assert e.step() == []
    assert e.step() == []
    status = e.status()
    assert status["prefill_tokens"] <= 2048 + 64
    assert status["kv"]["device_used"] <= 2048 // 32 + 2 * 64
    assert status["fork_saved_tokens"] == 63 * 2048
    assert status["fork_shared_blocks"] == 63 * 2048 // 32
    check(e.scheduler)


def test_n_first_tokens_differ() -> None:
    samples = run(engine(), [group("g", [3, 1, 4], n=16, max_tokens=1, temperature=3.0)])
    assert len({sample.token_ids[0] for sample in samples.values()}) > 5


@pytest.mark.parametrize("n", [1, 40, 200])
def test_more_children_than_places(n: int) -> None:
    each = group("g", range(1, 10), n=n, max_tokens=3)
    samples = run(engine(max_num_seqs=8, kv_tokens=96), [each])
    assert [samples["g", i].token_ids.tolist() for i in range(n)] == expected(each)


def test_a_child_that_waits_costs_no_prefill() -> None:
    e = engine(max_num_seqs=4, kv_tokens=4096, prefix_cache=False)
    run(e, [group("g", range(1, 12), n=32, max_tokens=6, ignore_eos=True)])
    assert e.counters.prefill_tokens == 11 and e.counters.recomputed_tokens == 0


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_computed_again_is_computed_once_for_a_group(kept: bool) -> None:
    """After a refresh the children wait for the one that prefills their prompt, whether or not ended samples leave their KV."""
    e = engine(prefix_cache=kept, kv_tokens=2048)
    each = group("g", [1 + i % 22 for i in range(41)], n=8, max_tokens=12, ignore_eos=True)
    e.submit(each)
    for _ in range(6):
        assert e.step() == []
    own = sum(seq.cached for seq in e.scheduler.state.running) - 8 * 40
    assert len(e.scheduler.state.running) == 8 and own > 8
    e.refresh({}, kv="recompute")
    samples = run(e)
    assert [samples["g", i].token_ids.tolist() for i in range(8)] == expected(each)
    assert e.counters.recomputed_tokens == 40 + own
    assert e.scheduler.state.store.used == 0 and (len(e.scheduler.state.store.index) > 0) == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 7, "prompt": [1] * 250}, "lower max_tokens to 6"),
        ({"max_tokens": 30, "prompt": [1] * 100}, "raise kv_tokens"),
    ],
    ids=["past the context", "more than the pool can ever hold"],
)
def test_bad_input_is_refused_and_leaves_nothing(options: dict[str, Any], message: str) -> None:
    """All that a group may not be: test_bad_groups.py."""
    e = engine(kv_tokens=100)
    with pytest.raises(ValueError, match=message):
        e.submit(group("bad", **options))
    assert not e.has_work
    run(e, [group("good", [1, 2, 3])])


def test_a_live_id_is_taken() -> None:
    e = engine()
    e.submit(group("g", [1]))
    with pytest.raises(ValueError, match="in use"):
        e.submit(group("g", [2]))
    run(e)
    run(e, [group("g", [2])])


def test_abort_returns_what_there_is() -> None:
    e = engine()
    e.submit(group("g", [1, 2], n=3, max_tokens=50, ignore_eos=True))
    e.submit(group("late", [1, 2], n=2))
    for _ in range(5):
        e.step()
    aborted = e.abort("g")
    assert [(s.index, s.finish_reason, len(s.token_ids)) for s in aborted] == [(i, "aborted", 5) for i in range(3)]
    assert e.abort("g") == [] and e.abort("nobody") == []
    assert len(run(e)) == 2


def test_abort_before_the_fork_names_every_child() -> None:
    e = engine()
    e.submit(group("g", [1, 2], n=3))
    assert [(s.index, len(s.token_ids)) for s in e.abort("g")] == [(0, 0), (1, 0), (2, 0)]
    check(e.scheduler)


def test_a_failed_step_fails_its_groups_and_nothing_else() -> None:
    model = ToyModel()
    e = engine(model, max_num_seqs=4)
    e.submit(group("a", [1, 2, 3], n=4, max_tokens=9, ignore_eos=True))
    model.fail_at = {3}
    samples = {}
    while e.has_work:
        samples |= {(s.group_id, s.index): s for s in e.step()}
        check(e.scheduler)
    assert len(samples) == 4
    samples |= run(e, [group("b", [4, 5, 6], n=4, max_tokens=9, ignore_eos=True)])
    assert {(s.finish_reason, s.error) for s in samples.values() if s.group_id == "a"} == {
        ("error", "RuntimeError: injected failure of the forward")
    }
    assert [samples["b", i].token_ids.tolist() for i in range(4)] == expected(
        group("b", [4, 5, 6], n=4, max_tokens=9, ignore_eos=True)
    )
    assert e.status()["failed_steps"] == 1


@pytest.mark.parametrize(("copy", "prefill", "pays"), [(1e9, 1e-9, True), (1e-9, 1e9, False)])
def test_what_is_parked_is_copied_if_that_is_faster(copy: float, prefill: float, pays: bool) -> None:
    e = engine(kv_tokens=60, cpu_offload_gib=0.0001, prefix_cache=False)
    for i in range(4):
        e.submit(group(f"g{i}", range(1, 9), n=4, max_tokens=16, seed=i, ignore_eos=True))
    while e.has_work:
        rates = e.scheduler.state.rates
        rates.copy_blocks_per_second, rates.prefill_tokens_per_second = copy, prefill  # as if measured
        e.step()
    assert e.counters.offloads if pays else e.counters.recompute_preemptions
    assert (e.counters.recomputed_tokens == 0) == pays


def assert_mended(e: Engine, broken: Callable[..., Any]) -> None:
    """Under pressure, with `broken` in place of the copies: some fail, and every sample is what it should be."""
    e.worker.kv.move = broken  # type: ignore[method-assign]
    groups = [group(f"g{i}", range(1, 9), n=4, max_tokens=16, seed=i, ignore_eos=True) for i in range(4)]
    samples = run(e, groups)
    assert e.counters.failed_moves > 0
    for each in groups:
        assert [samples[each.id, i].token_ids.tolist() for i in range(4)] == expected(each)


def test_a_failed_copy_is_mended() -> None:
    e = engine(kv_tokens=60, cpu_offload_gib=0.0001)
    move, calls = e.worker.kv.move, [0]

    def broken(moves: Any, *spans: Any) -> Any:
        calls[0] += bool(moves)
        if moves and calls[0] % 3 == 0:
            move(type(moves)(offloads=moves.offloads))
            raise MemoryError("injected failure of a copy")
        return move(moves, *spans)

    assert_mended(e, broken)


def test_nan_ends_its_child_only() -> None:
    """NaN in the KV of one child: it ends with an error, its neighbours do not notice, its blocks are not found again."""
    e = tiny_engine()
    r = np.random.default_rng(0)
    victim, other = (group(name, r.integers(3, 199, 20), n=2, max_tokens=12, seed=1, ignore_eos=True) for name in ("v", "o"))
    want = run(tiny_engine(), [other])
    e.submit(victim)
    e.submit(other)
    for _ in range(3):
        e.step()
    child = next(seq for seq in e.scheduler.state.running if seq.state.group.id == "v" and seq.index == 1)
    e.worker.kv.data[child.blocks[-1].device] = torch.nan
    samples = run(e)
    assert samples["v", 1].finish_reason == "error" and "NaN" in (samples["v", 1].error or "")
    assert samples["v", 0].finish_reason == "length"
    for i in range(2):
        assert samples["o", i].logprobs.tobytes() == want["o", i].logprobs.tobytes()
    again = run(e, [victim])
    assert {sample.finish_reason for sample in again.values()} == {"length"}


def test_clients_share_fairly() -> None:
    """A client with fifty groups does not keep another one waiting."""
    e = engine(max_num_seqs=4, kv_tokens=4096)
    for i in range(50):
        e.submit(group(f"big{i}", [1, 2, 3], n=4, max_tokens=10, ignore_eos=True), client="big")
    for _ in range(3):
        e.step()
    e.submit(group("small", [4, 5], n=2, max_tokens=10, ignore_eos=True), client="small")
    done = []
    while not any(id == "small" for id in done):
        done += [sample.group_id for sample in e.step()]
    assert len(set(done)) <= 6, "the small client waited for many groups of the big one"


@pytest.mark.usefixtures("copies_pay")
@pytest.mark.parametrize("kv_tokens", [4096, 8 * 72])
def test_a_client_that_has_all_slots_gives_some_up(kv_tokens: int) -> None:
    """Children that run for long do not keep another client waiting for their end, nor is anything computed twice for it."""
    e = engine(max_num_seqs=8, kv_tokens=kv_tokens, min_run_tokens=4, cpu_offload_gib=0.01)
    long = group("long", [1, 2, 3], n=8, max_tokens=64, ignore_eos=True)
    short = group("short", [4, 5], n=6, max_tokens=8, ignore_eos=True)
    e.submit(long, client="first")
    for _ in range(6):
        e.step()
    e.submit(short, client="second")
    shares, ended = set(), []
    while len(ended) < 6:
        ended += e.step()
        check(e.scheduler)
        shares.add((e.scheduler.state.table.of_client["first"], e.scheduler.state.table.of_client["second"]))
    assert {sample.group_id for sample in ended} == {"short"} and e.counters.steps < 40
    assert (4, 4) in shares
    got = {("short", sample.index): sample.token_ids.tolist() for sample in ended}
    got |= {key: sample.token_ids.tolist() for key, sample in run(e).items()}
    assert e.counters.recomputed_tokens == 0
    for each in (long, short):
        for index, want in enumerate(expected(each)):
            assert got[each.id, index] == want


def test_min_tokens_and_stop_tokens() -> None:
    each = group("g", [5, 6], n=64, max_tokens=30, min_tokens=6, stop_token_ids=(3, 4), temperature=2.0)
    samples = run(engine(max_num_seqs=64, max_batch_tokens=64, kv_tokens=8192), [each])
    reasons = {sample.finish_reason for sample in samples.values()}
    assert "stop" in reasons
    for sample in samples.values():
        tokens = sample.token_ids.tolist()
        assert not set(tokens[:6]) & {0, 3, 4} and not set(tokens[6:-1]) & {0, 3, 4}
        assert sample.finish_reason == ("stop" if tokens[-1] in (0, 3, 4) else "length")
    free = run(engine(), [group("g", [5, 6], n=8, max_tokens=30, ignore_eos=True, temperature=2.0)])
    assert any(0 in sample.token_ids[:-1] for sample in free.values())


def test_status_is_json_and_adds_up() -> None:
    e = engine()
    e.submit(group("g", range(1, 9), n=4, ignore_eos=True))
    e.step()
    status = json.loads(json.dumps(e.status()))
    kv = status["kv"]
    assert kv["device_free"] + kv["device_used"] + kv["device_cached"] == kv["device_blocks"]
    assert status["running"] == 4 and status["groups"] == 1


def test_limits_are_the_caller_s() -> None:
    e = engine()
    e.limits = Limits(max_n=2)
    with pytest.raises(ValueError, match="max_n"):
        e.submit(group("g", [1], n=3))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_batch_tokens", 1),
        ("cpu_offload_gib", -1.0),
        ("cpu_offload_gib", 1e9),
        ("foreground_s", -1.0),
        ("foreground_s", float("inf")),
        ("mirror_ahead", True),
        ("copy_ahead", True),
        ("kv_tokens", 0),
        ("threads", 0),
    ],
)
def test_bad_configuration_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        engine(**{field: value})


def test_offload_memory_that_holds_no_block() -> None:
    with pytest.raises(ValueError, match="holds no KV block"):
        engine(cpu_offload_gib=1e-12)


def test_more_memory_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"KV pool of .* GiB is more than the .* GiB of free memory"):
        engine(kv_tokens=None, kv_gib=1e6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device=cuda:1: torch .* finds no CUDA device"):
        engine(device="cuda:1")


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2 and 1 of cgroups; the kernel's file cache is no obstacle; no limit, no group: what the machine has."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**31))
    assert free_memory(tmp_path) == 2**31
    for folder, limit, usage, spare in VERSIONS:
        (tmp_path / folder).mkdir(exist_ok=True)
        files = {limit: "1000000", usage: "700000", "memory.stat": f"anon 5\n{spare} 200000"}
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text + "\n")
        assert free_memory(tmp_path) == 500_000
        (tmp_path / folder / limit).write_text("max\n")
        assert free_memory(tmp_path) == 2**31


def test_unknown_configuration_is_an_error() -> None:
    from rollout.engine.config import EngineConfig

    with pytest.raises(msgspec.ValidationError, match="block_sise"):
        msgspec.convert({"block_sise": 16}, EngineConfig)


def test_the_tail_of_a_cached_prompt_goes_first() -> None:
    """The root of a chain is what finds the rest: while some of it is cached, some of it is reused."""
    e = engine(kv_tokens=64, max_batch_tokens=64)
    prompt = [i % 22 + 1 for i in range(29)]
    run(e, [group("first", prompt, n=1, max_tokens=1, ignore_eos=True)])
    run(e, [group("other", [7] * 33, n=1, max_tokens=1, ignore_eos=True)])
    before = e.counters.prefix_hit_tokens
    run(e, [group("again", prompt, n=1, max_tokens=1, ignore_eos=True)])
    assert e.counters.prefix_hit_tokens - before >= 16


def test_all_children_are_counted_where_a_group_ends_before_its_fork() -> None:
    e = engine()
    e.submit(group("g", range(1, 20), n=8))
    assert len(e.abort("g")) == 8 and e.counters.ended["aborted"] == 8


@pytest.mark.parametrize(
    ("field", "value"), [("device", "cpux"), ("device", "cuda:x"), ("device", "cuda:"), ("seed", -1), ("kv_gib", float("inf"))]
)
def test_what_cannot_be_had_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def test_min_tokens_that_forbids_every_token_is_refused() -> None:
    """Where all tokens end a sample none can be drawn before `min_tokens`; one that does not is enough."""
    e = engine()
    every = tuple(range(1, 23))  # and 0 is the model's own
    with pytest.raises(ValueError, match="min_tokens=1: each of the model's 23 tokens ends a sample.*set it to 0"):
        e.submit(group("a", [1, 2], min_tokens=1, stop_token_ids=every))
    assert not e.has_work
    samples = run(
        e,
        [
            group("none", [1, 2], min_tokens=0, stop_token_ids=every),
            group("one left", [1, 2], min_tokens=3, stop_token_ids=every[:-1]),
            group("own ignored", [1, 2], min_tokens=3, stop_token_ids=every, ignore_eos=True),
        ],
    )
    assert {len(s.token_ids) for s in samples.values() if s.group_id == "none"} == {1}
    for sample in samples.values():
        if sample.group_id != "none":
            assert set(sample.token_ids[:3].tolist()) == {22 if sample.group_id == "one left" else 0}
