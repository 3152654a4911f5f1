"""A counter never falls when a replica is lost: a status names its counters, and a router goes on adding them up."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.scheduling.counters import Counters
from rollout.engine.status import COUNTED, status
from rollout.fleet.merge import counters, merged
from rollout.metrics import catalog
from rollout.metrics.meters import GAUGES, TOTALS, EngineMeter

OWN = {"loop/stalled_s", "rollout/samples", "rollout/sample_tokens", "rollout/groups"}
"""totals of the router itself"""


@pytest.fixture(scope="module")
def report(tiny_model: Any) -> dict[str, Any]:
    """The report of an engine whose counters are all above 0."""
    engine = Engine(EngineConfig(model=str(tiny_model), dtype="float32", kv_tokens=1024, cpu_offload_gib=0, threads=1))
    numbers = {one.name: 10 + at for at, one in enumerate(fields(Counters)) if one.name != "ended"}
    engine.counters = replace(engine.counters, ended=engine.counters.ended + type(engine.counters.ended)(stop=3), **numbers)
    engine.refreshes = 4
    return status(engine)


def row(*statuses: dict[str, Any]) -> dict[str, float]:
    meter = EngineMeter(30.0)
    meter.add({**merged(statuses), "fleet": {}}, 0.0)
    return meter.row()


def test_every_total_of_the_catalogue_survives_its_replica(report: dict[str, Any]) -> None:
    before, after = row(report, report), row(report, counters(report))
    totals = {name for name, metric in catalog.METRICS.items() if metric.over == "total"}
    engine_s = {name for name in totals if name in TOTALS or name in GAUGES} - OWN
    engine_s -= {name for name in totals if name.startswith("fleet/")}  # the router's own
    assert len(engine_s) > 20
    for name in engine_s:
        assert before[name] > 0 and after[name] == before[name], name


def test_a_gauge_goes_with_its_replica(report: dict[str, Any]) -> None:
    """The control."""
    before, after = row(report, report), row(report, counters(report))
    assert before["kv/device_blocks"] == 2 * after["kv/device_blocks"] > 0
    assert counters(report).keys() == {path.split(".")[0] for path in COUNTED}


def test_a_status_without_a_name_is_seen(report: dict[str, Any]) -> None:
    without = {**report, "counted": [name for name in COUNTED if name != "recompute_preemptions"]}
    assert row(report, counters(without))["kv/recompute_preemptions"] < row(report, report)["kv/recompute_preemptions"]


@pytest.mark.parametrize(
    "counted",
    [None, 3, "steps", [3, None, {"a": 1}], ["kv", "kv.device_blocks", "steps", "steps.x", "a.b.c", "."], [["steps"]]],
)
def test_what_a_liar_calls_a_counter_ends_no_router(report: dict[str, Any], counted: Any) -> None:
    found = counters({**report, "counted": counted})
    assert isinstance(found, dict) and isinstance(merged([found, report, {"steps": {"a": 1}}]), dict)
