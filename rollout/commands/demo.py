"""`rollout demo`: starts a service and prints its samples for a few chat prompts."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.markup import escape
from tqdm import tqdm

from rollout import models
from rollout.client.api import RolloutClient
from rollout.commands.progress import Phases
from rollout.config import Config
from rollout.engine.config import EngineConfig
from rollout.engine.values import Sample, Sampling
from rollout.process import service_process

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "Name three animals that can fly.",
    "What should I cook with eggs and potatoes?",
    "Give me a good title for a story about a lost robot.",
)
SHOWN = 4
"""groups whose best answer is printed"""


def run(model: str, n: int, max_tokens: int) -> int:
    """Run the demonstration and stop the service. Returns the exit status."""
    console = Console(highlight=False)
    folder = models.resolve(model)
    models.without_torch()
    tokenizer = models.load_tokenizer(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    sampling = Sampling(n=n, max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=0)
    config = Config(engine=EngineConfig(model=str(folder), kv_gib=0.5, cpu_offload_gib=0))
    with ExitStack() as stack:
        with Phases("rollout demo") as progress:
            progress.begin(f"starting a service of {model}")
            service = stack.enter_context(service_process(config))
        with RolloutClient(service.endpoint, name="demo") as client:
            console.print(f"{len(prompts)} prompts × n = {n}, at most {max_tokens} tokens each → {service.endpoint}")
            started = time.perf_counter()
            samples = collect(client, prompts, sampling)
            seconds = time.perf_counter() - started
            show(console, tokenizer, samples)
            summary(console, client.status(), samples, seconds)
    return 0


def collect(client: RolloutClient, prompts: list[list[int]], sampling: Sampling) -> list[Sample]:
    """Collect all samples and show a progress bar."""
    samples = []
    tokens, started = 0, time.perf_counter()
    with tqdm(total=len(prompts) * sampling.n, unit="sample", dynamic_ncols=True) as bar:
        for sample in client.generate(prompts, sampling, group_ids=[str(i) for i in range(len(prompts))]):
            samples.append(sample)
            tokens += len(sample.token_ids)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False)
            bar.update()
    return samples


def show(console: Console, tokenizer: Any, samples: list[Sample]) -> None:
    """Print, for a few prompts, the answer with the highest mean log-prob."""
    for number, question in enumerate(QUESTIONS[:SHOWN]):
        group = [sample for sample in samples if sample.group_id == str(number)]
        best = max(group, key=lambda sample: float(sample.logprobs.mean()))
        text = tokenizer.decode(best.token_ids.tolist(), skip_special_tokens=True).strip()
        console.print(f"\n[bold]{escape(question)}[/bold]")
        console.print(escape(text))
        console.print(f"[dim]{about(best, len(group))}[/dim]")


def about(best: Sample, n: int) -> str:
    """Describe the answer that is shown."""
    mean = f"{best.logprobs.mean():.2f}"
    return f"sample {best.index}, the one of {n} with the highest mean log-prob: {mean}, {best.finish_reason}"


def summary(console: Console, status: dict[str, Any], samples: list[Sample], seconds: float) -> None:
    tokens = sum(len(sample.token_ids) for sample in samples)
    lengths = [len(sample.token_ids) for sample in samples]
    console.print(
        f"\n{len(samples)} samples, {tokens} tokens (median length {statistics.median(lengths):.0f}) "
        f"in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s"
    )
    console.print(
        f"each prompt was prefilled once and forked: {status['prefill_tokens']} tokens prefilled, "
        f"{status['fork_saved_tokens']} prefill tokens saved, {status['fork_shared_blocks']} KV blocks shared"
    )
    console.print("next: the examples of README.md, on a service that you start")
