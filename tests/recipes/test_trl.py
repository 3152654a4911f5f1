"""The TRL integration against a client of scripts; TRL itself only where it is installed."""

from __future__ import annotations

import dataclasses
import queue
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout.client.handle import OpenHandle
from rollout.engine.values import Group, Sample, Sampling
from rollout.integrations import trl as integration
from rollout.integrations import trl_async
from rollout.integrations.trl_async import group_advantages
from tests.support.waiting import until

END = 99


class FakeClient:
    """Answers at once: child i of a prompt says i + 1 tokens (the last one END), all of the weights that are live."""

    def __init__(self, answers: bool = True) -> None:
        self.version = 0
        self.events: list[tuple[str, Any]] = []
        self.names: list[str] = []
        self.samplings: list[Sampling] = []
        self.handles: list[OpenHandle] = []
        self.answers = answers
        self.reason = "stop"
        self.refuse: Exception | None = None

    def refresh(self, named_tensors: Any, *, version: int, kv: str, via: str, timeout: float) -> None:
        self.names = [name for name, _ in named_tensors]
        if self.refuse is not None:
            raise self.refuse
        assert version > self.version, "versions only grow"
        self.version = version
        self.events.append(("refresh", version))

    def refresh_lora(self, adapter: Any, *, version: int, kv: str, via: str, timeout: float) -> None:
        self.refresh([("adapter", adapter)], version=version, kv=kv, via=via, timeout=timeout)

    def submit(self, prompt: list[int], sampling: Sampling) -> OpenHandle:
        handle = OpenHandle(Group(f"#{len(self.handles)}", np.array(prompt, np.int32), sampling), [], b"")
        self.handles.append(handle)
        self.samplings.append(sampling)
        self.events.append(("submit", (tuple(prompt), sampling.n)))
        if self.answers:
            for index in reversed(range(sampling.n)):
                handle.add_sample(self.sample(handle.group_id, index, len(prompt)))
        return handle

    def sample(self, group_id: str, index: int, prompt_tokens: int) -> Sample:
        tokens = np.array([*range(10, 10 + index), END], np.int32)
        return Sample(
            group_id=group_id,
            index=index,
            token_ids=tokens,
            logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
            finish_reason=self.reason,  # type: ignore[arg-type]
            weight_versions=[(0, self.version)],
            prompt_tokens=prompt_tokens,
            error="scripted" if self.reason == "error" else None,
        )

    def status(self) -> dict[str, Any]:
        return {"version": self.version}


class Letters:
    """A tokenizer: one id a letter."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options["add_generation_prompt"] and options["tokenize"] and options["return_dict"] is False
        return [ord(letter) for message in messages for letter in message["content"]]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(str(i) for i in ids if i != END)


class Model:
    def named_parameters(self) -> list[tuple[str, Any]]:
        tensor = SimpleNamespace(detach=lambda: "tensor")
        sharded = SimpleNamespace(full_tensor=lambda: "whole")
        return [("module.a", tensor), ("b._checkpoint_wrapped_module.c", sharded)]

    def named_modules(self, remove_duplicate: bool) -> list[tuple[str, Any]]:
        return []


def trainer(**changes: Any) -> Any:
    args = SimpleNamespace(
        seed=3,
        repetition_penalty=1.0,
        generation_kwargs=None,
        max_completion_length=7,
        temperature=0.5,
        top_k=0,
        top_p=1.0,
        min_p=None,
    )
    accelerator = SimpleNamespace(
        process_index=0, is_main_process=True, unwrap_model=lambda model: model, wait_for_everyone=lambda: None
    )
    values = {"args": args, "accelerator": accelerator, "state": SimpleNamespace(global_step=0), "model": Model()}
    return SimpleNamespace(**{**values, "processing_class": Letters(), "tools": None, **changes})


def test_repeated_prompts_become_groups_in_their_order() -> None:
    client = FakeClient()
    out = integration.GroupRollouts(client)(["a", "a", "bc", "bc", "bc", "a"], trainer())  # type: ignore[arg-type]
    submitted = [what for kind, what in client.events if kind == "submit"]
    assert submitted == [((97,), 2), ((98, 99), 3), ((97,), 1)]  # six prompts, three groups
    assert out["prompt_ids"] == [[97]] * 2 + [[98, 99]] * 3 + [[97]]
    assert [len(ids) for ids in out["completion_ids"]] == [1, 2, 1, 2, 3, 1]  # children in the order of their index
    assert [len(ids) for ids in out["logprobs"]] == [1, 2, 1, 2, 3, 1]
    assert out["logprobs"][4] == [-1.0, -2.0, -3.0]
    assert out["finish_reason"] == ["stop"] * 6


def test_messages_go_through_the_chat_template() -> None:
    client, chat = FakeClient(), [{"role": "user", "content": "hi"}]
    out = integration.GroupRollouts(client)([chat, list(chat)], trainer())  # type: ignore[arg-type]
    assert client.events[1:] == [("submit", ((104, 105), 2))] and out["prompt_ids"] == [[104, 105]] * 2


def test_weights_are_pushed_once_a_step_before_the_generation() -> None:
    client, it = FakeClient(), trainer()
    rollouts = integration.GroupRollouts(client)  # type: ignore[arg-type]
    versions = []
    for step in (0, 0, 1, 2):
        it.state.global_step = step
        versions += rollouts(["a", "a"], it)["weight_version"]
    assert [kind for kind, _ in client.events] == ["refresh", "submit", "submit", "refresh", "submit", "refresh", "submit"]
    assert versions == [1, 1, 1, 1, 2, 2, 3, 3]  # what TRL logs as step k was made by version k
    assert client.names == ["a", "b.c"]


@pytest.mark.parametrize(("live", "step", "versions"), [(7, 0, [8, 9]), (7, 7, [8, 9]), (7, 9, [10, 11]), (0, 100, [101, 102])])
def test_a_service_that_has_seen_another_training(live: int, step: int, versions: list[int]) -> None:
    """Versions only grow, whatever the trainer's steps are; they are those of the steps where that is possible."""
    client, it = FakeClient(), trainer()
    client.version = live
    rollouts = integration.GroupRollouts(client)  # type: ignore[arg-type]
    for it.state.global_step in (step, step + 1):
        rollouts(["a"], it)
    assert [version for kind, version in client.events if kind == "refresh"] == versions


def test_only_the_main_process_pushes_and_all_gather() -> None:
    client, gathered = FakeClient(), []
    model = SimpleNamespace(
        named_parameters=lambda: [("w", SimpleNamespace(full_tensor=lambda: gathered.append("w")))],
        named_modules=lambda remove_duplicate: [],
        config=None,
    )
    it = trainer(model=model)
    it.accelerator.is_main_process, it.accelerator.process_index = False, 1
    integration.GroupRollouts(client)(["a"], it)  # type: ignore[arg-type]
    assert client.version == 0 and gathered == ["w"]


def test_each_group_has_a_seed_of_its_own() -> None:
    client, it = FakeClient(), trainer()
    rollouts = integration.GroupRollouts(client)  # type: ignore[arg-type]
    rollouts(["a", "a", "b"], it)
    rollouts(["a", "a", "b"], it)
    it.accelerator.process_index = 1
    rollouts(["a", "a", "b"], it)
    seeds = [sampling.seed for sampling in client.samplings]
    assert len(set(seeds)) == 6 and all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    again = FakeClient()
    integration.GroupRollouts(again)(["a", "a", "b"], trainer())  # type: ignore[arg-type]
    assert [sampling.seed for sampling in again.samplings] == seeds[:2]


def test_a_sample_that_did_not_end_is_no_completion() -> None:
    client = FakeClient()
    client.reason = "error"
    with pytest.raises(RuntimeError, match="scripted"):
        integration.GroupRollouts(client)(["a"], trainer())  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("repetition_penalty", 1.1), ("generation_kwargs", {"seed": 1})])
def test_what_the_service_cannot_do_is_refused(field: str, value: Any) -> None:
    it = trainer()
    setattr(it.args, field, value)
    with pytest.raises(ValueError, match=field):
        integration.GroupRollouts(FakeClient())(["a"], it)  # type: ignore[arg-type]


def test_an_adapter_travels_alone() -> None:
    client = FakeClient()
    rollouts = integration.GroupRollouts(client)  # type: ignore[arg-type]
    model = SimpleNamespace(peft_config={}, parameters=lambda: [SimpleNamespace()])
    out = rollouts(["a"], trainer(model=model, state=SimpleNamespace(global_step=4)))
    assert client.names == ["adapter"] and out["weight_version"] == [5]
    sharded = SimpleNamespace(peft_config={}, parameters=lambda: [SimpleNamespace(full_tensor=lambda: "whole")])
    with pytest.raises(ValueError, match="sharded PEFT"):
        rollouts(["a"], trainer(model=sharded, state=SimpleNamespace(global_step=5)))


def test_tools_and_images_are_refused() -> None:
    rollouts = integration.GroupRollouts(FakeClient())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tools"):
        rollouts(["a"], trainer(tools=[print]))
    with pytest.raises(ValueError, match="text"):
        rollouts([[{"role": "user", "content": [{"type": "image"}]}]], trainer())


def test_correction_is_switched_on_or_refused() -> None:
    rollouts = integration.GroupRollouts(FakeClient())  # type: ignore[arg-type]
    it = trainer(use_vllm=False, vllm_mode="colocate", vllm_importance_sampling_correction=True)
    integration.correct_importance(it, rollouts)
    assert it.use_vllm and it.vllm_mode == "server" and it._last_loaded_step == -1
    it.vllm_generation.sync_weights()
    with pytest.raises(RuntimeError, match="use_vllm"):
        integration.correct_importance(trainer(), rollouts)


# AsyncGRPOTrainer


def make_worker(client: FakeClient, rewards: Any = None, **options: Any) -> integration.ServiceRolloutWorker:
    def longest(prompts: list[Any], completions: list[Any], completion_ids: list[Any], bonus: list[float]) -> list[float]:
        return [len(ids) + extra for ids, extra in zip(completion_ids, bonus, strict=True)]

    rows = [{"prompt": "ab", "bonus": 0.0}, {"prompt": "c", "bonus": 1.0}]
    funcs = [longest] if rewards is None else rewards
    sampling = Sampling(n=3, max_tokens=7)
    options = {"groups_in_flight": 8, "buffer": 64, **options}
    return integration.ServiceRolloutWorker(client, rows, Letters(), funcs, sampling, **options)  # type: ignore[arg-type]


def test_the_worker_delivers_scored_samples() -> None:
    client = FakeClient()
    worker = make_worker(client, groups_in_flight=2)
    client.version = 4
    started = time.monotonic()
    worker.start()
    samples = [worker.rollout_buffer.get(timeout=60) for _ in range(9)]
    worker.stop()
    assert [sample.group_id for sample in samples] == [0] * 3 + [1] * 3 + [2] * 3
    last = samples[2]
    assert last.input_ids.tolist() == [97, 98, 10, 11, END] and last.input_ids.dtype == np.int64
    assert last.completion_mask.tolist() == [0, 0, 1, 1, 1]
    assert last.old_log_probs.tolist() == [0, 0, -1, -2, -3] and last.old_log_probs.dtype == np.float32
    assert last.model_version == 4 and last.completion == "10 11" and last.enqueued_at is not None
    assert [sample.metrics["reward"] for sample in samples[:6]] == [1, 2, 3, 2, 3, 4]
    assert [sample.metrics["rewards/longest"] for sample in samples[:3]] == [1, 2, 3]
    np.testing.assert_allclose([sample.advantage for sample in samples[:3]], group_advantages(np.array([1.0, 2, 3])))
    metrics = worker.metrics_queue.get(timeout=60)
    assert metrics["rollout/completion_length"] == (6.0, 3.0)
    tokens, seconds = metrics["rollout/generated_tok_s"]
    assert tokens == 6.0 and 0 <= seconds <= time.monotonic() - started


def test_advantages_ignore_what_nobody_scored() -> None:
    client = FakeClient()
    worker = make_worker(client, rewards=[lambda **columns: [None, 1.0, 3.0]])
    worker.start()
    samples = [worker.rollout_buffer.get(timeout=60) for _ in range(3)]
    worker.stop()
    np.testing.assert_allclose([sample.advantage for sample in samples], [0.0, -1.0, 1.0], atol=1e-6)
    assert np.isnan(samples[0].metrics["reward"])


def test_a_full_buffer_holds_the_worker_back_and_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trl_async, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    worker = make_worker(FakeClient(), buffer=4, groups_in_flight=2)
    worker.start()
    until(lambda: worker.rollout_buffer.qsize() == 4)
    now[0] = 1000.0
    until(lambda: worker._progress == 1000.0)  # a sign of life, without a sample
    assert worker.rollout_buffer.qsize() == 4
    worker.check_health(0.25)
    worker.stop()  # while it waits for room
    assert not worker._thread.is_alive()


def test_health() -> None:
    def broken(**columns: Any) -> list[float]:
        raise KeyError("answer")

    worker = make_worker(FakeClient(), rewards=[broken])
    worker.start()
    worker._thread.join(60)
    with pytest.raises(RuntimeError, match="answer"):
        worker.check_health(60)
    silent = make_worker(FakeClient(answers=False))
    silent.start()
    silent.check_health(60)
    with pytest.raises(RuntimeError, match="no group"):
        silent.check_health(-1)
    silent.stop()


def test_stopping_cancels_what_runs() -> None:
    cancelled: list[str] = []
    client = FakeClient(answers=False)
    submit = client.submit

    def watched(prompt: list[int], sampling: Sampling) -> OpenHandle:
        handle = submit(prompt, sampling)
        handle.on_cancel = lambda handle, indices: cancelled.append(handle.group_id)
        return handle

    client.submit = watched  # type: ignore[method-assign]
    worker = make_worker(client, groups_in_flight=2)
    worker.start()
    until(lambda: len(client.handles) == 2)
    worker.stop()
    assert cancelled == ["#0", "#1"]
    make_worker(client).stop()  # never started: nothing to wait for


def test_weight_transfer_counts_what_went_live() -> None:
    client = FakeClient()
    weights = integration.ServiceWeights(client)  # type: ignore[arg-type]
    weights.init_weight_transfer()
    for _ in range(2):
        weights.pause()
        weights.send_weights(iter([("w", 1)]))
        weights.resume()
    assert weights.version == client.version == 2
    client.refuse = ValueError("w: wrong shape")
    with pytest.raises(ValueError, match="wrong shape"):
        weights.send_weights(iter([("w", 1)]))
    client.refuse = None
    weights.send_weights(iter([("w", 1)]))
    weights.destroy()
    assert weights.version == client.version == 3


def test_the_trainer_s_count_begins_at_the_service_s_version() -> None:
    client = FakeClient()
    client.version = 7
    worker, weights = make_worker(client), integration.ServiceWeights(client)  # type: ignore[arg-type]
    weights.send_weights(iter([("w", 1)]))
    assert weights.version == client.version == 8
    worker.start()
    assert worker.rollout_buffer.get(timeout=60).model_version == 1
    worker.stop()


# against TRL itself


def test_trl_still_has_these_plug_points() -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install 'rl-rollout[trl]'")
    import inspect

    from trl import GRPOTrainer
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

    theirs = {field.name for field in dataclasses.fields(async_rollout_worker.RolloutSample)}
    assert theirs == {field.name for field in dataclasses.fields(integration.RolloutSample)}
    worker, weights = make_worker(FakeClient()), integration.ServiceWeights(FakeClient())  # type: ignore[arg-type]
    for protocol, ours in (
        (async_grpo_trainer.RolloutWorkerProtocol, worker),
        (async_grpo_trainer.WeightTransferProtocol, weights),
    ):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                wanted = list(inspect.signature(method).parameters)[1:]
                assert list(inspect.signature(getattr(ours, name)).parameters) == wanted, name
        assert all(isinstance(getattr(ours, name), queue.Queue) for name in protocol.__annotations__)
    source = inspect.getsource(GRPOTrainer)
    for name in ("use_vllm", "vllm_mode", "vllm_importance_sampling_correction", "_last_loaded_step", "vllm_generation"):
        assert f"self.{name}" in source
    assert "rollout_func(prompts, self)" in source


def test_the_sampling_is_the_config_s() -> None:
    got = integration.sampling_of(trainer().args, 5)
    assert msgspec.structs.asdict(got) == msgspec.structs.asdict(Sampling(n=5, max_tokens=7, temperature=0.5))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trl_trains_against_a_service_process(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="not installed: pip install 'rl-rollout[trl]'")
    options = f"--model {tiny_model} --dtype {dtype} --steps 5 --groups 2 --n 4 --threads 1 --out {tmp_path}".split()
    done = subprocess.run(
        [sys.executable, "-m", "rollout.recipes.trl_grpo", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "versions [1.0, 2.0, 3.0, 4.0, 5.0]" in done.stdout
