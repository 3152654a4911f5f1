"""Refresh as a transaction: what is refused, what is undone, what the labels and the KV of other versions do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.cpu.device import CpuDevice
from rollout.engine.engine import Engine
from rollout.engine.values import Group, Sample, Sampling, WeightUpdate
from rollout.engine.weights import staging
from rollout.engine.weights.buffers import RefreshBuffers
from rollout.engine.weights.live import Weights, WeightsTorn
from rollout.engine.weights.rounding import RoundingLog
from rollout.engine.weights.staging import Staging, source_of
from rollout.engine.weights.tensors import InvalidWeights, describe, persistent_buffers, with_digest
from tests.support.broken_commit import PLACES, Failing, fail_commit
from tests.support.invariants import check
from tests.support.tiny import plain_logprobs, tiny, tiny_engine
from tests.support.toy import group, run
from tests.support.watermark import MIXED, check_marks, token_of, watermark_engine, weights_of

Pushed = dict[str, torch.Tensor]


def state(engine: Engine) -> Pushed:
    return {name: tensor.clone() for name, tensor in engine.model.module.state_dict().items()}  # type: ignore[attr-defined]


def assert_untouched(engine: Engine, before: Pushed, version: int = 0) -> None:
    assert engine.version == version
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(engine).items())
    assert engine.weights.live_digest() == engine.weights.digest


def pushed(seed: int = 1, name: str = "llama", **options: Any) -> Pushed:
    return dict(tiny(name, seed=seed, **options).named_parameters())


# ── what goes in ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["parameters", "state dict", "iterator", "shuffled"])
def test_every_form_of_named_tensors(form: str) -> None:
    engine, new = tiny_engine(), tiny("llama", seed=1)
    named: Any = {
        "parameters": new.named_parameters(),
        "state dict": new.state_dict(),
        "iterator": ((name, tensor) for name, tensor in new.named_parameters()),
        "shuffled": random.Random(0).sample(list(new.named_parameters()), len(list(new.parameters()))),
    }[form]
    refreshed = engine.refresh(named)
    assert refreshed.version == engine.version == 1 and refreshed.via == "memory"
    assert refreshed.bytes == sum(p.nbytes for p in new.parameters())
    assert all(torch.equal(tensor, state(engine)[name]) for name, tensor in new.named_parameters())
    assert refreshed.digest == engine.weights.live_digest() == engine.weights.digest
    assert 0 < refreshed.paused_seconds < refreshed.seconds and refreshed.staged_seconds < refreshed.seconds


def test_the_pause_ends_when_the_device_has_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, the copies into place are only launched when the call that makes them returns."""
    happened: list[str] = []
    clock = iter(range(1000))
    commit = Weights.commit

    def committed(weights: Weights, staging: Any) -> None:
        commit(weights, staging)
        happened.append("launched")

    def now() -> float:
        happened.append("clock")
        return float(next(clock))

    engine = tiny_engine()
    monkeypatch.setattr(Weights, "commit", committed)
    monkeypatch.setattr(CpuDevice, "settle", lambda self: happened.append("settled"))
    monkeypatch.setattr("rollout.engine.engine.time.perf_counter", now)
    engine.refresh(tiny("llama", seed=1).named_parameters())
    at = happened.index("launched")
    assert happened[at - 1 : at + 3] == ["clock", "launched", "settled", "clock"]


@pytest.mark.parametrize("model", ["float32", "bfloat16"])
@pytest.mark.parametrize("sent", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_any_float_dtype_is_cast_as_torch_casts(sent: torch.dtype, model: str) -> None:
    engine = tiny_engine(dtype=model)
    new = {name: tensor.detach().to(sent) for name, tensor in pushed().items()}
    engine.refresh(new)
    for name, tensor in state(engine).items():
        assert torch.equal(tensor, new[name].to(getattr(torch, model)))
    assert engine.weights.live_digest() == engine.weights.digest


def test_non_contiguous_tensors() -> None:
    engine = tiny_engine()
    new = {n: t.detach().T.contiguous().T if t.ndim == 2 else t.detach() for n, t in pushed().items()}
    engine.refresh(new)
    assert all(torch.equal(tensor, new[name]) for name, tensor in state(engine).items())


def test_a_partial_refresh_is_declared() -> None:
    engine = tiny_engine()
    before, new = state(engine), pushed()
    some = {name: new[name] for name in ("model.norm.weight", "lm_head.weight")}
    with pytest.raises(InvalidWeights, match="is missing .* partial") as caught:
        engine.refresh(some)
    assert caught.value.tensor == "model.embed_tokens.weight"
    assert_untouched(engine, before)
    engine.refresh(some, partial=True)
    assert engine.version == 1
    assert all(torch.equal(tensor, some.get(name, before[name])) for name, tensor in state(engine).items())


@pytest.mark.parametrize("names", ["first", "second", "both"])
def test_tied_parameters_are_one(names: str) -> None:
    engine = tiny_engine("llama-mha")
    new = pushed(name="llama-mha")
    embedding = new.pop("model.embed_tokens.weight")
    if names != "second":
        new["model.embed_tokens.weight"] = embedding
    if names != "first":
        new["lm_head.weight"] = embedding
    engine.refresh(new)
    module = engine.model.module  # type: ignore[attr-defined]
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert torch.equal(module.lm_head.weight, embedding)
    assert engine.weights.live_digest() == engine.weights.digest


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────────

NORM = "model.norm.weight"


def with_buffers(seed: int) -> PreTrainedModel:
    """A tiny llama with persistent buffers of an integer and a truth value, and one that no checkpoint holds."""
    module = tiny("llama", seed=seed)
    module.model.register_buffer("steps", torch.tensor(7 + seed))
    module.model.register_buffer("mask", torch.arange(5) % 2 == seed)
    module.model.register_buffer("scratch", torch.full((3,), float(seed)), persistent=False)
    return module


@pytest.mark.parametrize("form", ["model", "state dict", "pairs"])
def test_persistent_buffers_are_weights(form: str) -> None:
    """Of any dtype, a scalar included; other buffers are nobody's business."""
    engine, new = tiny_engine(model=with_buffers(0)), with_buffers(1)
    named: Any = {
        "model": new,
        "state dict": new.state_dict(),
        "pairs": [*new.named_parameters(), ("model.steps", new.model.steps), ("model.mask", new.model.mask)],
    }[form]
    before = engine.weights.digest
    assert engine.refresh(named).digest == engine.weights.live_digest() != before
    served = engine.model.module.model  # type: ignore[attr-defined]
    assert served.steps.item() == 8 and served.mask.tolist() == new.model.mask.tolist() and served.scratch[0] == 0


def test_a_buffer_that_is_missing_is_named() -> None:
    engine, new = tiny_engine(model=with_buffers(0)), with_buffers(1)
    before = state(engine)
    reason = r"'model.steps': it is missing \(2 are\).*model.steps, model.mask.*give the model"
    with pytest.raises(InvalidWeights, match=reason) as it:
        engine.refresh(new.named_parameters())
    assert it.value.tensor == "model.steps"
    wrong = {**new.state_dict(), "model.steps": torch.tensor(1.0)}
    with pytest.raises(InvalidWeights, match="dtype 'float32' cannot be cast to int64"):
        engine.refresh(wrong)
    assert_untouched(engine, before)
    assert engine.refresh({"model.steps": torch.tensor(3)}, partial=True).version == 1


def test_buffers_are_put_back_when_a_refresh_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model=with_buffers(0))
    before = state(engine)
    last = len(engine.weights._tensors) - 1
    with monkeypatch.context() as patch:
        fail_commit(patch, last, PLACES[-1])
        with pytest.raises(MemoryError, match="injected"):
            engine.refresh(with_buffers(1))
    assert_untouched(engine, before)


def test_the_buffers_of_a_model_that_computes_with_them() -> None:
    """glm4_moe's router corrects its scores by a persistent buffer: after a refresh the numbers are the new ones."""
    options = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}

    def made(seed: int) -> PreTrainedModel:
        model = tiny("glm4_moe", seed=seed, **options)
        for name, buffer in persistent_buffers(model).items():
            assert name.endswith("e_score_correction_bias")
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(seed)))
        return model

    engine, new = tiny_engine(model=made(0)), made(1)
    with pytest.raises(InvalidWeights, match="e_score_correction_bias.*give the model itself"):
        engine.refresh(new.named_parameters())
    engine.refresh(new)
    for sample in run(engine, [ask("g", n=2, max_tokens=20)]).values():
        assert np.abs(plain_logprobs(new, PROMPT, sample) - sample.logprobs).max() <= 1e-5


def changed(**tensors: torch.Tensor) -> Pushed:
    return {**pushed(), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}


def with_value(value: float, name: str = "lm_head.weight") -> Pushed:
    new = {n: t.detach().clone() for n, t in pushed().items()}
    new[name].view(-1)[-1] = value
    return new


REFUSED: list[tuple[str, Any, str, str]] = [
    ("unknown", {**pushed(), "model.extra": torch.ones(3)}, "model.extra", "no tensor of this name"),
    ("missing", {n: t for n, t in pushed().items() if n != NORM}, NORM, "missing"),
    ("doubled", [*pushed().items(), (NORM, pushed()[NORM])], NORM, "listed more than once"),
    ("wrong shape", changed(model__norm__weight=torch.ones(65)), NORM, r"\(65,\).*\(64,\)"),
    ("transposed", changed(lm_head__weight=torch.ones(64, 199)), "lm_head.weight", r"\(64, 199\)"),
    ("integers", changed(model__norm__weight=torch.ones(64, dtype=torch.int64)), NORM, "'int64' cannot be cast"),
    ("complex", changed(model__norm__weight=torch.ones(64, dtype=torch.complex64)), NORM, "'complex64' cannot be cast"),
    ("NaN", with_value(float("nan")), "lm_head.weight", "NaN"),
    ("infinity", with_value(float("inf")), "lm_head.weight", "infinity"),
    (
        "-infinity in the middle",
        with_value(float("-inf"), "model.layers.0.mlp.up_proj.weight"),
        "model.layers.0.mlp",
        "infinity",
    ),
    ("overflow", {n: t.detach().double() * 1e40 for n, t in pushed().items()}, "model.embed_tokens.weight", "overflows"),
    ("nothing", iter(()), "", "no tensors at all"),
    ("sparse", changed(model__norm__weight=torch.ones(64).to_sparse()), NORM, "dense"),
    ("meta", changed(model__norm__weight=torch.ones(64, device="meta")), NORM, "with data"),
    ("no tensor", {**pushed(), NORM: [1.0] * 64}, NORM, "this list"),
]


@pytest.mark.parametrize(("named", "tensor", "reason"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_with_the_tensor_named(named: Any, tensor: str, reason: str) -> None:
    engine = tiny_engine()
    before = state(engine)
    with pytest.raises(InvalidWeights, match=reason) as caught:
        engine.refresh(named)
    assert (caught.value.tensor or "").startswith(tensor) and tensor in str(caught.value)
    assert_untouched(engine, before)
    engine.refresh(pushed())  # nothing is left behind
    assert engine.version == 1


@pytest.mark.parametrize("given", [[torch.ones(3)], [("a", torch.ones(3), 1)], [(1, torch.ones(3))]])
def test_what_is_no_pair_of_name_and_tensor_is_told(given: Any) -> None:
    with pytest.raises(
        InvalidWeights,
        match=r"the model, its state_dict\(\), or \(name, tensor\) pairs as from model.named_parameters\(\)",
    ):
        tiny_engine().refresh(given)


def test_tied_names_with_other_bytes() -> None:
    engine = tiny_engine("llama-mha")
    before = state(engine)
    with pytest.raises(InvalidWeights, match=r"lm_head.weight.*ties it to 'model.embed_tokens.weight'"):
        engine.refresh({**pushed(name="llama-mha"), "lm_head.weight": torch.ones(199, 64)})
    assert_untouched(engine, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_finite_agrees_with_torch(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for value in (
        0.0,
        -0.0,
        largest,
        -largest,
        torch.finfo(dtype).tiny,
        float("nan"),
        float("inf"),
        -float("inf"),
        -float("nan"),
    ):
        values = torch.linspace(-1, 1, 1001).to(dtype)
        values[500] = value
        assert staging.finite(values) == bool(torch.isfinite(values).all()), value
    assert staging.finite(torch.zeros(0, dtype=dtype)) and staging.finite(torch.full((9,), -1.0, dtype=dtype))


@pytest.mark.parametrize("version", [0, 3, 5, -1, 2**63])
def test_versions_only_grow(version: int) -> None:
    engine = tiny_engine()
    engine.refresh(pushed(), version=5)
    before = state(engine)
    with pytest.raises(InvalidWeights, match="version"):
        engine.refresh(pushed(2), version=version)
    assert_untouched(engine, before, 5)
    assert engine.refresh(pushed(2)).version == 6


def staged(engine: Engine, new: Pushed, damage: Any = None, **options: Any) -> tuple[Staging, Any]:
    described = [describe(name, tensor) for name, tensor in new.items()]
    manifest = [with_digest(*each) for each in described]
    data = [bytes_.copy() for _, bytes_ in described]
    if damage is not None:
        damage(data)
    return engine.stage(WeightUpdate(manifest, **options)), source_of(data)


@pytest.mark.parametrize("at", [0, 5, -1])
def test_a_flipped_bit_is_noticed(at: int) -> None:
    def flip(data: list[np.ndarray]) -> None:
        data[at][len(data[at]) // 2] ^= 1

    engine = tiny_engine()
    before, new = state(engine), pushed()
    opened, source = staged(engine, new, flip)
    with pytest.raises(InvalidWeights, match="digest") as caught:
        while not opened.complete:
            opened.feed(source)
    assert caught.value.tensor == list(new)[at]
    with pytest.raises(InvalidWeights, match="has failed"):
        opened.feed(source)
    assert_untouched(engine, before)
    opened.close()
    engine.refresh(new)


def test_one_staging_at_a_time() -> None:
    engine = tiny_engine()
    opened, source = staged(engine, pushed())
    with pytest.raises(RuntimeError, match="close it first"):
        engine.refresh(pushed())
    opened.close()
    with pytest.raises(InvalidWeights, match="closed"):
        opened.feed(source)
    second, _ = staged(engine, pushed())
    opened.close()  # once more, which must not close the second one
    with pytest.raises(RuntimeError, match="close it first"):
        engine.refresh(pushed())
    second.close()
    engine.refresh(pushed())


def test_sources_that_give_little_and_nothing() -> None:
    """A payload may come in any pieces, and not at all for a while."""
    r = random.Random(0)
    engine, new = tiny_engine(), pushed()
    opened, source = staged(engine, {name: tensor.double() for name, tensor in new.items()})
    taken = []
    while not opened.complete:
        taken.append(opened.feed(lambda buffer: source(buffer[: r.choice([0, 1, 3, 5000])])))
    engine.commit(opened)
    assert 0 in taken and sum(taken) == opened.total == opened.received
    assert all(torch.equal(tensor, new[name]) for name, tensor in state(engine).items())


def test_a_source_that_fails_fails_the_staging() -> None:
    engine = tiny_engine()
    before = state(engine)
    opened, source = staged(engine, pushed())

    def broken(buffer: np.ndarray) -> int:
        raise OSError("the disk is gone")

    opened.feed(source)
    with pytest.raises(OSError, match="disk"):
        opened.feed(broken)
    with pytest.raises(InvalidWeights, match="disk"):
        opened.feed(source)
    assert not opened.complete
    assert_untouched(engine, before)


# ── commit and undo ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.some(6)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("k", [0, 1, 9, 20])
def test_a_failure_at_tensor_k_is_undone(k: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    before = state(engine)
    fail_commit(monkeypatch, k, where)
    with pytest.raises(MemoryError, match="injected"):
        engine.refresh(pushed())
    monkeypatch.undo()
    assert_untouched(engine, before)
    engine.refresh(pushed(2))
    assert all(torch.equal(tensor, state(engine)[name]) for name, tensor in pushed(2).items())
    assert engine.weights.live_digest() == engine.weights.digest


def test_a_log_that_fails_leaves_the_weights_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a refresh is said when all of it has happened."""
    engine = tiny_engine(dtype="bfloat16")
    monkeypatch.setattr(RoundingLog, "say", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.refresh(pushed())
    assert engine.weights.version == 1 and engine.weights.live_digest() == engine.weights.digest
    monkeypatch.undo()
    assert engine.refresh(pushed(2)).version == 2


def test_without_undo_the_failure_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    engine = tiny_engine()
    before = state(engine)
    fail_commit(monkeypatch, 5, "before")
    monkeypatch.setattr(Weights, "_undo", lambda self, done, error: None)
    with pytest.raises(MemoryError):
        engine.refresh(pushed())
    with pytest.raises(AssertionError):
        assert_untouched(engine, before)


def test_torn_weights_are_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo itself fails: nobody gets another token, and no refresh pretends to mend it."""
    engine = tiny_engine()
    engine.submit(ask("g"))
    engine.step()
    broken = Failing(np.zeros(4, np.uint8), 2)
    plain = np.zeros(4, np.uint8)
    views = iter([(broken, plain, plain.copy()), (Failing(plain, 1), plain, plain)])
    monkeypatch.setattr(RefreshBuffers, "slices", lambda self, name: [next(views)])
    for _ in range(2):
        with pytest.raises(WeightsTorn):
            engine.refresh(pushed())
    with pytest.raises(WeightsTorn):
        engine.step()


def test_addresses_never_change_and_memory_does_not_grow() -> None:
    """10 refreshes of 50 MB: every parameter stays where it is; memory after the second is memory after the last."""
    engine = tiny_engine(model=tiny("llama", hidden_size=512, intermediate_size=2048, vocab_size=2000, num_hidden_layers=4))
    module = engine.model.module  # type: ignore[attr-defined]
    new = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    size = sum(tensor.nbytes for tensor in new.values())
    assert size > 40e6
    addresses = {name: tensor.data_ptr() for name, tensor in module.named_parameters()}
    process, rss = psutil.Process(), []
    for version in range(1, 11):
        for tensor in new.values():
            tensor.mul_(0.99)
        engine.refresh(new, version=version)
        rss.append(process.memory_info().rss)
    assert {name: tensor.data_ptr() for name, tensor in module.named_parameters()} == addresses
    assert max(rss[2:]) - rss[1] < size / 2, [(r - rss[1]) / 2**20 for r in rss]
    assert engine.weights.live_digest() == engine.weights.digest


def test_a_replaced_parameter_is_noticed() -> None:
    engine = tiny_engine()
    engine.model.module.model.norm.weight.data = torch.ones(64)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="another storage"):
        engine.refresh(pushed())


# ── running samples ───────────────────────────────────────────────────────────────────────────────────────────────────────


def watermark_run(engine: Engine, refreshes: int, tokens: int, kv: str = "keep") -> tuple[list[Sample], int]:
    """16 samples always running, a refresh every few steps, staged slice by slice between the steps."""
    r = random.Random(0)
    samples: list[Sample] = []
    made = done = version = 0
    while done < refreshes or engine.counters.generated_tokens < tokens:
        while len(engine.scheduler.state.groups) < 4:
            engine.submit(group(f"g{made}", [1, 2, 3], n=4, max_tokens=r.choice([5, 50, 300]), ignore_eos=True))
            made += 1
        version += r.choice([1, 1, 3])
        opened, source = staged(engine, weights_of(version), version=version)
        while not opened.complete:
            if r.random() < 0.3:
                samples += engine.step()
            opened.feed(source)
        engine.commit(opened, kv)  # type: ignore[arg-type]
        done += 1
        for _ in range(r.choice([1, 5, tokens // refreshes // 8])):
            samples += engine.step()
    for name in list(engine.scheduler.state.groups):
        samples += engine.abort(name)
    while engine.has_work:
        samples += engine.step()
    return samples, made


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("kv", ["keep", "recompute", "abort"])
def test_good_refreshes_over_running_samples(kv: str, overlap: bool) -> None:
    engine = watermark_engine(overlap_steps=overlap)
    samples, groups = watermark_run(engine, 12, 2000, kv)
    assert check_marks(samples) >= 2000
    assert len(samples) == 4 * groups
    assert any(len(sample.weight_versions) > 2 for sample in samples) == (kv != "abort")
    assert engine.weights.live_digest() == engine.weights.digest
    check(engine.scheduler)


@pytest.mark.long
def test_good_refreshes_over_running_samples_long() -> None:
    samples, _ = watermark_run(watermark_engine(), 100, 50_000)
    assert check_marks(samples) >= 50_000


def test_applying_without_staging_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: tensors go into the live model as they come."""
    monkeypatch.setattr(RefreshBuffers, "place", lambda self, name: self._tensors[name])
    engine = watermark_engine()
    with pytest.raises(AssertionError, match=f"are .*{MIXED}"):
        check_marks(watermark_run(engine, 25, 1000)[0])


def test_the_version_before_the_weights_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: tokens are labelled with the version that is being staged."""
    engine = watermark_engine()
    stage = Weights.stage

    def early(self: Weights, update: WeightUpdate) -> Staging:
        opened = stage(self, update)
        engine.scheduler.state.version = opened.version
        return opened

    monkeypatch.setattr(Weights, "stage", early)
    with pytest.raises(AssertionError, match="labelled"):
        check_marks(watermark_run(engine, 25, 1000)[0])


@pytest.mark.parametrize("fault", ["died", "flipped", "missing", "apply"])
def test_a_failed_push_leaves_no_trace(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push breaks at a random point under 16 running samples; after each the live digest is the last committed one."""
    r = random.Random(fault)
    engine = watermark_engine()
    for i in range(4):
        engine.submit(group(f"g{i}", [1, 2, 3], n=4, max_tokens=2000, ignore_eos=True))
    good = 0
    for attempt in range(1, 26):
        new = weights_of(attempt)
        if attempt % 5 == 0:
            engine.refresh(new, version=attempt)
            good = attempt
            continue
        if fault == "missing":
            del new[f"w{r.randrange(6)}"]
            with pytest.raises(InvalidWeights, match="missing"):
                engine.refresh(new)
        elif fault == "apply":
            with monkeypatch.context() as patch:
                fail_commit(patch, r.randrange(12), r.choice(PLACES))
                with pytest.raises(MemoryError, match="injected"):
                    engine.refresh(new)
        else:
            opened, source = staged(engine, new, (lambda data: _flip(data, r)) if fault == "flipped" else None)
            stop = r.randrange(opened.total)
            try:
                while not opened.complete and (fault == "flipped" or opened.received < stop):
                    opened.feed(source)
                    assert engine.step() == []
            except InvalidWeights as error:
                assert "digest" in str(error)
            opened.close()
        engine.step()
        assert engine.version == good and engine.weights.live_digest() == engine.weights.digest
        assert engine.model.read() == token_of(good)  # type: ignore[attr-defined]
    samples = [sample for i in range(4) for sample in engine.abort(f"g{i}")]
    assert len(samples) == 16 and check_marks(samples) > 16


def _flip(data: list[np.ndarray], r: random.Random) -> None:
    r.choice(data)[r.randrange(1_200_000)] ^= 1 << r.randrange(8)


# ── KV of other versions ──────────────────────────────────────────────────────────────────────────────────────────────────

PROMPT = np.random.default_rng(0).integers(3, 199, 100).astype(np.int32)


def ask(id: str, prompt: np.ndarray = PROMPT, **sampling: Any) -> Group:
    return Group(id, prompt, Sampling(**{"n": 2, "max_tokens": 20, "seed": 7, "ignore_eos": True, **sampling}))


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("native", "float32"),
        ("native", "bfloat16"),
        pytest.param("reference", "float32", marks=pytest.mark.long),
        pytest.param("reference", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_new_groups_equal_a_fresh_engine(where: str, attention: str, dtype: str) -> None:
    """The prefix of the old weights lies in the index, on the device or in host memory: nobody reads it. Whatever else the
    engine keeps of its weights has changed with them."""

    def build(seed: int) -> Engine:
        options: dict[str, Any] = {"attention": attention, "kv_tokens": 512, "cpu_offload_gib": 0.01 if where == "host" else 0}
        return tiny_engine(dtype=dtype, model=tiny("llama", getattr(torch, dtype), seed), **options)

    new, engine = tiny("llama", getattr(torch, dtype), seed=1), build(0)
    run(engine, [ask("old")])
    if where == "host":
        others = np.random.default_rng(1).integers(3, 199, (8, 100)).astype(np.int32)
        run(engine, [ask(f"other{i}", other, n=1) for i, other in enumerate(others)])
        assert engine.status()["kv"]["host_cached"] > 10
    hits = engine.counters.prefix_hit_tokens
    run(engine, [ask("again")])
    assert engine.counters.prefix_hit_tokens >= hits + 96, "the old prefix is not where this test wants it"
    engine.refresh(new.named_parameters())
    hits = engine.counters.prefix_hit_tokens
    mine = run(engine, [ask("new")])
    assert engine.counters.prefix_hit_tokens == hits
    fresh = run(build(1), [ask("new")])
    for key, sample in fresh.items():
        assert mine[key].token_ids.tolist() == sample.token_ids.tolist() and mine[key].weight_versions == [(0, 1)]
        assert np.array_equal(mine[key].logprobs, sample.logprobs)
        if dtype == "float32":
            assert np.abs(plain_logprobs(new, PROMPT, sample) - sample.logprobs).max() <= 1e-5


def test_a_group_that_allows_a_lag_reads_old_kv() -> None:
    """Negative control of the test above, and what `max_kv_lag` is for."""
    engine = tiny_engine()
    run(engine, [ask("old")])
    engine.refresh(pushed())
    mine = run(engine, [ask("new", max_kv_lag=1)])
    assert engine.counters.prefix_hit_tokens == 96
    fresh = run(tiny_engine(model=tiny("llama", seed=1)), [ask("new")])
    assert np.abs(mine["new", 0].logprobs[0] - fresh["new", 0].logprobs[0]) > 1e-3


@pytest.mark.parametrize("lag", [0, 1])
def test_a_refresh_in_the_middle_of_a_prefill(lag: int) -> None:
    """All tokens are drawn by the new weights and say so: then the prompt's KV is theirs too, unless the group allows a lag."""
    engine = tiny_engine(max_batch_tokens=64)
    engine.submit(ask("g", max_kv_lag=lag))
    assert engine.step() == [] and engine.counters.forks == 0
    engine.refresh(pushed())
    mine = run(engine)
    assert engine.counters.recomputed_tokens == (0 if lag else 64)
    fresh = run(tiny_engine(model=tiny("llama", seed=1)), [ask("g")])
    for key, sample in fresh.items():
        assert mine[key].weight_versions == [(0, 1)]
        assert np.array_equal(mine[key].logprobs, sample.logprobs) == (lag == 0)


@pytest.mark.some(4)
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_samples_go_on_over_a_refresh(kv: str, lag: int, prefix_cache: bool) -> None:
    """Recomputed, the rest of a sample is what a fresh engine makes of the tokens so far, whatever KV a new sample may read;
    kept, it is not, and says so."""
    new = tiny("llama", seed=1)
    engine = tiny_engine(prefix_cache=prefix_cache)
    engine.submit(ask("g", n=3, max_tokens=30, max_kv_lag=lag))
    for _ in range(11):
        assert engine.step() == []
    engine.refresh(new.named_parameters(), kv=kv)  # type: ignore[arg-type]
    assert (engine.status()["kv"]["stale_token_ratio"] > 0.9) == (kv == "keep")
    samples = run(engine)
    assert engine.status()["kv"]["stale_token_ratio"] == 0
    for sample in samples.values():
        (first, old), (start, version) = sample.weight_versions
        assert (first, old, version) == (0, 0, 1) and 0 < start < 30
        off = np.abs(plain_logprobs(new, PROMPT, sample) - sample.logprobs)[start:].max()
        assert off <= 1e-5 if kv == "recompute" else off > 1e-3


def test_recompute_prefills_each_prefix_once() -> None:
    """64 running samples of 4 groups: prefilled again are 4 prompts and 64 suffixes, in chunks between decode steps."""
    engine = tiny_engine(kv_tokens=16_384, max_num_seqs=64)
    size = engine.config.block_tokens
    prompts = np.random.default_rng(2).integers(3, 199, (4, 12 * size)).astype(np.int32)
    for i, prompt in enumerate(prompts):
        engine.submit(ask(f"g{i}", prompt, n=16, max_tokens=60, seed=i, temperature=2.0))
    while (
        min((len(seq.output) for seq in engine.scheduler.state.running), default=0) < 21
        or len(engine.scheduler.state.running) < 64
    ):
        assert engine.step() == []
    cached = [seq.cached for seq in engine.scheduler.state.running]
    shared = prompts.shape[1]
    before = engine.counters.prefill_tokens
    engine.refresh(pushed(), kv="recompute")
    while any(seq.uncached > 1 for seq in engine.scheduler.state.running):
        assert engine.step() == []
    prefilled = engine.counters.prefill_tokens - before
    want = 4 * shared + sum(length + 1 - shared for length in cached)
    print(f"prefilled {prefilled} tokens; each prefix once + each suffix once = {want}; everything = {sum(cached) + 64}")
    assert prefilled == want
    run(engine)


def test_recompute_of_an_abort_and_of_a_bound() -> None:
    engine = watermark_engine(drafts=0)  # a token a step
    engine.submit(group("bound", [1, 2, 3], n=2, max_tokens=50, max_version_lag=1, ignore_eos=True))
    engine.submit(group("free", [1, 2, 3], n=2, max_tokens=50, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.refresh(weights_of(1))
    assert engine.step() == []
    engine.refresh(weights_of(2))
    stale = engine.step()
    assert [(s.group_id, s.finish_reason, len(s.token_ids)) for s in stale] == [("bound", "stale", 6)] * 2
    engine.submit(group("waits", [1, 2, 3], n=2, max_tokens=50, ignore_eos=True))
    engine.refresh(weights_of(3), kv="abort")
    assert engine.has_work
    aborted = engine.step()
    assert [(s.group_id, s.finish_reason) for s in aborted] == [("free", "aborted")] * 2
    samples = run(engine)
    assert {s.weight_versions[0] for s in samples.values()} == {(0, 3)}, "a group that had not begun is not aborted"
    check_marks([*stale, *aborted, *samples.values()])


# ── pause, drain, resume ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_pause_and_resume() -> None:
    engine = watermark_engine()
    engine.submit(group("g", [1, 2, 3], n=2, max_tokens=10, ignore_eos=True))
    engine.step()
    engine.pause()
    steps = engine.counters.steps
    assert not engine.has_work and engine.step() == [] and engine.counters.steps == steps
    assert engine.status()["state"] == "paused"
    engine.refresh(weights_of(1), kv="abort")
    assert engine.has_work and len(engine.step()) == 2, "a refresh may end samples of a paused engine"
    engine.resume()
    assert engine.status()["state"] == "running" and not engine.has_work


@pytest.mark.parametrize("kv_tokens", [96, 65_536])
def test_drain_finishes_what_has_begun(kv_tokens: int) -> None:
    """Also what pressure has preempted: a tiny pool holds a part of the children only."""
    engine = watermark_engine(kv_tokens=kv_tokens, max_num_seqs=8)
    for i in range(2):
        engine.submit(group(f"begun{i}", [1, 2, 3], n=8, max_tokens=40, ignore_eos=True))
    while engine.counters.forks < 7:
        engine.step()
    begun = {seq.state.group.id for seq in engine.scheduler.state.running}
    engine.submit(group("later", [1, 2, 3], n=1, max_tokens=5, ignore_eos=True))
    assert not engine.drain() and engine.status()["state"] == "draining"
    samples: list[Sample] = []
    for _ in range(5000):
        if engine.drain():
            break
        samples += engine.step()
    assert {sample.group_id for sample in samples} == begun and {s.finish_reason for s in samples} == {"length"}
    assert not engine.has_work and "later" in engine.scheduler.state.groups
    engine.resume()
    assert ("later", 0) in run(engine)


def test_a_partial_refresh_digests_nothing_in_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that were never sent are read when it begins."""
    model = tiny("llama")
    engine = tiny_engine(model=model)
    name, tensor = next(iter(model.named_parameters()))
    data = describe(name, tensor.detach() * 2)
    staged = engine.stage(WeightUpdate([with_digest(*data)], partial=True))
    source = source_of([data[1]])
    while not staged.complete:
        staged.feed(source)
    monkeypatch.setattr("rollout.engine.weights.inventory.tensor_bytes", None)  # would raise TypeError
    assert engine.commit(staged).digest == engine.weights.digest
    monkeypatch.undo()
    assert engine.weights.live_digest() == engine.weights.digest
