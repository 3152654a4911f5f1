"""Which kernels run, why no better ones, and that Python and C agree on what they hand each other."""

from __future__ import annotations

import ctypes
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollout.engine.build import device_of
from rollout.engine.config import EngineConfig
from rollout.engine.cpu import isa, kernels
from rollout.engine.cpu.attention import _Step
from rollout.engine.cpu.build import LayoutMismatch, NativeUnavailable, check_layout
from rollout.engine.cpu.isa import ISAS, here, isa_of, lacking
from rollout.engine.cpu.kernels import Kernels, Team, _Draw, choose
from rollout.engine.engine import Engine
from rollout.engine.forward.model import Model
from tests.support.tiny import tiny, tiny_engine
from tests.support.toy import engine as toy_engine
from tests.support.toy import group, run

BEST = choose()
needs_kernels = pytest.mark.skipif(BEST.kernels is None, reason=BEST.why)


@needs_kernels
def test_auto_takes_the_best_and_says_why_no_better_one() -> None:
    names = list(ISAS)
    better = names[: names.index(BEST.isa)]
    assert BEST.kernels is not None and BEST.kernels.isa == BEST.isa
    assert all(name in BEST.why for name in better) and bool(better) == bool(BEST.why)


def test_a_library_that_cannot_be_had_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Kernels:
        raise NativeUnavailable(f"no {name} today")

    monkeypatch.setattr(kernels, "Kernels", none)
    chosen = choose()
    assert chosen.kernels is None and chosen.isa == "torch" and all(f"no {name} today" in chosen.why for name in ISAS)
    with pytest.raises(ValueError, match='isa="plain": no plain today; "auto"'):
        choose("plain")


def test_what_the_cpu_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    with pytest.raises(ValueError, match='isa="amx": this CPU has no amx_bf16, amx_tile, avx512_bf16.*which amx needs'):
        choose("amx")
    assert lacking("avx2") == [] and isa_of("amx").needs > isa_of("avx512_bf16").needs > isa_of("avx2").needs
    with pytest.raises(ValueError, match="isa='neon': must be one of amx, avx512_bf16"):
        choose("neon")


def test_another_device_has_none() -> None:
    with pytest.raises(ValueError, match="isa='avx2' is for the CPU: leave it out with device=cuda"):
        device_of(EngineConfig(isa="avx2", device="cuda"))


@pytest.mark.parametrize("name", [*(name for name in here() if name in ISAS), "torch"])
def test_forced(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Draws, attention, status and log are of the one that was asked for."""
    with caplog.at_level(logging.INFO, "rollout.engine"):
        one = tiny_engine(isa=name)
    status = one.status()
    assert status["isa"] == name and status["isa_reason"] == f"isa={name} was asked for"
    assert status["attention"] == ("reference" if name == "torch" else "native")
    assert status["arithmetic"].split("/")[0] in (
        "torch",
        isa_of(name).arithmetic.split("/")[0] if name != "torch" else "torch",
    )
    assert f"isa={name}" in caplog.text and status["arithmetic"] in caplog.text
    assert len(run(one, [group("a", np.arange(3, 30), n=2, max_tokens=4, ignore_eos=True)])) == 2


def test_the_engine_chooses_the_kernels_of_a_model_that_it_is_given() -> None:
    given = Engine(EngineConfig(dtype="float32", isa="torch", kv_tokens=64), Model(tiny("llama"), "tiny"))
    assert given.status()["isa"] == "torch" and given.status()["computed_by"] == "module"
    with pytest.raises(ValueError, match="is on meta, but device=cpu: set device=meta"):
        Engine(EngineConfig(kv_tokens=64), SimpleNamespace(name="elsewhere", device=torch.device("meta")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='attention="native": isa="torch"'):
        tiny_engine(isa="torch", attention="native")


@needs_kernels
def test_two_engines_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has kernels of its own, in turn and step by step: no scratch, no choice is shared."""
    names = [name for name in here() if name in ISAS][:2]
    engines = [toy_engine(isa=name) for name in names]
    assert len({id(each.worker.device.chosen.kernels) for each in engines}) == len(engines)
    groups = [group(f"g{i}", range(5, 9 + i), n=3, max_tokens=9, ignore_eos=True, seed=i, top_k=7) for i in range(3)]
    alone = [run(toy_engine(isa=name), groups) for name in names]
    for each in engines:
        for asked in groups:
            each.submit(asked)
    got: list[dict] = [{} for _ in engines]
    while any(each.has_work for each in engines):
        for each, samples in zip(engines, got, strict=True):
            samples.update({(s.group_id, s.index): s for s in each.step()})
    for one, other in zip(alone, got, strict=True):
        assert {key: s.token_ids.tolist() for key, s in one.items()} == {key: s.token_ids.tolist() for key, s in other.items()}


# ── structs ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Later(ctypes.Structure):
    """`Team` of another version."""

    _fields_ = [("parallel", ctypes.c_void_p), ("threads", ctypes.c_int64), ("team", ctypes.c_void_p)]


class Longer(ctypes.Structure):
    _fields_ = [*Team._fields_, ("cores", ctypes.c_int64)]


@needs_kernels
def test_structs_that_differ_are_refused() -> None:
    library = BEST.kernels.library
    check_layout(library, "rollout_layout_sampling", Draw=_Draw, Team=Team)
    check_layout(library, "rollout_layout_attention", Step=_Step)
    for wrong in (Later, Longer):
        with pytest.raises(LayoutMismatch, match="Team .* differs between C and Python.*install rollout again"):
            check_layout(library, "rollout_layout_sampling", Draw=_Draw, Team=wrong)
    with pytest.raises(LayoutMismatch, match="Draw"):
        check_layout(library, "rollout_layout_sampling", Team=Team)
    with pytest.raises(LayoutMismatch, match="Other"):
        check_layout(library, "rollout_layout_sampling", Draw=_Draw, Team=Team, Other=Team)


@needs_kernels
def test_threads_of_its_own() -> None:
    assert Kernels(BEST.isa, threads=3).team().threads == 3
    assert Kernels(BEST.isa).team().threads == torch.get_num_threads()
