"""The lines that commands print about a service."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.commands.lines import bytes_of, counted, engine_lines, gib, next_lines, short, stopped_line, stopping_line
from rollout.commands.status import _states, report
from rollout.config import Config, FleetConfig, ServiceConfig

ENGINE: dict[str, Any] = {
    "model": "/models/tiny",
    "dtype": "bfloat16",
    "isa": "avx2",
    "isa_reason": "",
    "attention": "native",
    "arithmetic": "fma/1",
    "version": 3,
    "state": "paused",
    "groups": 4,
    "running": 8,
    "waiting": 24,
    "ended": {"stop": 1000, "length": 24},
    "weights": {"refreshes": 3, "pause_s": 0.0031},
    "kv": {
        "block_size": 32,
        "block_bytes": 2**20,
        "device_blocks": 1024,
        "device_used": 256,
        "device_cached": 128,
        "host_blocks": 512,
        "host_used": 0,
        "host_cached": 0,
    },
}


def client(name: str, samples: int, connected: bool = True) -> dict[str, Any]:
    return {"name": name, "number": 7, "connected": connected, "groups": 2, "running_samples": samples}


STATUS = ENGINE | {
    "digest": "0123456789abcdef",
    "metrics": {"rollout/samples": 1024.0, "rollout/sample_tokens": 1_234_567.0, "rollout/tokens_per_s": 412.3},
    "service": {
        "endpoint": "tcp://127.0.0.1:5655",
        "uptime_s": 312.4,
        "clients": [client("eval", 3, False), client("grpo", 29), client("rollout status", 0)],
    },
}


def test_the_model_has_the_name_that_was_given() -> None:
    service = STATUS["service"] | {"served_model_name": "me/tiny"}
    assert report(STATUS | {"service": service})[0] == "model     me/tiny, bfloat16, avx2, fma/1"


def test_a_status_is_some_ten_lines() -> None:
    lines = report(STATUS)
    assert lines == [
        "model     tiny, bfloat16, avx2, fma/1",
        "weights   version 3, digest 0123456789ab, 3 refreshes, the last one paused 3.1 ms",
        "service   tcp://127.0.0.1:5655, paused, up 0:05:12",
        "groups    4 open, 8 samples running, 24 waiting",
        "ended     1,024 samples, 3.28 per second since the start; 412 tokens/s lately",
        "KV        device: 25% of 32,768 tokens in use, 12% cached",
        "          host: 0% of 16,384 tokens in use, 0% cached",
        "clients   grpo: 2 groups, 29 samples running",
        "          eval: 2 groups, 3 samples running, not connected",
    ]


def test_a_status_of_many_clients_stays_short() -> None:
    service = STATUS["service"] | {"clients": [client(f"c{i}", i) for i in range(300)]}
    lines = report(STATUS | {"service": service})
    assert len(lines) <= 15 and lines[-1].strip() == "and 296 more; rollout top shows all"


def test_a_status_of_a_fleet_names_the_replicas_that_do_not_serve() -> None:
    replicas = [{"name": "local-0", "state": "serving", "why": ""}, {"name": "local-1", "state": "dead", "why": "signal 9"}]
    fleet = {"fleet": {"serving": 1, "replicas": 2, "deaths": 1}, "replicas": replicas}
    text = "\n".join(report({name: value for name, value in STATUS.items() if name != "kv"} | fleet))
    assert "1 of 2 serving, 1 death\n" in text and "local-1: dead, signal 9" in text and "local-0" not in text


def test_a_status_of_a_fleet_names_who_is_banned() -> None:
    ban = {"owner": "key gpu", "why": "field=token_ids first_bad=7", "groups": [{"samples": [0, 3]}, {"samples": [1]}]}
    verified = {
        "trusting": True,
        "verified": 1200,
        "lies": 1,
        "unverifiable": 3,
        "verify_skipped": 2,
        "verifying": 4,
        "bans": [ban],
    }
    fleet = {"fleet": {"serving": 1, "replicas": 2, "deaths": 1, **verified}, "replicas": []}
    text = "\n".join(report({name: value for name, value in STATUS.items() if name != "kv"} | fleet))
    assert "samples of others: 1,200 verified, 1 lie, 3 without a verdict, 2 skipped, 4 waiting" in text
    assert "banned: key gpu, field=token_ids first_bad=7; 3 samples delivered unverified before" in text


def test_what_peers_have_sent_is_escaped() -> None:
    service = STATUS["service"] | {"clients": [client("\x1b[31m", 1)]}
    assert "\x1b" not in "\n".join(report(STATUS | {"service": service}))


def test_an_engine_is_described() -> None:
    assert engine_lines(ENGINE, 2) == [
        "computes with avx2 kernels on 2 threads, native attention, arithmetic fma/1",
        "KV for 32,768 tokens (1.00 GiB) on the device, 16,384 tokens (0.50 GiB) in host memory",
    ]
    states = {"slots": 65, "used": 12, "bytes": 3_256_320}
    assert engine_lines(ENGINE | {"states": states}, 2)[-1] == "65 slots of recurrent state, 3.26 MB each"
    assert [*_states(states)] == ["12 of 65 slots in use, 3.26 MB each"] and not [*_states({"slots": 0})]
    assert "slower than possible: no AVX2" in engine_lines(ENGINE | {"isa": "plain", "isa_reason": "no AVX2"}, 1)
    assert "slower than possible: rotary" in engine_lines(ENGINE | {"computed_by_reason": "rotary"}, 1)
    assert len(engine_lines(ENGINE | {"isa_reason": "no AMX"}, 1)) == 2, "the best kernels of this CPU"
    assert engine_lines(ENGINE | {"isa": "cuda"}, None)[0].startswith("computes on CUDA, ")
    assert engine_lines({}, 1) == []


def test_what_to_type_next() -> None:
    watch, program = next_lines("tcp://127.0.0.1:5655", Config())
    assert watch.endswith("rollout top --address tcp://127.0.0.1:5655") and "RolloutClient" in program
    keyed = "\n".join(next_lines("tcp://*:5655", Config(service=ServiceConfig(keys="keys/service.json"))))
    assert "rollout keys add" in keyed and "--address keys/NAME.json" in keyed and "python" not in keyed
    assert next_lines("ipc:///x", Config(fleet=FleetConfig(join="ipc:///router"))) == [], "its router alone may connect"


def test_how_it_ends() -> None:
    assert stopping_line(8) == "stopping: 8 samples aborted" and "nothing" in stopping_line(0)
    assert stopped_line(STATUS) == "stopped after 312 s, 1,024 samples, 1.23M tokens"


@pytest.mark.parametrize(
    ("shown", "want"),
    [
        (counted(1, "sample"), "1 sample"),
        (counted(1024, "sample"), "1,024 samples"),
        (counted(2, "refresh", "refreshes"), "2 refreshes"),
        (short(999), "999"),
        (short(12_345), "12.3k"),
        (short(1_234_567), "1.23M"),
        (short(5e9), "5G"),
        (bytes_of(269_060_000), "269 MB"),
        (bytes_of(14.9e9), "14.9 GB"),
        (bytes_of(12), "12 bytes"),
        (gib(2**29), "0.50 GiB"),
        (gib(2**20), "1.0 MiB"),
    ],
)
def test_numbers(shown: str, want: str) -> None:
    assert shown == want
