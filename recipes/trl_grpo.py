"""TRL's GRPOTrainer, unmodified and without vLLM, on a rollout service in a process of its own.

    python -m rollout.recipes.trl_grpo                        # SmolLM2-135M in fp32 on the CPU, six steps
    python -m rollout.recipes.trl_grpo --dtype bfloat16

Each step prints what TRL logged: the version of the weights that made its completions (equal to the step), the reward, and how
far TRL's own log-probs are from the service's. With the service's arithmetic in the trainer (--exact, the default) they agree
to rounding of the last log-softmax, in bf16 too; with --no-exact they differ by some 1e-5 in fp32 and 0.04 in bf16.

Needs `pip install 'rl-rollout[trl]'`. For AsyncGRPOTrainer see `rollout.integrations.trl`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollout import RolloutClient, models
from rollout.config import Config, InputError
from rollout.engine.config import EngineConfig
from rollout.integrations.trl import GroupRollouts, correct_importance
from rollout.process import service_process
from rollout.recipes import grpo, program
from rollout.recipes.program import say

BOUND = {"float32": 1e-4, "bfloat16": 0.02}
"""largest mean |Δ log-prob| between TRL and the service that counts as agreement"""
COLUMNS = {
    "version": "rollout/weight_version",
    "reward": "reward",
    "mean |Δ|": "sampling/sampling_logp_difference/mean",
    "max |Δ|": "sampling/sampling_logp_difference/max",
    "ratio": "sampling/importance_sampling_ratio/mean",
}


@dataclass(frozen=True)
class Options:
    """What to run."""

    model: str = "smollm2"
    """smollm2, a folder, or a hub id"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the trainer's and of the service's weights"""
    exact: bool = True
    """the trainer's forward has the service's attention and products"""
    steps: int = 6
    """training steps"""
    groups: int = 2
    """prompts in a step"""
    n: int = 8
    """completions of a prompt"""
    max_tokens: int = 12
    """maximum number of tokens of a completion"""
    learning_rate: float = 1e-5
    """of AdamW"""
    seed: int = 0
    """of questions and samples"""
    threads: int = 2
    """CPU threads of the trainer, and as many of the service"""
    out: Path = Path("trl-run")
    """folder for TRL's files"""
    save: Path | None = None
    """folder for the trained model and its tokenizer, for `rollout serve --model FOLDER`"""


def make_trainer(options: Options, folder: Path, rollouts: GroupRollouts, arithmetic: str) -> Any:
    """Make TRL's trainer. Its only part of ours is `rollout_func`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rollout.exact import use_exact

    size = options.steps * options.groups
    data = grpo.questions(grpo.Options(), options.seed, size)

    def last_number(
        completions: list[Any], index: list[int], weight_version: list[int], log_metric: Any, **_: Any
    ) -> list[float]:
        log_metric("rollout/weight_version", sum(weight_version) / len(weight_version))
        numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
        return [data[i].score(n[-1]) if n else 0.0 for n, i in zip(numbers, index, strict=True)]

    fields = GRPOConfig.__dataclass_fields__
    checkpointing = (
        "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    )  # its old name
    args = GRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.groups * options.n,
        num_generations=options.n,
        max_completion_length=options.max_tokens,
        temperature=1.0,
        learning_rate=options.learning_rate,
        seed=options.seed,
        model_init_kwargs={"dtype": options.dtype},
        bf16=False,  # no autocast: the weights have the dtype they have
        **{checkpointing: False},
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    rows = [{"prompt": [{"role": "user", "content": data[i].text}], "index": i} for i in range(size)]
    trainer = GRPOTrainer(
        model=str(folder),
        args=args,
        reward_funcs=last_number,
        train_dataset=Dataset.from_list(rows),
        processing_class=models.load_tokenizer(folder),
        rollout_func=rollouts,
    )
    correct_importance(trainer, rollouts)
    if options.exact:
        use_exact(trainer.model, arithmetic)
    return trainer


def main(options: Options) -> int:
    """Train, print TRL's metrics, and save the model. Returns the exit status, as `report`."""
    if importlib.util.find_spec("trl") is None:
        raise InputError("trl is not installed: pip install 'rl-rollout[trl]'")
    say(f"loading {options.model}")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # it warns that rollout_func is experimental
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # TRL 1.16 reads it each step
    import torch

    torch.set_num_threads(options.threads)
    models.hide_progress_bars()
    folder = models.resolve(options.model)
    if options.save is not None:
        program.make_folder_for_model(options.save)
    say("starting the service")
    engine = EngineConfig(
        model=str(folder), dtype=options.dtype, kv_tokens=32_768, cpu_offload_gib=0, seed=options.seed, threads=options.threads
    )
    with service_process(Config(engine=engine)) as service, RolloutClient(service.endpoint, name="trl") as client:
        trainer = make_trainer(options, folder, GroupRollouts(client), client.info.arithmetic)
        trainer.train()
    if options.save is not None:
        trainer.save_model(str(options.save))  # TRL saves the tokenizer with it
        say(f"saved the model: rollout serve --model {options.save}")
    return report(options, [row for row in trainer.state.log_history if COLUMNS["version"] in row])


def report(options: Options, rows: list[dict[str, float]]) -> int:
    """Print TRL's own numbers. Returns the exit status: 1 if a step was sampled by other weights than its own, or if the
    log-probs do not agree."""
    print("step  " + "".join(f"{name:>10}" for name in COLUMNS))
    for step, row in enumerate(rows, 1):
        print(f"{step:4}  " + "".join(f"{row[key]:>10.3g}" for key in COLUMNS.values()))
    versions = [row[COLUMNS["version"]] for row in rows]
    gap = max(row[COLUMNS["mean |Δ|"]] for row in rows)
    good = versions == list(range(1, options.steps + 1)) and gap <= BOUND[options.dtype]
    print(f"largest mean |Δ log-prob| {gap:.2g} in {options.dtype} (bound {BOUND[options.dtype]}); versions {versions}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(program.run("trl_grpo", main, Options))
