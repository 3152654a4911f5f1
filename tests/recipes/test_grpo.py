"""recipes/grpo.py on a tiny model in this process: its arithmetic, its versions, and that it learns."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.client.handle import OpenHandle
from rollout.client.submission import continued_group
from rollout.config import InputError
from rollout.engine.values import Group, Sample, Sampling
from rollout.exact import use_exact
from rollout.recipes import grpo, policy
from tests.support.tiny import plain_logprobs, tiny, tiny_engine


class Client:
    """An engine with a client's manners. Groups run when somebody waits for the first of them, and before a refresh."""

    memo = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model)
        self.engine = tiny_engine(model=self.model)
        self.handles: dict[str, OpenHandle] = {}

    def submit(self, prompt: list[int], sampling: Sampling, group_id: str) -> OpenHandle:
        self.engine.submit(Group(group_id, np.array(prompt, np.int32), sampling))
        self.handles[group_id] = OpenHandle(Group(group_id, np.array(prompt, np.int32), sampling), [], b"")
        self.run()
        return self.handles[group_id]

    def run(self) -> None:
        while self.engine.has_work:
            for sample in self.engine.step():
                self.handles[sample.group_id].add_sample(sample)

    def refresh(self, model: torch.nn.Module, *, version: int, kv: str) -> Any:
        assert version > self.engine.version
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                own[name].copy_(tensor)
        self.engine.scheduler.refresh(version, kv)
        return SimpleNamespace(version=version, seconds=0.0, paused_seconds=0.0, bytes=2, sent_bytes=2)

    def refresh_lora(self, model: Any, *, version: int, kv: str) -> Any:
        self.refresh(copy.deepcopy(model).merge_and_unload(), version=version, kv=kv)
        return SimpleNamespace(version=version, seconds=0.0, paused_seconds=0.0, bytes=2, sent_bytes=1)


class Waited(OpenHandle):
    """The rest of a group, which runs when somebody waits for it."""

    client: Client

    def result(self, timeout: float | None = None) -> list[Sample]:
        if not self.done:
            self.client.engine.submit(self.group)
            self.client.run()
        return super().result(timeout)


class CutClient(Client):
    """Children that were cut go on when somebody waits for them: after the next refresh."""

    resumed = 0

    def continue_samples(self, samples: list[Sample], prompt: np.ndarray, sampling: Sampling, group_id: str) -> OpenHandle:
        handle = self.handles[group_id] = Waited(continued_group(group_id, samples, prompt, sampling), [], b"")
        handle.client, self.resumed = self, self.resumed + len(samples)
        return handle


class Even:
    """Reward: the share of even tokens."""

    held_out = range(0)

    def prompt(self, index: int) -> list[int]:
        return [3, 5, 7 + index % 4]

    def reward(self, index: int, sample: Sample) -> float:
        return float((sample.token_ids % 2 == 0).mean())


OPTIONS = grpo.Options(steps=20, groups=3, n=8, max_tokens=6, learning_rate=3e-3)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, float]]:
    return run(OPTIONS)


def run(options: grpo.Options) -> list[dict[str, float]]:
    model = tiny("llama")
    return list(grpo.train(options, Client(model), Even(), model))  # type: ignore[arg-type]


def gain(rows: list[dict[str, float]]) -> float:
    fifth = len(rows) // 5
    rewards = [row["train/reward"] for row in rows]
    return float(np.mean(rewards[-fifth:]) - np.mean(rewards[:fifth]))


def test_it_learns(rows: list[dict[str, float]]) -> None:
    assert gain(rows) > 0.2


def test_without_refresh_it_does_not() -> None:
    assert abs(gain(run(dataclasses.replace(OPTIONS, refresh=False)))) < 0.1


def test_children_that_were_cut_go_on_under_new_weights() -> None:
    """Every group is trained on whole, a step later; its tokens are two versions old at most."""
    model, seen = tiny("llama"), list[Sample]()
    client = CutClient(model)
    client.engine.model.eos_token_ids = frozenset(range(5, 199, 12))  # children of different lengths

    class Counted(Even):
        def reward(self, index: int, sample: Sample) -> float:
            seen.append(sample)
            return super().reward(index, sample)

    options = dataclasses.replace(OPTIONS, partial=True, max_tokens=12, steps=8)
    rows = list(grpo.train(options, client, Counted(), model))  # type: ignore[arg-type]
    assert [row["train/version"] for row in rows] == list(range(1, 9))
    assert client.resumed > 8 and len(seen) == 8 * OPTIONS.groups * OPTIONS.n
    assert {sample.finish_reason for sample in seen} == {"stop", "length"}
    assert max(row["train/lag_max"] for row in rows) == 2
    assert any(len(sample.weight_versions) > 1 for sample in seen)
    for first in range(0, len(seen), OPTIONS.n):
        assert [sample.index for sample in seen[first : first + OPTIONS.n]] == list(range(OPTIONS.n))


def test_adapters_learn_and_travel_alone() -> None:
    pytest.importorskip("peft")
    options = dataclasses.replace(OPTIONS, steps=25, lora=True, lora_rank=16, lora_learning_rate=6e-3)
    model = policy.with_adapters(tiny("llama"), options.lora_rank, options.lora_alpha)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    rows = list(grpo.train(options, Client(tiny("llama")), Even(), model))  # type: ignore[arg-type]
    assert gain(rows) > 0.12 and {row["train/sent_fraction"] for row in rows} == {0.5}
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert all(row["train/mismatch"] < 1e-4 for row in rows[:-1]), "base + adapter is what samples"


def test_versions_and_lag(rows: list[dict[str, float]]) -> None:
    assert [row["train/version"] for row in rows] == list(range(1, OPTIONS.steps + 1))
    assert [row["train/lag_max"] for row in rows] == [0] + [1] * (OPTIONS.steps - 1)  # one step off-policy
    assert all(row["train/mismatch"] < 1e-4 for row in rows[:-1])  # fp32; the last step has no next group to audit
    assert "train/mismatch" not in rows[-1]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_logprobs_are_those_of_each_sample_alone(attention: str) -> None:
    model, client = tiny("llama"), Client(tiny("llama"))
    model.set_attn_implementation(attention)
    prompt = [4, 9, 2, 6]
    handle = client.submit(prompt, Sampling(n=5, max_tokens=7, seed=1, temperature=0.7), "a")
    samples = handle.result(5)
    packed = policy.logprobs(model, prompt, samples, 0.7).detach().numpy()
    alone = np.concatenate([plain_logprobs(model, np.array(prompt), sample, 0.7) for sample in samples])
    np.testing.assert_allclose(packed, alone, atol=1e-4)
    np.testing.assert_allclose(packed, policy.behaviour(samples).numpy(), atol=1e-4)


def test_a_sibling_that_shows_through_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny("llama"), [4, 9, 2, 6]
    samples = Client(model).submit(prompt, Sampling(n=3, max_tokens=7, seed=1, ignore_eos=True), "a").result(5)
    right = policy.logprobs(model, prompt, samples, 1.0)
    monkeypatch.setattr(torch.Tensor, "tril", lambda mask: torch.ones_like(mask).tril_())
    assert (policy.logprobs(model, prompt, samples, 1.0) - right).abs().max() > 1e-2


@pytest.mark.some(3)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("exact", [True, False])
def test_the_mismatch_is_zero_in_bf16(exact: bool, family: str) -> None:
    """With the service's arithmetic the audit of packed rows on the same weights reads 0 exactly, step after step; the control
    without it does not. The router of a mixture learns as well."""
    model = tiny(family, torch.bfloat16)
    routers = {name: each.clone() for name, each in model.named_parameters() if re.search(r"mlp\.(gate|router)\.weight", name)}
    client = Client(model)
    client.engine = tiny_engine(dtype="bfloat16", model=client.model)
    if exact:
        use_exact(model, client.engine.arithmetic, block_size=8)
    options = dataclasses.replace(OPTIONS, steps=4)
    audits = [row["train/mismatch"] for row in grpo.train(options, client, Even(), model) if "train/mismatch" in row]  # type: ignore[arg-type]
    assert len(audits) == 3 and (max(audits) == 0 if exact else min(audits) > 0)
    assert len(routers) == (2 if family != "llama" else 0)
    assert not any(torch.equal(model.get_parameter(name), before) for name, before in routers.items())


@pytest.mark.parametrize("lost", [False, True])
def test_replayed_routes_lie_where_their_tokens_do(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the service's arithmetic they are what the trainer chooses anyway; routes that are shifted by a token are not."""
    model = tiny("qwen3_moe", torch.bfloat16)
    client = Client(model)
    client.engine = tiny_engine(dtype="bfloat16", model=client.model, routed_experts=True)
    use_exact(model, client.engine.arithmetic, block_size=8)
    calls, replay = list[np.ndarray](), policy.replay

    def seen(model: Any, routes: np.ndarray) -> Any:
        calls.append(routes)
        return replay(model, np.roll(routes, 1, axis=0) if lost else routes)

    monkeypatch.setattr(policy, "replay", seen)
    options = dataclasses.replace(OPTIONS, steps=4, replay=True)
    audits = [row["train/mismatch"] for row in grpo.train(options, client, Even(), model) if "train/mismatch" in row]  # type: ignore[arg-type]
    assert len(audits) == 3 and (min(audits) > 0 if lost else max(audits) == 0)
    assert calls and all(routes.shape[1:] == (2, 2) for routes in calls)


def test_a_shape_is_trained_on_token_ids(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, model="shape:tiny-moe", task="even-ids", steps=2, held_out=3)
    folder = grpo.models.resolve(options.model)
    model = policy.load(folder, options.seed, options.threads)
    task, tokenizer = grpo.task_of(options, folder, model)
    assert tokenizer is None and len(task) == 9 and task.held_out == range(9, 12)
    assert all(len(task.prompt(i)) == 8 and max(task.prompt(i)) < 199 for i in range(12))
    sample = Client(tiny("llama")).submit([1, 2], Sampling(max_tokens=4, ignore_eos=True), "a").result(5)[0]
    assert task.reward(0, sample) == float(np.mean([id % 2 == 0 for id in sample.token_ids]))
    assert model.dtype == torch.bfloat16 and all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(InputError, match="shape has no tokenizer: give --task even-ids"):
        grpo.task_of(dataclasses.replace(options, task="times-table"), folder, model)
    policy.save(model, tokenizer, tmp_path)
    again = policy.load(tmp_path, 0, options.threads)
    assert all(torch.equal(again.get_parameter(name), each) for name, each in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offline": True}, "--offline: uses the groups of a memo alone: give --memo FOLDER"),
        ({"offline": True, "memo": Path("memo"), "address": "tcp://127.0.0.1:1"}, "--offline with --address"),
    ],
)
def test_offline_is_refused_before_a_model_is_loaded(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo.models, "resolve", lambda model: pytest.fail("too late"))
    with pytest.raises(InputError, match=says):
        grpo.main(grpo.Options(wandb=False, **options))


def test_without_wandb_the_first_line_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    found = grpo.importlib.util.find_spec
    monkeypatch.setattr(grpo.importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    with pytest.raises(InputError, match=r"pip install 'rl-rollout\[wandb\]', or give --no-wandb"):
        grpo.main(dataclasses.replace(OPTIONS, model="nothing of this name"))


def test_advantages_are_standardised_in_the_group() -> None:
    got = policy.advantages(np.array([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]]))
    np.testing.assert_allclose(got, [[-1, 1, -1, 1], [0, 0, 0, 0]], atol=1e-3)


def test_the_loss_is_clipped_on_the_side_that_pays() -> None:
    now = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = policy.policy_loss(now, torch.zeros(4), advantage, 0.2, 0.2)
    torch.testing.assert_close(loss, torch.tensor(-(1.2 - 1.5 + 0.5 - 0.8)))
    loss.backward()
    assert now.grad is not None and (now.grad != 0).tolist() == [False, True, True, False]


def test_small_steps_reach_bf16_weights() -> None:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    learner = policy.Learner(model, 1e-3)
    for _ in range(10):
        model.weight.grad = torch.ones_like(model.weight)
        learner.step()
    assert float(model.weight.detach()) == pytest.approx(
        0.99, abs=0.004
    )  # one step of 1e-3 at a time, bf16 itself would stay at 1


def test_samples_that_did_not_end_stop_the_training() -> None:
    sample = Client(tiny("llama")).submit([1, 2], Sampling(max_tokens=2), "a").result(5)[0]
    import msgspec

    with pytest.raises(RuntimeError, match="aborted"):
        grpo.checked([msgspec.structs.replace(sample, finish_reason="aborted")])


def test_lags_count_tokens() -> None:
    sample = SimpleNamespace(weight_versions=[(0, 4), (3, 5)], token_ids=np.zeros(5))
    assert policy.lags([[sample]], 5).tolist() == [1, 1, 1, 0, 0]  # type: ignore[list-item]


def test_accuracy_is_of_the_held_out_questions() -> None:
    client, asked = Client(tiny("llama")), []
    client.generate_groups = lambda prompts, sampling, timeout: [  # type: ignore[attr-defined]
        client.submit(prompt, sampling, str(i)).result(5) for i, prompt in enumerate(prompts)
    ]
    task = SimpleNamespace(
        held_out=range(7, 10), prompt=lambda i: [3, 5, i], reward=lambda i, sample: asked.append(i) or float(i == 8)
    )
    assert grpo.accuracy(client, task) == pytest.approx(1 / 3) and asked == [7, 8, 9]  # type: ignore[arg-type]


def test_held_out_questions_are_never_trained_on() -> None:
    task = grpo.Task(grpo.Options(), None)
    questions = [each.text for each in task.data]
    held_out = set(questions[task.held_out.start :])
    assert len(held_out) == 20 and not held_out & set(questions[: task.held_out.start])
    with pytest.raises(InputError, match="too few questions"):
        grpo.Task(grpo.Options(held_out=500), None)
    assert not grpo.Task(grpo.Options(held_out=0), None).held_out, "0 = none"


def test_the_times_table_has_one_right_answer() -> None:
    task = grpo.Task(grpo.Options(held_out=0), SimpleNamespace(decode=lambda text, **_: text))
    a, b = map(int, re.findall(r"\d+", task.data[0].text))
    for text, reward in ((f"{a} * {b} = {a * b}", 1.0), (f"{a * b} or {a * b + 1}", 0.0), ("none", 0.0)):
        assert task.reward(0, SimpleNamespace(token_ids=text)) == reward  # type: ignore[arg-type]


def test_another_data_set_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"chain_sum.*reasoning.gym.*pip install 'rl-rollout\[reasoning-gym\]'"):
        grpo.Task(grpo.Options(task="chain_sum"), None)
    grpo.Task(grpo.Options(), None)


def test_phases_are_shown() -> None:
    seen: list[str] = []
    model = tiny("llama")
    options = dataclasses.replace(OPTIONS, steps=2)
    for row in grpo.train(options, Client(model), Even(), model, seen.append):  # type: ignore[arg-type]
        seen.append(f"{row['train/step']:.0f}")
    assert seen == ["sampling", "training", "refresh", "1", "sampling", "training", "refresh", "2", "sampling"]


def test_the_curves_are_drawn(rows: list[dict[str, float]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    grpo.plot(json.loads(json.dumps(rows, allow_nan=False)), tmp_path / "curves.png", "tiny")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
