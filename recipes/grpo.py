"""GRPO in two processes: this one trains, a rollout service samples. Copy it, then change `Task`.

    service    groups of step k, weights k-1 | groups of step k+1, weights k    | groups of step k+2 …
    trainer    train on the groups of k-1    | train on the groups of k         | …
                                     refresh ┘ (in place, while groups run)     ┘

    python -m rollout.recipes.grpo                # learns one-digit products with SmolLM2-135M, minutes on 2 cores
    python -m rollout.recipes.grpo --partial      # slow children go on beside the next batch, under new weights
    python -m rollout.recipes.grpo --no-refresh   # the control: the service keeps its first weights; the reward stays
    python -m rollout.recipes.grpo --lora         # trains LoRA adapters alone, and sends nothing else

The groups of a step are sampled while the trainer works on those before it, so a token is at most one version old ("one step
off-policy"); the importance ratio against the service's own log-probs corrects for that. The trainer computes with the
service's arithmetic (`rollout.exact`), so on the same weights the ratio is 1; --no-exact leaves it rounding too.

GRPO: Shao et al., "DeepSeekMath" (2024); token-level loss: Yu et al., "DAPO" (2025); one step off-policy: Noukhovitch et al.,
"Asynchronous RLHF" (ICLR 2025). Needs `pip install -e '.[grpo]'`, `'.[grpo,lora]'` for --lora; wandb stays offline without
WANDB_API_KEY.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import tyro
from tqdm import tqdm

from rollout import Handle, RolloutClient, Sample, Sampling, models
from rollout.config import Config, TrackingConfig
from rollout.engine.config import EngineConfig
from rollout.engine.cpu.backward import fast_in_bf16
from rollout.exact import token_logprobs, use_exact
from rollout.process import service_process


@dataclass(frozen=True)
class Options:
    """What to train and how."""

    model: str = "smollm2"
    """smollm2, a folder, or a hub id"""
    task: str = "products"
    """name of a reasoning-gym data set"""
    task_config: str = '{"min_digits": 1, "max_digits": 1}'
    """its settings, as JSON"""
    steps: int = 60
    groups: int = 6
    """prompts in a step"""
    n: int = 12
    """samples for each prompt"""
    max_tokens: int = 12
    temperature: float = 1.0
    learning_rate: float = 2e-5
    lora: bool = False
    """train LoRA adapters on all linear layers of the decoder, and send A and B alone"""
    lora_rank: int = 4
    lora_alpha: int = 32
    lora_learning_rate: float = 2e-4
    clip: float = 0.2
    """the importance ratio counts only within 1 ± clip"""
    seed: int = 0
    held_out: int = 20
    """questions that are never trained on, asked greedily before and after; 0 = none"""
    exact: bool = True
    """the trainer's forward has the service's bits; --no-exact trains with plain transformers"""
    partial: bool = False
    """a batch ends when three quarters of each group's children have: the others are cut, go on beside the next batch, under
    new weights, and their groups are trained on one step later"""
    refresh: bool = True
    """push the weights after each step; --no-refresh is the control"""
    threads: int = 1
    """CPU threads of the trainer, and as many of the service"""
    kv_gib: float = 0.5
    """KV pool of the service, and as much host memory behind it"""
    out: Path = Path("grpo-run")
    """folder for rewards.jsonl, curves.png and wandb's files"""
    wandb: bool = True

    @property
    def rate(self) -> float:
        """Return the learning rate of what is trained."""
        return self.lora_learning_rate if self.lora else self.learning_rate


class Task:
    """Questions and verifiable rewards. Anything with these two methods and `held_out`, questions not trained on, will do."""

    def __init__(self, options: Options, tokenizer: Any) -> None:
        import reasoning_gym

        size = options.steps * options.groups + options.groups
        settings = json.loads(options.task_config)
        self.tokenizer = tokenizer
        drawn = list(reasoning_gym.create_dataset(options.task, seed=options.seed, size=size, **settings))
        apart = reasoning_gym.create_dataset(
            options.task, seed=options.seed + 1, size=max(1, 100 * options.held_out), **settings
        )
        others = list({each["question"]: each for each in apart}.values())[: options.held_out]
        hidden = {each["question"] for each in others}
        asked = [each for each in drawn if each["question"] not in hidden]
        if not asked or len(others) < options.held_out:
            raise ValueError(f"{options.task} {options.task_config} has too few questions to hold {options.held_out} out")
        self.scorer = apart
        self.data = [*(asked[i % len(asked)] for i in range(size)), *others]
        self.held_out = range(size, len(self.data))

    def __len__(self) -> int:
        """Count the questions to train on, which are asked again and again."""
        return self.held_out.start

    def prompt(self, index: int) -> list[int]:
        chat = [{"role": "user", "content": self.data[index]["question"]}]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    def reward(self, index: int, sample: Sample) -> float:
        """Return reasoning-gym's score of the last number in the text."""
        numbers = re.findall(r"-?\d+", self.tokenizer.decode(sample.token_ids, skip_special_tokens=True))
        return self.scorer.score_answer(numbers[-1], self.data[index]) if numbers else 0.0


class Learner:
    """The policy in bf16, as the service runs it, and AdamW on fp32 masters: a step of 1e-5 would vanish in bf16. Of a
    PeftModel the adapters learn."""

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        self.model = model.eval()  # no dropout: the service has none
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self) -> float:
        """Apply the gradients gathered so far. Returns their norm before clipping to 1."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adam.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)
        return float(norm)


def logprobs(model: Any, prompt: list[int], samples: list[Sample], temperature: float) -> torch.Tensor:
    """Return [tokens of all samples] log-probs of the samples' tokens, by one forward that reads the prompt once.

    p p p p a a b b b      a row of the mask: the prompt, and what its own sample said so far
    └prompt┘└a┘└─b─┘       (the last token of a sample predicts nothing and is left out)
    """
    model = policy_of(model)
    start, ids, positions, owner = len(prompt), list(prompt), [*range(len(prompt))], [-1] * len(prompt)
    predictors, targets = [], []
    for index, sample in enumerate(samples):
        tokens = sample.token_ids.tolist()
        predictors += [start - 1, *range(len(ids), len(ids) + len(tokens) - 1)]
        targets += tokens
        ids += tokens[:-1]
        positions += range(start, start + len(tokens) - 1)
        owner += [index] * (len(tokens) - 1)
    who = torch.tensor(owner)
    hidden_from = ~((who == -1) | (who == who[:, None])).tril()
    mask = torch.zeros(hidden_from.shape, dtype=model.dtype).masked_fill(hidden_from, -torch.inf)
    hidden = model.base_model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask[None, None],
        use_cache=False,
    ).last_hidden_state[0, predictors]
    return token_logprobs(model.get_output_embeddings()(hidden), torch.tensor(targets), temperature)


def policy_of(model: Any) -> Any:
    """Return the transformers model, of a PeftModel the one that has the adapters in it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def behaviour(samples: list[Sample]) -> torch.Tensor:
    """Return [tokens of all samples] the service's log-probs."""
    return torch.from_numpy(np.concatenate([sample.logprobs for sample in samples]))


def policy_loss(now: torch.Tensor, then: torch.Tensor, advantage: torch.Tensor, clip: float) -> torch.Tensor:
    """Compute PPO's clipped surrogate, summed over tokens; all [tokens]."""
    ratio = (now - then).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).sum()


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Turn [groups, n] rewards into advantages: how much better than its siblings each sample did, in standard deviations of
    its group."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)


def train(options: Options, client: RolloutClient, task: Task, model: torch.nn.Module) -> Iterator[dict[str, float]]:
    """Train, and yield the metrics of each step."""
    learner, began = Learner(model, options.rate), time.perf_counter()
    batches = partial_batches if options.partial else whole_batches
    for step, (groups, pending) in enumerate(batches(options, client, task)):
        waited = time.perf_counter() - began
        first = step * options.groups
        rewards = np.array([[task.reward(first + i, s) for s in group] for i, group in enumerate(groups)])
        prompts = [task.prompt(first + i) for i in range(options.groups)]
        tokens = sum(len(sample.token_ids) for group in groups for sample in group)
        ratios = []
        for prompt, group, advantage in zip(prompts, groups, advantages(rewards), strict=True):
            if not advantage.any():
                continue  # all did equally well: nothing to learn
            now, then = logprobs(model, prompt, group, options.temperature), behaviour(group)
            each = torch.from_numpy(np.repeat(advantage, [len(s.token_ids) for s in group])).float()
            (policy_loss(now, then, each, options.clip) / tokens).backward()
            ratios.append((now.detach() - then).exp())
        audit = mismatch(options, model, task, pending, step)
        norm = learner.step()
        weights = push(client, model, step + 1) if options.refresh else {}
        lag = lags(groups, step)
        slowest = max(sample.seconds for group in groups for sample in group)
        seconds, began = time.perf_counter() - began, time.perf_counter()
        yield {
            "train/step": step + 1,
            "train/reward": float(rewards.mean()),
            "train/reward_std": float(rewards.std(1).mean()),
            "train/grad_norm": norm,
            "train/tokens": tokens,
            "train/length_mean": tokens / rewards.size,
            "train/seconds": seconds,
            "train/wait_seconds": waited,
            "train/tokens_per_s": tokens / seconds,
            "train/sampled_tokens_per_s": tokens / slowest,
            "train/lag_mean": float(lag.mean()),
            "train/lag_max": float(lag.max()),
            **({"train/ratio": float(torch.cat(ratios).mean())} if ratios else {}),
            **audit,
            **weights,
        }


Trainer = Callable[[Any, RolloutClient, Task, torch.nn.Module], Iterator[dict[str, float]]]
"""as `train`"""


Batch = tuple[list[list[Sample]], list[Handle]]
"""the groups to train on, in the order of their questions, and those of the next batch, which run"""


def whole_batches(options: Options, client: RolloutClient, task: Task) -> Iterator[Batch]:
    """Yield batch after batch, each when all of it has ended; the next one runs from then on."""
    pending = submit(options, client, task, 0)
    for step in range(options.steps):
        groups = [checked(handle.result(timeout=600)) for handle in pending]
        pending = submit(options, client, task, step + 1)
        yield groups, pending


def partial_batches(options: Options, client: RolloutClient, task: Task) -> Iterator[Batch]:
    """Yield batch after batch, each one step after most of its children have ended: the rest goes on meanwhile, beside the next
    batch and under the weights that come in between. A token is two versions old at most; the spans say which made it, and its
    log-prob is of that one."""
    pending = submit(options, client, task, 0)
    ended: list[list[Sample]] = []
    late: list[Handle | None] = []
    for step in range(options.steps + 1):
        groups = [handle.result(timeout=600) for handle in pending]
        resumed = [go_on(client, handle, group) for handle, group in zip(pending, groups, strict=True)]
        pending = submit(options, client, task, step + 1)
        if step:
            rest = [[] if handle is None else handle.result(timeout=600) for handle in late]
            yield [checked(joined(*parts)) for parts in zip(ended, rest, strict=True)], []
        ended, late = [[sample for sample in group if sample.finish_reason != "cut"] for group in groups], resumed


def go_on(client: RolloutClient, handle: Handle, group: list[Sample]) -> Handle | None:
    """Let the children of a group that were cut go on; None: there are none."""
    cut = [sample for sample in group if sample.finish_reason == "cut"]
    whole = msgspec.structs.replace(handle.group.sampling, finish_after=None)
    return client.continue_samples(cut, handle.group.prompt, whole, f"{handle.group_id}/rest") if cut else None


def joined(ended: list[Sample], rest: list[Sample]) -> list[Sample]:
    return sorted([*ended, *rest], key=lambda sample: sample.index)


def submit(options: Options, client: RolloutClient, task: Task, step: int) -> list[Handle]:
    """Send the groups of a step, if there is one; they run from now on."""
    handles: list[Handle] = []
    if step >= options.steps:
        return handles
    for index in range(step * options.groups, (step + 1) * options.groups):
        seed = options.seed * 1_000_003 + index
        sampling = Sampling(n=options.n, max_tokens=options.max_tokens, temperature=options.temperature, seed=seed)
        if options.partial:
            sampling = msgspec.structs.replace(sampling, finish_after=-(-3 * options.n // 4))
        handles.append(client.submit(task.prompt(index), sampling, group_id=f"{step}/{index}"))
    return handles


def checked(group: list[Sample]) -> list[Sample]:
    """Return the group. Raises RuntimeError for a sample that a policy did not finish: it must not become a reward."""
    for sample in group:
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"group {sample.group_id}, sample {sample.index}: {sample.finish_reason} {sample.error or ''}")
    return group


def lags(groups: list[list[Sample]], version: int) -> np.ndarray:
    """Return [tokens] how many versions behind the trainer's weights each token was made."""
    made = []
    for sample in (sample for group in groups for sample in group):
        starts = [start for start, _ in sample.weight_versions] + [len(sample.token_ids)]
        made.append(np.repeat([v for _, v in sample.weight_versions], np.diff(starts)))
    return version - np.concatenate(made)


def push(client: RolloutClient, model: torch.nn.Module, version: int) -> dict[str, float]:
    """Give the service these weights, of a PeftModel the adapter. It goes on with them, running samples included; they keep the
    KV they have."""
    send = client.refresh_lora if hasattr(model, "peft_config") else client.refresh
    done = send(model, version=version, kv="keep")
    return {
        "train/version": done.version,
        "train/refresh_s": done.seconds,
        "train/pause_s": done.paused_seconds,
        "train/sent_fraction": done.sent_bytes / done.bytes,
    }


def mismatch(options: Options, model: torch.nn.Module, task: Task, pending: list[Handle], version: int) -> dict[str, float]:
    """Return the mean |log-prob here - log-prob of the service| under the same weights, on a group of the next step that has
    finished before these weights change; empty if none has."""
    for index, handle in enumerate(pending):
        if handle.done and all(s.weight_versions == [(0, version)] for s in checked(handle.result())):
            prompt = task.prompt((version + 1) * options.groups + index)
            with torch.no_grad():
                now = logprobs(model, prompt, handle.result(), options.temperature)
            return {"train/mismatch": float((now - behaviour(handle.result())).abs().mean())}
    return {}


def accuracy(client: RolloutClient, task: Any) -> float:
    """Return the share of the held-out questions that the service's policy answers rightly, greedily."""
    sampling = Sampling(n=1, max_tokens=16, temperature=0.0)
    prompts = [task.prompt(index) for index in task.held_out]
    answers = client.generate_groups(prompts, sampling, timeout=600)
    return float(np.mean([task.reward(index, group[0]) for index, group in zip(task.held_out, answers, strict=True)]))


def plot(rows: list[dict[str, float]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    step = [row["train/step"] for row in rows]
    panels = [
        ("mean reward", {"reward": "train/reward"}),
        ("tokens/s", {"while sampling": "train/sampled_tokens_per_s", "over the whole step": "train/tokens_per_s"}),
        ("mismatch: mean |Δ log-prob|, same weights", {"trainer against service": "train/mismatch"}),
        ("lag in versions", {"mean": "train/lag_mean", "max": "train/lag_max"}),
    ]
    for axis, (name, curves) in zip(axes.flat, panels, strict=True):
        for label, key in curves.items():
            axis.plot(step, [row.get(key, np.nan) for row in rows], label=label, linewidth=1.4, marker=".", markersize=4)
        axis.set(title=name, xlabel="step")
        axis.set_ylim(0, 1.02 if name == "mean reward" else None)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(options: Options, train: Trainer = train) -> list[dict[str, float]]:
    """Run a service, train against it by `train`, and leave curves and rows in `options.out`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    models.hide_progress_bars()
    folder = models.resolve(options.model)
    options.out.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if options.lora:
        model = with_adapters(options, model)
    task = Task(options, models.load_tokenizer(folder))
    correct: list[float] = []
    rows: list[dict[str, float]] = []
    with ExitStack() as stack:
        run = open_wandb(options, stack) if options.wandb else None
        service = stack.enter_context(service_process(service_config(options, folder)))
        client = stack.enter_context(RolloutClient(service.endpoint, name="grpo"))
        if options.exact:
            use_exact(policy_of(model), client.info.arithmetic)
        elif not fast_in_bf16():
            print("--no-exact: plain torch is slow in bf16 on this CPU, a step may take minutes; with exact it does not")
        if task.held_out:
            correct.append(accuracy(client, task))
        log = stack.enter_context((options.out / "rewards.jsonl").open("w"))
        bar = stack.enter_context(
            tqdm(train(options, client, task, model), total=options.steps, unit="step", dynamic_ncols=True)
        )
        for row in bar:
            rows.append(row)
            log.write(json.dumps(row) + "\n")
            bar.set_postfix_str(f"reward {row['train/reward']:.2f}, {row['train/tokens_per_s']:.0f} tokens/s")
            if run is not None:
                run.log({**client.status()["metrics"], **row})  # the service's figures beside the trainer's
        if task.held_out:
            correct.append(accuracy(client, task))
    plot(rows, options.out / "curves.png", f"{options.model}, {options.task}" + ("" if options.refresh else ", no refresh"))
    fifth = max(1, len(rows) // 5)
    first, last = (float(np.mean([row["train/reward"] for row in part])) for part in (rows[:fifth], rows[-fifth:]))
    print(f"mean reward: first fifth {first:.3f}, last fifth {last:.3f}, gain {last - first:+.3f} (in {options.out})")
    if correct:
        before, after = correct
        print(f"{len(task.held_out)} held-out questions, greedily: {before:.2f} right before training, {after:.2f} after")
    return rows


def with_adapters(options: Options, model: torch.nn.Module) -> torch.nn.Module:
    """Put LoRA adapters, in fp32, into a model whose own weights are frozen from here on."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=options.lora_rank, lora_alpha=options.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, settings)


def service_config(options: Options, folder: Path) -> Config:
    engine = EngineConfig(
        model=str(folder), kv_gib=options.kv_gib, cpu_offload_gib=options.kv_gib, seed=options.seed, threads=options.threads
    )
    return Config(engine=engine, tracking=TrackingConfig(interval_s=2.0, audit_every=16))


def open_wandb(options: Options, stack: ExitStack) -> Any:
    import wandb

    from rollout.metrics.sinks import define_metrics

    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    config = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    quiet = wandb.Settings(console="off", silent=True)
    run = wandb.init(project="rollout-grpo", mode=mode, dir=options.out, config=config, settings=quiet)
    stack.callback(run.finish)
    define_metrics(run)
    run.define_metric("train/*", step_metric="train/step")
    return run


if __name__ == "__main__":
    main(tyro.cli(Options))
