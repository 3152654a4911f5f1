"""`python -m tests.bench verify`: whether verification finds forged samples, accepts honest ones, and what it costs.

Small models with random weights run as services. Honest samples come from the kernels of each instruction set of one
arithmetic, and are verified by those of the best one. Forgeries are of six kinds (`tests.bench.forgeries`), and each differs
from the honest sample in its place. The cost is measured in this process, with the model of the options: the same tokens are
prefilled as prompts, and verified, in turn. Times are CPU seconds of this process, which other processes disturb least.
Verification also computes the logits of every token; `ratio_to_prefill_8b` is of a vocabulary as large, relatively, as that of
Llama-3.1-8B, as in `python -m tests.bench score`."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rollout.bench.harness import BenchFailed, BenchSetup, Row
from rollout.bench.inputs import RandomText, of_vocabulary, save_tiny
from rollout.bench.target import connected
from rollout.client.api import RolloutClient
from rollout.client.verification import Verified
from rollout.config import Config
from rollout.engine.cpu.isa import ISAS, lacking
from rollout.engine.engine import Engine
from rollout.engine.values import Group, Sample, Sampling
from rollout.models import hide_progress_bars
from tests.bench import forgeries, score

HONEST, FORGED = 10_000, 2_000
N, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 8, 24, 24, 512
AT_ONCE = 128
"""groups that are submitted together"""
ARITHMETIC = "fma/1"
SAMPLINGS = (
    Sampling(n=N, max_tokens=NEW_TOKENS),
    Sampling(n=N, max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, raw_logprobs=True),
    Sampling(n=N, max_tokens=NEW_TOKENS, top_k=40, min_p=0.01, top_logprobs=2),
    Sampling(n=N, max_tokens=NEW_TOKENS, repetition_penalty=1.2, presence_penalty=0.1, min_tokens=4),
)
NOISE = 1e-3
"""relative difference of the old weights"""


class Asked(NamedTuple):
    """A group, as a trainer asks for it."""

    prompt: np.ndarray
    sampling: Sampling


def measure(setup: BenchSetup) -> Iterator[Row]:
    """Yield a row for each instruction set, each kind of forgery and each turn, then the summary. Raises BenchFailed for a
    sample that could not be verified."""
    hide_progress_bars()
    isas = [name for name, isa in ISAS.items() if isa.arithmetic == ARITHMETIC and not lacking(name)]
    counts = dict.fromkeys(("checked", "false_alarms", "forged", "caught"), 0)
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as name:
        for row in (*honest_rows(setup, Path(name), isas), *forged_rows(setup, Path(name), isas[0])):
            for key in counts:
                counts[key] += row.get(key, 0)
            yield row
    ratios: dict[str, list[float]] = {"ratio_to_prefill": [], "ratio_to_prefill_8b": []}
    for which, row in cost_rows(setup):
        ratios[which].append(row["ratio_to_prefill"])
        yield row
    yield {
        "summary": True,
        **counts,
        "isas": isas,
        "arithmetic": ARITHMETIC,
        **{which: statistics.median(each) for which, each in ratios.items()},
        "dtype": setup.options.dtype,
        "model": str(setup.folder),
    }


# what is found


def model_of(setup: BenchSetup, folder: Path, name: str) -> Path:
    """Save a small model if there is none. "old" has other weights than the rest."""
    path = folder / name
    if not path.exists():
        save_tiny(path, 64, VOCABULARY, setup.options.dtype)
        if name == "old":
            _disturb(path)
    return path


def _disturb(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    torch.manual_seed(1)
    changed = {name: (w * (1 + NOISE * torch.randn(w.shape))).to(w.dtype) for name, w in load_file(path).items()}
    save_file(changed, path, {"format": "pt"})


def config_of(setup: BenchSetup, folder: Path, isa: str) -> Config:
    """Return the configuration of a service of a small model."""
    return Config(engine=setup.config(model=str(folder), isa=isa, kv_tokens=65_536, cpu_offload_gib=0))


def groups_of(count: int, start: int) -> list[Asked]:
    """Return groups of at least `count` samples. Those of another `start` have other prompts."""
    number = -(-count // N)
    prompts = RandomText(VOCABULARY).slices(start, number, PROMPT_TOKENS)
    return [
        Asked(prompt, msgspec.structs.replace(SAMPLINGS[i % len(SAMPLINGS)], seed=100 * (start + i)))
        for i, prompt in enumerate(prompts)
    ]


def generated(client: RolloutClient, groups: list[Asked]) -> list[list[Sample]]:
    """Return the samples of groups."""
    done = []
    for first in range(0, len(groups), AT_ONCE):
        prompts, samplings = zip(*groups[first : first + AT_ONCE], strict=True)
        done += list(client.generate_groups(prompts, samplings))
    return done


def verified(client: RolloutClient, groups: list[Asked], samples: list[list[Sample]]) -> list[Verified]:
    """Return the results of all samples. Raises BenchFailed for one that could not be verified."""
    found: list[Verified] = []
    for first in range(0, len(groups), AT_ONCE):
        prompts, samplings = zip(*groups[first : first + AT_ONCE], strict=True)
        for verdicts in client.verify_groups(samples[first : first + AT_ONCE], prompts, samplings):
            found += verdicts
    unknown = [verdict.why for verdict in found if verdict.ok is None]
    if unknown:
        raise BenchFailed(f"{len(unknown)} of {len(found)} samples: {unknown[0]}")
    return found


def honest_rows(setup: BenchSetup, folder: Path, isas: list[str]) -> Iterator[Row]:
    """Generate samples with the kernels of each instruction set, verify them with those of the first, and yield the counts."""
    each = max(N, round(HONEST * setup.scale / len(isas)))
    made = {}
    for i, isa in enumerate(isas):
        with connected(config_of(setup, model_of(setup, folder, "new"), isa)) as (_, client):
            asked = groups_of(each, 10_000 * (1 + i))
            made[isa] = asked, generated(client, asked)
    with connected(config_of(setup, model_of(setup, folder, "new"), isas[0])) as (_, client):
        for isa, (asked, samples) in made.items():
            found = verified(client, asked, samples)
            alarms = [verdict.why for verdict in found if not verdict.ok]
            yield {"isa": isa, "checked": len(found), "false_alarms": len(alarms), "alarm": alarms[0] if alarms else ""}


def forged_rows(setup: BenchSetup, folder: Path, isa: str) -> Iterator[Row]:
    """Forge samples of each kind, verify them, and yield the counts."""
    each = max(1, -(-round(FORGED * setup.scale) // len(forgeries.KINDS)))
    asked = {kind: groups_of(each + N, 100_000 * (1 + i)) for i, kind in enumerate(forgeries.KINDS)}
    others = {
        kind: [Asked(prompt, how) for prompt, sampling in mine for how in forgeries.instead(kind, sampling)]
        for kind, mine in asked.items()
    }
    with connected(config_of(setup, model_of(setup, folder, "old"), isa)) as (_, client):
        old = generated(client, others["old_weights"])
    with connected(config_of(setup, model_of(setup, folder, "new"), isa)) as (_, client):
        for kind, mine in asked.items():
            honest = generated(client, mine)
            instead = old if kind == "old_weights" else generated(client, others[kind])
            lies = lies_of(kind, honest, instead, each)
            found = verified(client, mine, lies)
            missed = sum(verdict.ok is True for verdict in found)
            yield {"forgery": kind, "forged": len(found), "caught": len(found) - missed}


def lies_of(kind: str, honest: list[list[Sample]], instead: list[list[Sample]], most: int) -> list[list[Sample]]:
    """Return at most `most` forgeries that differ from the honest samples of their place, in groups as these. instead: of all
    groups, as many for each."""
    r, per_group, left = random.Random(kind), len(instead) // len(honest), most
    lies: list[list[Sample]] = []
    for i, group in enumerate(honest):
        others = instead[i * per_group : (i + 1) * per_group]
        made = [forgeries.forged(kind, each, [other[each.index] for other in others], r) for each in group]
        lies.append([lie for lie, each in zip(made, group, strict=True) if forgeries.differ(lie, each)][:left])
        left -= len(lies[-1])
    return lies


# what it costs


def cost_rows(setup: BenchSetup) -> Iterator[tuple[str, Row]]:
    """Yield the seconds of prefill and of verification for each turn, for the model of the options and for one with a larger
    vocabulary."""
    tokens = setup.scaled(score.TOKENS, setup.config().block_tokens)
    prompts = setup.text.slices(0, score.PROMPTS, score.PROMPT_TOKENS)
    engine = score.open_engine(setup, setup.folder, tokens)
    for row in in_turn(engine, prompts, tokens, setup.repeat):
        yield "ratio_to_prefill", row
    share = score.vocabulary_share(engine)
    vocab_size = round(engine.vocab_size * score.SHARE_8B / (1 - score.SHARE_8B) * (1 - share) / share)
    del engine
    with of_vocabulary(setup.folder, vocab_size) as like_8b:
        engine = score.open_engine(setup, like_8b, tokens)
        for row in in_turn(engine, [ids % vocab_size for ids in prompts], tokens, setup.repeat):
            yield "ratio_to_prefill_8b", {"workload": "verify_8b", **row}


def in_turn(engine: Engine, prompts: list[np.ndarray], tokens: int, repeat: int) -> Iterator[Row]:
    """Generate samples, then prefill and verify them, `repeat` times in turn, and yield the seconds of each."""
    sampling = Sampling(n=score.N, max_tokens=tokens, seed=0, ignore_eos=True)
    asked = [Group(f"honest{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    _, samples = score.run_all(engine, asked)
    honest = {(sample.group_id, sample.index): sample for sample in samples}
    completions = [honest[group.id, index].token_ids for group in asked for index in range(score.N)]
    for turn in range(repeat):
        prefill, _ = timed(engine, score.as_prompts(f"prefill{turn}", prompts, completions))
        groups = [
            msgspec.structs.replace(group, sampling=sampling, redraw=True)
            for group in score.as_completions(f"verify{turn}", prompts, completions)
        ]
        seconds, drawn = timed(engine, groups)
        if sum(len(sample.token_ids) for sample in drawn) != len(completions) * tokens:
            raise BenchFailed("a token that was drawn again differs")
        yield {"turn": turn, "prefill_seconds": prefill, "verify_seconds": seconds, "ratio_to_prefill": seconds / prefill}


def timed(engine: Engine, groups: list[Group]) -> tuple[float, list[Sample]]:
    """Run groups until they finish. Returns the CPU seconds and the samples."""
    began = time.process_time()
    _, samples = score.run_all(engine, groups)
    return time.process_time() - began, samples
