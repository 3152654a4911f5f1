"""`rollout bisect`: twelve planted causes, each named, in runs in which everything differs after the first difference."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollout import ledger
from rollout.client.api import RolloutClient
from rollout.engine.values import PartialSample, Sampling
from rollout.ledger.bisect import Difference, bisect, different_samples, first_other_token
from rollout.ledger.writer import LedgerWriter
from tests.support.hash_engine import HashEngine, tensors_of
from tests.support.ledgers import ROOM, WAIT, recorded
from tests.support.tiny import tiny_engine
from tests.support.wire import serving

STEPS, PLANTED = 5, 2


class Run:
    """A run of a trainer whose weights depend on all samples before. Tests replace what they plant."""

    engine: Callable[[], HashEngine] = HashEngine
    tokens = False
    kv = "keep"

    def prompt(self, step: int, i: int) -> list[int]:
        return [1, 2, 10 * step + i]

    def sampling(self, step: int, i: int) -> Sampling:
        return Sampling(n=2, max_tokens=20, seed=100 * step + i)

    def tool(self, step: int) -> list[int]:
        return [5, 6, step]

    def weights(self, version: int, before: int) -> dict[str, torch.Tensor]:
        return tensors_of(version + before % 1000)

    def pushes(self, version: int) -> list[int]:
        """Return the versions that are pushed where this one is due."""
        return [version]

    def write(self, path: Path) -> ledger.RecordedRun:
        before = 0
        with recorded(path, self.engine(), tokens=self.tokens) as client:
            for step in range(STEPS):
                for i in range(2):
                    prompt, sampling = self.prompt(step, i), self.sampling(step, i)
                    group = client.submit(prompt, sampling, f"{step}/{i}").result(timeout=WAIT)
                    turn = client.next_turn(group[0], prompt, sampling, f"{step}/{i}/turn", append=self.tool(step))
                    for sample in [*group, *turn.result(timeout=WAIT)]:
                        before = zlib.crc32(sample.token_ids.tobytes(), before)
                for version in self.pushes(step + 1):
                    client.refresh(self.weights(version, before), version=self.number(step, version), kv=self.kv_of(version))  # type: ignore[arg-type]
        return ledger.read(path)

    def number(self, step: int, version: int) -> int | None:
        return version

    def kv_of(self, version: int) -> str:
        return self.kv


class Plain(Run):
    """Nothing is planted."""


class Fixed(Run):
    """Weights that do not depend on samples."""

    def weights(self, version: int, before: int) -> dict[str, torch.Tensor]:
        return tensors_of(version)

    def number(self, step: int, version: int) -> int | None:
        return None


class ABit(Run):
    def weights(self, version: int, before: int) -> dict[str, torch.Tensor]:
        made = super().weights(version, before)
        if version == PLANTED:
            made["w2"].view(torch.int32)[7] ^= 1
        return made


class KVDtype(Run):
    def engine(self) -> HashEngine:  # type: ignore[override]
        engine = HashEngine()
        engine.kv_dtype = "bfloat16"
        return engine


class BlockSize(Run):
    def engine(self) -> HashEngine:  # type: ignore[override]
        engine = HashEngine()
        engine.block_size = 32
        return engine


class Arithmetic(Run):
    def engine(self) -> HashEngine:  # type: ignore[override]
        engine = HashEngine()
        engine.arithmetic = "hash/2"
        return engine


class Order(Fixed):
    def weights(self, version: int, before: int) -> dict[str, torch.Tensor]:
        return tensors_of({2: 3, 3: 2}.get(version, version))


class Seed(Run):
    def sampling(self, step: int, i: int) -> Sampling:
        sampling = super().sampling(step, i)
        return msgspec.structs.replace(sampling, seed=77) if (step, i) == (PLANTED, 1) else sampling


class Truncation(Run):
    def sampling(self, step: int, i: int) -> Sampling:
        sampling = super().sampling(step, i)
        return msgspec.structs.replace(sampling, top_p=0.9) if (step, i) == (PLANTED, 1) else sampling


class Temperature(Run):
    def sampling(self, step: int, i: int) -> Sampling:
        sampling = super().sampling(step, i)
        return msgspec.structs.replace(sampling, temperature=0.9) if (step, i) == (PLANTED, 1) else sampling


class OtherPrompt(Run):
    def prompt(self, step: int, i: int) -> list[int]:
        return [1, 2, 9] if (step, i) == (PLANTED, 1) else super().prompt(step, i)


class ToolAnswer(Run):
    def tool(self, step: int) -> list[int]:
        return [5, 7, step] if step == PLANTED else super().tool(step)


class KVPolicyOf(Run):
    def kv_of(self, version: int) -> str:
        return "recompute" if version == PLANTED else "keep"


class Lost(Run):
    def pushes(self, version: int) -> list[int]:
        return [] if version == PLANTED else [version]


class LostLast(Run):
    def pushes(self, version: int) -> list[int]:
        return [] if version == STEPS - 1 else [version]


class LostWithoutNumbers(Fixed):
    def pushes(self, version: int) -> list[int]:
        return [] if version == PLANTED else [version]


class Doubled(Fixed):
    def pushes(self, version: int) -> list[int]:
        return [version, version] if version == PLANTED else [version]


class DoubledLast(Fixed):
    def pushes(self, version: int) -> list[int]:
        return [version, version] if version == STEPS - 1 else [version]


def written(path: Path, groups: list[tuple[str, list[int], int]], *, then: int = 0) -> Any:
    """Return the ledger of a run with these groups, and `then` refreshes with one more group after each."""
    with recorded(path, HashEngine(), tokens=False) as client:
        for id, prompt, seed in groups:
            client.submit(prompt, Sampling(n=2, max_tokens=20, seed=seed), id).result(WAIT)
        for version in range(1, then + 1):
            client.refresh(tensors_of(version), version=version)
            client.submit([version], Sampling(n=2, max_tokens=20, seed=version), f"{version}/0").result(WAIT)
    return ledger.read(path)


ONE, TWO = ("0/0", [1, 2, 3], 1), ("0/1", [4, 5, 6], 2)


@pytest.mark.parametrize("then", [0, 2])
@pytest.mark.parametrize(
    ("groups", "kind", "named"),
    [
        ([ONE, ("0/z", [7, 8, 9], 3)], "prompt", "0/1"),
        ([ONE, ("0/z", [4, 5, 6], 3)], "seed", "0/1"),
        ([ONE, ("0/0", [7, 8, 9], 3)], "prompt", "0/1"),
        ([ONE, ("0/z", [4, 5, 6], 2)], None, ""),
        ([ONE], "group or shorter", "0/1"),
        ([ONE, TWO, ("0/2", [1], 1)], "group or shorter", "0/2"),
        ([ONE, TWO], None, ""),
    ],
)
def test_a_group_that_one_run_has_not(
    groups: list[tuple[str, list[int], int]], kind: str | None, named: str, then: int, tmp_path: Path
) -> None:
    """Also where other groups of the version have equal ids, and where the numbers of groups and samples are equal."""
    a, b = written(tmp_path / "a", [ONE, TWO], then=then), written(tmp_path / "b", groups, then=then)
    for one, other in ((a, b), (b, a)):
        difference = bisect(one, other)
        if kind is None:
            assert difference is None
            continue
        assert difference is not None and difference.kind in (kind or "").replace("group or", "group" if then else "").split()
        assert difference.step == 0 and (named in (difference.group_id, *difference.why.split("'")) or one is b or not then)


def test_tokens_that_children_had(tmp_path: Path) -> None:
    """Other ones, as many: no run is accused of not having computed what its ledger says."""
    runs = []
    for name, tokens in (("a", [5, 6, 7]), ("b", [5, 6, 8]), ("c", [5, 6, 7])):
        given = PartialSample(
            index=0, token_ids=np.array(tokens, np.int32), logprobs=np.zeros(3, np.float32), weight_versions=[(0, 0)]
        )
        with recorded(tmp_path / name, tiny_engine(), tokens=False) as client:  # type: ignore[arg-type]
            client.submit([1, 2, 3], Sampling(n=1, max_tokens=20, seed=5), "0/0", partials=[given]).result(WAIT)
        runs.append(ledger.read(tmp_path / name))
    difference = bisect(runs[0], runs[1])
    assert difference is not None and (difference.kind, difference.group_id) == ("group", "0/0")
    assert bisect(runs[0], runs[2]) is None


def found(tmp_path: Path, one: type[Run], other: type[Run]) -> Difference | None:
    return bisect(one().write(tmp_path / "a.ledger"), other().write(tmp_path / "b.ledger"))


@pytest.mark.parametrize(
    ("base", "planted", "kind", "step", "words"),
    [
        (Plain, ABit, "tensor", PLANTED, "version 2: other bytes: w2"),
        (Plain, KVDtype, "dtype", None, "kv_dtype is float32 in a, bfloat16 in b"),
        (Fixed, Order, "order of refreshes", 2, "versions 2 and 3 of a have changed places"),
        (Plain, Seed, "seed", PLANTED, "the seed is 201 in a, 77 in b"),
        (Plain, Truncation, "truncation", PLANTED, "top_p is 1.0 in a, 0.9 in b"),
        (Plain, Temperature, "sampling", PLANTED, "temperature is 1.0 in a, 0.9 in b"),
        (Plain, OtherPrompt, "prompt", PLANTED, "the prompt is another one"),
        (Plain, ToolAnswer, "tool answer", PLANTED, "what follows child 0 of '2/0' is another one"),
        (Plain, KVPolicyOf, "kv policy", PLANTED, "kv='keep' in a, 'recompute' in b"),
        (Plain, BlockSize, "block size", None, "block_size is 16 in a, 32 in b"),
        (Plain, Arithmetic, "arithmetic", None, "arithmetic is hash/1 in a, hash/2 in b"),
        (Plain, Lost, "lost refresh", 1, "b has no version 2"),
        (Plain, LostLast, "lost refresh", STEPS - 2, f"b has no version {STEPS - 1}"),
        (Fixed, LostWithoutNumbers, "lost refresh", 2, "b has no version 2"),
        (Fixed, Doubled, "doubled refresh", 3, "b has the weights of version 2 twice"),
        (Fixed, DoubledLast, "doubled refresh", STEPS, f"b has the weights of version {STEPS - 1} twice"),
    ],
)
def test_a_planted_cause_is_named(
    base: type[Run], planted: type[Run], kind: str, step: int | None, words: str, tmp_path: Path
) -> None:
    difference = found(tmp_path, base, planted)
    assert difference is not None and (difference.kind, difference.step) == (kind, step), difference
    assert words in difference.why
    a, b = (ledger.read(tmp_path / f"{name}.ledger") for name in "ab")
    mirrored = bisect(b, a)
    assert mirrored is not None and mirrored.kind == kind, "the other way round as well"
    if step is not None and kind not in ("doubled refresh", "lost refresh"):
        assert difference.samples_equal >= 8 * (step - 1)


@pytest.mark.parametrize("kind", [Plain, Fixed])
def test_equal_runs(kind: type[Run], tmp_path: Path) -> None:
    assert found(tmp_path, kind, kind) is None


def test_a_tensor_in_another_dtype(tmp_path: Path) -> None:
    """A service that computes in bfloat16: its weights have other names for their numbers."""
    runs = []
    for dtype in ("float32", "bfloat16"):
        writer = LedgerWriter(str(tmp_path / dtype), ROOM)
        with serving(tiny_engine(dtype=dtype), ledger=writer) as service, RolloutClient(service.endpoint) as client:
            client.submit([5, 6, 7], Sampling(seed=1, max_tokens=4)).result(timeout=WAIT)
        runs.append(ledger.read(tmp_path / dtype))
    difference = bisect(*runs)
    assert difference is not None and difference.kind == "dtype"
    names = [sorted(each.changed) for run in runs for each in run.refreshes]
    assert names[0] == names[1] and "model.embed_tokens.weight" in names[0], "a service's own tensors are in its ledger"
    same_kv = msgspec.structs.replace(runs[1].services[0], kv_dtype="float32")
    runs[1].services[0] = same_kv
    difference = bisect(*runs)
    assert difference is not None and difference.kind == "dtype"
    assert "dtype float32 in a, bfloat16 in b" in difference.why and "that the services started with" in difference.why


# samples


class Lying(Run):
    """A service that computes with other weights than it says, from a version on."""

    tokens = False

    def engine(self) -> HashEngine:  # type: ignore[override]
        engine, honest = HashEngine(), HashEngine.commit

        def commit(staging: Any, *args: Any, **more: Any) -> Any:
            done = honest(engine, staging, *args, **more)
            if engine.version == PLANTED:
                engine.key ^= 1
            return done

        engine.commit = commit  # type: ignore[method-assign]
        return engine


@pytest.mark.parametrize("tokens", [False, True])
def test_a_sample_that_nothing_explains(tokens: bool, tmp_path: Path) -> None:
    class WithTokens(Plain):
        pass

    class LyingWithTokens(Lying):
        pass

    WithTokens.tokens = LyingWithTokens.tokens = tokens
    difference = found(tmp_path, WithTokens, LyingWithTokens)
    assert difference is not None and (difference.kind, difference.step) == ("token", PLANTED)
    assert (difference.group_id, difference.index) == ("2/0", 0) and difference.tokens == (0, 1)
    assert "one of the runs has not computed what it says" in difference.why


def with_sample(run: ledger.RecordedRun, **fields: Any) -> None:
    """Change the first sample of a run."""
    group = run.groups[2]
    group.samples[0] = msgspec.structs.replace(group.samples[0], **fields)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"result": "00" * 20, "marks": ("00" * 2,)}, "log-prob", "not all log-probs: the first other one is of token 0"),
        ({"result": "00" * 20, "token_digest": "00", "finish_reason": "cut", "tokens": 19}, "end", "ends after (20, 'length')"),
        ({"result": "00" * 20, "weight_versions": ((0, 0), (3, 1))}, "refresh at another token", "[(0, 0), (3, 1)] in b"),
        ({"result": "00" * 20, "kv_versions": ((5, 0, 0),)}, "other KV", "KV of other weights"),
        ({"result": "00" * 20, "token_digest": "00"}, "token", "one of tokens 16 to 19"),
    ],
)
def test_how_samples_differ(fields: dict[str, Any], kind: str, words: str, tmp_path: Path) -> None:
    Plain().write(tmp_path / "a.ledger")
    a, b = ledger.read(tmp_path / "a.ledger"), ledger.read(tmp_path / "a.ledger")
    marks = b.groups[2].samples[0].marks
    if "marks" in fields:
        fields = fields | {"marks": (*fields["marks"], *marks[1:])}
    with_sample(b, **fields)
    difference = bisect(a, b)
    assert difference is not None and difference.kind == kind, difference
    assert words in difference.why and difference.group_id == "0/1"


def test_a_difference_belongs_to_the_weights_under_which_it_began(tmp_path: Path) -> None:
    """A child that lives on under weights that differ, because of another sample, is not the cause; nor are they."""
    runs = []
    for name in "ab":
        with recorded(tmp_path / name, HashEngine(step_s=0.002)) as client:
            long = client.submit([9], Sampling(n=1, max_tokens=400, seed=1), "long")
            client.submit([1], Sampling(max_tokens=3, seed=5 + (name == "b")), "short").result(timeout=WAIT)
            client.refresh(tensors_of(1 + (name == "b")), version=1)
            long.result(timeout=WAIT)
        runs.append(ledger.read(tmp_path / name))
    difference = bisect(*runs)
    assert difference is not None and (difference.kind, difference.group_id) == ("seed", "short")
    assert [pair.a_group.group_id for pair in different_samples(*runs)] == ["long", "short"]


def test_runs_of_other_lengths(tmp_path: Path) -> None:
    Plain().write(tmp_path / "a.ledger")
    a, b = ledger.read(tmp_path / "a.ledger"), ledger.read(tmp_path / "a.ledger")
    b.groups[-1].samples.clear()
    difference = bisect(a, b)
    assert difference is not None and difference.kind == "shorter" and "b has less of version 4" in difference.why
    b.refreshes.pop()
    difference = bisect(a, b)
    assert difference is not None and difference.kind == "shorter"
    empty = ledger.RecordedRun()
    assert bisect(empty, empty) is None
    difference = bisect(a, empty)
    assert difference is not None and "b has no records" in difference.why


def test_a_run_whose_service_was_killed_is_equal_to_one_that_ran_through(tmp_path: Path) -> None:
    """With a journal, the next service continues the children that had not ended, with the weights of before."""
    Plain().write(tmp_path / "a.ledger")
    a, b = ledger.read(tmp_path / "a.ledger"), ledger.read(tmp_path / "a.ledger")
    b.services[0] = msgspec.structs.replace(b.services[0], closed=False)
    last = b.refreshes[2]
    b.services.append(msgspec.structs.replace(b.services[0], version=last.version, digest=last.digest, closed=True))
    cut = next(i for i, group in enumerate(b.groups) if group.version == last.version) + 1
    rest = b.groups[cut]
    left = msgspec.structs.replace(rest, service=1, indices=tuple(rest.samples), samples=dict(list(rest.samples.items())[1:]))
    for group in b.groups[cut + 1 :]:
        group.service = 1
    for refresh in b.refreshes[3:]:
        refresh.service = 1
    rest.samples = dict(list(rest.samples.items())[:1])
    b.groups.insert(cut + 1, left)
    assert bisect(a, b) is None and bisect(b, a) is None
    left.samples = {index: msgspec.structs.replace(sample, result="00" * 20) for index, sample in left.samples.items()}
    difference = bisect(a, b)
    assert left.samples and difference is not None and difference.kind in ("token", "log-prob")


def test_random_ids_are_matched_by_their_order(tmp_path: Path) -> None:
    Seed().write(tmp_path / "b.ledger")
    Plain().write(tmp_path / "a.ledger")
    a, b = (ledger.read(tmp_path / f"{name}.ledger") for name in "ab")
    for i, group in enumerate(b.groups):
        group.group_id = f"random {i * 7919 % 1009}"
        group.after = None
    for group in a.groups:
        group.after = None
    difference = bisect(a, b)
    assert difference is not None and (difference.kind, difference.step) == ("seed", PLANTED)


def test_marks_bound_the_first_other_token(tmp_path: Path) -> None:
    """Against the truth, for a difference at each token."""
    writer_ids = np.arange(40, dtype=np.int32)
    from rollout.engine.values import Sample
    from rollout.ledger import records as r

    def sample(ids: np.ndarray) -> Any:
        made = Sample(group_id="g", index=0, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish_reason="length",
                      weight_versions=[(0, 0)], prompt_tokens=1)  # fmt: skip
        marks = r.marks_of(made)
        return ledger.RecordedSample(
            index=0, finish_reason="length", tokens=len(ids), result="", token_digest=r.token_digest(ids).hex(),
            marks=tuple(marks[i : i + r.MARK].hex() for i in range(0, len(marks), r.MARK)),
            weight_versions=(), kv_versions=(), seed=0,
            token_ids=None, logprobs=None, place=0,
        )  # fmt: skip

    for at in range(40):
        other = writer_ids.copy()
        other[at] += 1
        low, high = first_other_token(sample(writer_ids), sample(other))
        assert low <= at < high and high <= max(1, 2 * low, 40)
