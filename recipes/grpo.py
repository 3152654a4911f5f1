"""GRPO in two processes: this one trains, a rollout service samples. Copy it with policy.py, then change `Task`.

    service    groups of step k, weights k-1 | groups of step k+1, weights k    | groups of step k+2 …
    trainer    train on the groups of k-1    | train on the groups of k         | …
                                     refresh ┘ (in place, while groups run)     ┘

    python -m rollout.recipes.grpo                # learns one-digit products with SmolLM2-135M, minutes on 2 cores
    python -m rollout.recipes.grpo --partial      # slow children continue during the next batch, under new weights
    python -m rollout.recipes.grpo --no-refresh   # the control: the service keeps its first weights; the reward stays
    python -m rollout.recipes.grpo --lora         # trains LoRA adapters alone, and sends nothing else
    python -m rollout.recipes.grpo --model shape:tiny-moe --task even-ids    # a mixture of experts, without a download

The groups of a step are sampled while the trainer works on those before it, so a token is at most one version old ("one step
off-policy"); the importance ratio against the service's own log-probs corrects for that. The trainer computes with the
service's arithmetic (`rollout.exact`), so on the same weights the ratio is 1; --no-exact leaves it rounding too.

GRPO: Shao et al., "DeepSeekMath" (2024); token-level loss: Yu et al., "DAPO" (2025); one step off-policy: Noukhovitch et al.,
"Asynchronous RLHF" (ICLR 2025). Extras: `pip install 'rl-rollout[grpo,lora,wandb,reasoning-gym]'` for the curves, --lora, wandb
and other tasks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from rollout import Handle, RolloutClient, Sample, Sampling, models
from rollout.config import Config, InputError, TrackingConfig
from rollout.engine.config import EngineConfig
from rollout.engine.forward.shapes import is_random
from rollout.process import service_process
from rollout.recipes import program
from rollout.recipes.program import say

if TYPE_CHECKING:
    import torch  # imported when the training begins: `--help` does not wait for it


EVEN_IDS = "even-ids"
PROMPT = 8
"""tokens of a prompt of EVEN_IDS"""


@dataclass(frozen=True)
class Options:
    """What to train and how."""

    model: str = "smollm2"
    """smollm2, a folder, a hub id, or shape:NAME, which has random weights and no tokenizer"""
    task: str = "times-table"
    """times-table = products of two digits; even-ids = token ids that are even, for a model without a tokenizer; or a data set
    of reasoning-gym, for example chain_sum"""
    task_config: str = "{}"
    """settings of a data set of reasoning-gym, as JSON"""
    steps: int = 60
    """training steps"""
    groups: int = 6
    """prompts in a step"""
    n: int = 12
    """samples for each prompt"""
    max_tokens: int = 12
    """maximum number of tokens of a sample"""
    temperature: float = 1.0
    """of the samples to train on"""
    learning_rate: float = 2e-5
    """of AdamW, without --lora"""
    lora: bool = False
    """train LoRA adapters on all linear layers of the decoder, and send A and B alone"""
    lora_rank: int = 4
    """inner dimension of the adapters"""
    lora_alpha: int = 32
    """adapters are scaled by alpha / rank"""
    lora_learning_rate: float = 2e-4
    """of AdamW, with --lora"""
    clip: float = 0.2
    """the importance ratio counts only within 1 ± clip"""
    seed: int = 0
    """of questions, samples and adapters"""
    held_out: int = 20
    """questions that are never trained on, asked greedily before and after; 0 = none"""
    exact: bool = True
    """the trainer's forward has the service's bits; --no-exact trains with plain transformers"""
    int8: bool = False
    """the service reads weights in eight bits (weight_dtype = "int8"); with --exact the trainer computes with them, too"""
    replay: bool = False
    """of a mixture of experts: the trainer's routers choose the experts that the service chose (R3)"""
    partial: bool = False
    """a batch ends when three quarters of each group's children have: the others are cut, and continue during the next batch,
    under new weights, and their groups are trained on one step later"""
    refresh: bool = True
    """push the weights after each step; --no-refresh is the control"""
    threads: int = 1
    """CPU threads of the trainer, and as many of the service"""
    kv_gib: float = 0.5
    """KV pool of the service, and as much host memory behind it"""
    address: str = ""
    """of a service of this model that runs; default: start a service"""
    memo: Path | None = None
    """folder of groups that were sampled before, which are not sampled again (docs/memo.md)"""
    offline: bool = False
    """sample nothing: use the groups of --memo alone"""
    out: Path = Path("grpo-run")
    """folder for rewards.jsonl, curves.png and wandb's files"""
    checkpoints: Path | None = None
    """folder for the weights of each version, in a folder of its number, for `rollout replay --weights`"""
    save: Path | None = None
    """folder for the trained model and its tokenizer, for `rollout serve --model FOLDER`; adapters are merged"""
    wandb: bool = True
    """log to wandb: online with WANDB_API_KEY, else offline in the folder --out"""

    @property
    def rate(self) -> float:
        """Return the learning rate of what is trained."""
        return self.lora_learning_rate if self.lora else self.learning_rate


class Question(NamedTuple):
    text: str
    score: Callable[[str], float]
    """of an answer: 0 to 1"""


def questions(options: Options, seed: int, size: int) -> list[Question]:
    """Draw questions of `options.task`, possibly the same one several times. Raises InputError."""
    if options.task == "times-table":
        rng = random.Random(seed)
        pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(size)]
        ask = "Solve the following multiplication: {} * {}. Give only the result as your final answer."
        return [Question(ask.format(a, b), partial(equals, str(a * b))) for a, b in pairs]
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise InputError(
            f"--task {options.task}: is a data set of reasoning-gym, and {error.name} is not installed: "
            "pip install 'rl-rollout[reasoning-gym]' (it needs a C compiler), or leave --task out"
        ) from None
    data = reasoning_gym.create_dataset(options.task, seed=seed, size=size, **json.loads(options.task_config))
    return [Question(each["question"], partial(data.score_answer, entry=each)) for each in data]


def equals(right: str, answer: str) -> float:
    return float(answer == right)


class Task:
    """Questions and verifiable rewards. Anything with these two methods and `held_out`, questions not trained on, will do."""

    def __init__(self, options: Options, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        size = options.steps * options.groups + options.groups
        apart = questions(options, options.seed + 1, max(1, 100 * options.held_out))
        others = list({each.text: each for each in apart}.values())[: options.held_out]
        hidden = {each.text for each in others}
        asked = [each for each in questions(options, options.seed, size) if each.text not in hidden]
        if not asked or len(others) < options.held_out:
            raise InputError(
                f"--task {options.task} {options.task_config}: has too few questions to hold {options.held_out} out"
            )
        self.data = [*(asked[i % len(asked)] for i in range(size)), *others]
        self.held_out = range(size, len(self.data))

    def __len__(self) -> int:
        """Count the questions to train on, which are asked again and again."""
        return self.held_out.start

    def prompt(self, index: int) -> list[int]:
        chat = [{"role": "user", "content": self.data[index].text}]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    def reward(self, index: int, sample: Sample) -> float:
        """Return the score of the last number in the text."""
        numbers = re.findall(r"-?\d+", self.tokenizer.decode(sample.token_ids, skip_special_tokens=True))
        return self.data[index].score(numbers[-1]) if numbers else 0.0


class EvenIds:
    """A task without text: prompts are token ids at random, the reward is the share of even ids among those sampled."""

    def __init__(self, options: Options, vocabulary: int) -> None:
        rng = random.Random(options.seed)
        size = options.steps * options.groups + options.groups
        self.prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(size + options.held_out)]
        self.held_out = range(size, len(self.prompts))

    def __len__(self) -> int:
        return self.held_out.start

    def prompt(self, index: int) -> list[int]:
        return self.prompts[index]

    def reward(self, index: int, sample: Sample) -> float:
        return float((sample.token_ids % 2 == 0).mean())


def task_of(options: Options, folder: Path, model: Any) -> tuple[Any, Any]:
    """Return the task, and the tokenizer if the model has one. Raises InputError."""
    if options.task == EVEN_IDS:
        return EvenIds(options, model.get_input_embeddings().num_embeddings), None
    if is_random(folder):
        raise InputError(f"--model {options.model}: a shape has no tokenizer: give --task {EVEN_IDS}")
    tokenizer = models.load_tokenizer(folder)
    return Task(options, tokenizer), tokenizer


Row = dict[str, float]
"""metrics of a step"""
Phase = Callable[[str], None]
"""called with what the trainer does from now on"""
Trainer = Callable[[Any, RolloutClient, Task, Any, Phase], Iterator[Row]]
"""as `train`"""
Batch = tuple[list[list[Sample]], list[Handle]]
"""the groups to train on, in the order of their questions, and those of the next batch, which run"""


def quiet(phase: str) -> None:
    """Show nothing."""


def train(options: Options, client: RolloutClient, task: Task, model: torch.nn.Module, phase: Phase = quiet) -> Iterator[Row]:
    """Train, and yield the metrics of each step."""
    from rollout.recipes import policy

    phase("sampling")
    learner, began = policy.Learner(model, options.rate), time.perf_counter()
    batches = partial_batches if options.partial else whole_batches
    for step, (groups, pending) in enumerate(batches(options, client, task)):
        phase("training")
        waited = time.perf_counter() - began
        first = step * options.groups
        rewards = np.array([[task.reward(first + i, s) for s in group] for i, group in enumerate(groups)])
        tokens = sum(len(sample.token_ids) for group in groups for sample in group)
        ratios = [
            policy.add_gradients(
                model, task.prompt(first + i), group, advantage,
                tokens=tokens, clip=(options.clip, options.clip), temperature=options.temperature,
            )
            for i, (group, advantage) in enumerate(zip(groups, policy.advantages(rewards), strict=True))
            if advantage.any()  # else all did equally well: nothing to learn
        ]  # fmt: skip
        audit = mismatch(options, model, task, pending, step)
        norm = learner.step()
        phase("refresh")
        weights = push(client, model, step + 1) if options.refresh else {}
        if options.checkpoints is not None:
            policy.save(model, None, options.checkpoints / str(step + 1))
        lag = policy.lags(groups, step)
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
            **({"train/ratio": float(np.concatenate(ratios).mean())} if ratios else {}),
            **audit,
            **weights,
            **({} if client.memo is None else {"train/memo_hits": client.memo.hits, "train/memo_misses": client.memo.misses}),
        }
        phase("sampling")


def whole_batches(options: Options, client: RolloutClient, task: Task) -> Iterator[Batch]:
    """Yield batch after batch, each when all of it has ended; the next one runs from then on. With a memo it runs from the
    refresh on: samples that a refresh meets are not memoised."""
    at_once = client.memo is None
    pending = submit(options, client, task, 0)
    for step in range(options.steps):
        groups = [checked(handle.result(timeout=600)) for handle in pending]
        pending = submit(options, client, task, step + 1) if at_once else []
        yield groups, pending
        pending = pending if at_once else submit(options, client, task, step + 1)


def partial_batches(options: Options, client: RolloutClient, task: Task) -> Iterator[Batch]:
    """Yield batch after batch, each one step after most of its children have ended: the others continue during the next
    batch, under the weights of each refresh. A token is at most two versions old. The spans give its version, and its log-prob
    belongs to that version."""
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
        sampling = Sampling(
            n=options.n,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=seed,
            routed_experts=options.replay,
        )
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


def push(client: RolloutClient, model: torch.nn.Module, version: int) -> Row:
    """Give the service these weights, of a PeftModel the adapter. Running samples continue with them; they keep the
    KV they have."""
    send = client.refresh_lora if hasattr(model, "peft_config") else client.refresh
    done = send(model, version=version, kv="keep")
    return {
        "train/version": done.version,
        "train/refresh_s": done.seconds,
        "train/pause_s": done.paused_seconds,
        "train/sent_fraction": done.sent_bytes / done.bytes,
    }


def mismatch(options: Options, model: torch.nn.Module, task: Task, pending: list[Handle], version: int) -> Row:
    """Compare log-probs with the service's under the same weights, on a group of the next step that has finished before these
    weights change; empty if none has."""
    from rollout.recipes import policy

    for index, handle in enumerate(pending):
        if handle.done and all(s.weight_versions == [(0, version)] for s in checked(handle.result())):
            prompt = task.prompt((version + 1) * options.groups + index)
            return {"train/mismatch": policy.mismatch(model, prompt, handle.result(), options.temperature)}
    return {}


def accuracy(client: RolloutClient, task: Any) -> float:
    """Return the share of the held-out questions that the service's policy answers rightly, greedily."""
    sampling = Sampling(n=1, max_tokens=16, temperature=0.0)
    prompts = [task.prompt(index) for index in task.held_out]
    answers = client.generate_groups(prompts, sampling, timeout=600)
    return float(np.mean([task.reward(index, group[0]) for index, group in zip(task.held_out, answers, strict=True)]))


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Draw the curves of a training."""
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


@dataclass
class Outcome:
    """What a training has left, whole or not."""

    rows: list[Row] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    """share of the held-out questions answered rightly, before and after"""
    ended: BaseException | None = None
    """Ctrl-C, or the reason why the training could not go on"""


class NothingToLearn(InputError):
    """All rewards are equal, step after step; the message says what to change."""


def check(options: Options) -> None:
    """Raise InputError for options that do not go together."""
    if options.wandb and importlib.util.find_spec("wandb") is None:
        raise InputError("wandb is not installed: pip install 'rl-rollout[wandb]', or give --no-wandb")
    if options.checkpoints is not None and options.lora:
        raise InputError("--checkpoints with --lora: the weights would have to be merged at each step; leave one of them out")
    if options.offline and options.memo is None:
        raise InputError("--offline: uses the groups of a memo alone: give --memo FOLDER, too")
    if options.offline and options.address:
        raise InputError("--offline with --address: asks no service, whichever it is; leave one of them out")


def main(options: Options, train: Trainer = train) -> list[Row]:
    """Run a service, train against it by `train`, and leave curves and rows in `options.out`, the model in `options.save`.
    Raises KeyboardInterrupt and NothingToLearn after the results of the finished steps were kept."""
    check(options)
    say(f"loading {options.model}")
    from rollout.engine.cpu.backward import fast_in_bf16
    from rollout.exact import use_exact
    from rollout.recipes import policy

    models.hide_progress_bars()
    folder = models.resolve(options.model)
    program.make_folder(options.out, "--out")
    if options.save is not None:
        program.make_folder_for_model(options.save)
    model = policy.load(folder, options.seed, options.threads)
    if options.lora:
        model = policy.with_adapters(model, options.lora_rank, options.lora_alpha)
    task, tokenizer = task_of(options, folder, model)
    with ExitStack() as stack:
        run = open_wandb(options, stack) if options.wandb else None
        address = options.address or None
        if address is None and not options.offline:
            say("starting the service")
            address = stack.enter_context(service_process(service_config(options, folder))).endpoint
        client = stack.enter_context(RolloutClient(address, name="grpo", memo=options.memo))
        if options.exact:
            use_exact(policy.policy_of(model), client.info.arithmetic)
        elif not fast_in_bf16():
            say("--no-exact: plain torch is slow in bf16 on this CPU, a step may take minutes; with exact it does not")
        outcome = steps(options, client, task, partial(train, options, client, task, model), run)
    report(options, task, outcome)
    if options.save is not None and outcome.rows:
        policy.save(model, tokenizer, options.save)
        say(f"saved the model: rollout serve --model {options.save}")
    if outcome.ended is not None:
        raise outcome.ended
    return outcome.rows


def steps(options: Options, client: RolloutClient, task: Task, train: Callable[[Phase], Iterator[Row]], run: Any) -> Outcome:
    """Run all steps, write their rows, and ask the held-out questions before and after. Ctrl-C and NothingToLearn end it."""
    from tqdm import tqdm

    outcome = Outcome()
    try:
        ask_held_out(client, task, outcome, "before training")
        with (
            (options.out / "rewards.jsonl").open("w", buffering=1) as log,
            tqdm(total=options.steps, unit="step", dynamic_ncols=True) as bar,
        ):
            for row in train(lambda phase: bar.set_description(f"step {min(bar.n + 1, options.steps)}, {phase}")):
                outcome.rows.append(row)
                log.write(json.dumps(row) + "\n")
                dropped = f", {row['train/dropped_groups']:.0f} groups dropped" if "train/dropped_groups" in row else ""
                bar.set_postfix_str(
                    f"reward {row['train/reward']:.2f}, {row['train/tokens_per_s']:.0f} tokens/s{dropped}", False
                )
                bar.update()
                if run is not None:
                    run.log({**client.status()["metrics"], **row})  # the service's metrics beside the trainer's
        ask_held_out(client, task, outcome, "after training")
    except (KeyboardInterrupt, NothingToLearn) as error:
        outcome.ended = error
    return outcome


def ask_held_out(client: RolloutClient, task: Task, outcome: Outcome, when: str) -> None:
    """Ask the held-out questions, if there are any."""
    count = len(task.held_out)
    if count:
        say(f"asking {count} held-out questions, {when}")
        outcome.right.append(accuracy(client, task))
        say(f"held-out questions, {when}: {outcome.right[-1] * count:.4g} of {count} right")


def report(options: Options, task: Task, outcome: Outcome) -> None:
    """Draw and print what the finished steps have shown."""
    rows = outcome.rows
    if not rows:
        say("no step was finished")
        return
    drawn = importlib.util.find_spec("matplotlib") is not None
    if not drawn:
        say("no curves.png: matplotlib is not installed: pip install 'rl-rollout[grpo]'")
    else:
        plot(rows, options.out / "curves.png", f"{options.model}, {options.task}" + ("" if options.refresh else ", no refresh"))
    fifth = max(1, len(rows) // 5)
    first, last = (float(np.mean([row["train/reward"] for row in part])) for part in (rows[:fifth], rows[-fifth:]))
    print(f"{len(rows)} of {options.steps} steps, {'rows and curves' if drawn else 'rows'} in {options.out}")
    print(f"mean reward: first fifth {first:.3f}, last fifth {last:.3f}, gain {last - first:+.3f}")
    if len(outcome.right) == 2:
        before, after = (f"{share * len(task.held_out):.4g}" for share in outcome.right)
        print(f"{len(task.held_out)} held-out questions, greedily: {before} right before training, {after} after")


def service_config(options: Options, folder: Path) -> Config:
    engine = EngineConfig(
        model=str(folder), kv_gib=options.kv_gib, cpu_offload_gib=options.kv_gib, seed=options.seed, threads=options.threads,
        routed_experts=options.replay, weight_dtype="int8" if options.int8 else "auto",
    )  # fmt: skip
    return Config(engine=engine, tracking=TrackingConfig(interval_s=2.0, audit_every=16))


def open_wandb(options: Options, stack: ExitStack) -> Any:
    """Start a run that ends with the stack."""
    import wandb

    from rollout.metrics.sinks import define_metrics, described_run

    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    config = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    quiet = wandb.Settings(console="off", silent=True)
    run = wandb.init(project="rollout-grpo", mode=mode, dir=options.out, config=config, settings=quiet)
    say(described_run(run))
    stack.callback(run.finish)
    define_metrics(run)
    run.define_metric("train/*", step_metric="train/step")
    return run


if __name__ == "__main__":
    raise SystemExit(program.run("grpo", main, Options))
