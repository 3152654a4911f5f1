"""A replica that joins and lies:  python -m tests.support.endurance.liar SEED TOLD_FILE --join ROUTER …

Of the samples that its engine makes, some are changed into what no engine can have made. It touches TOLD_FILE with the first.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from rollout.commands.main import main as rollout
from rollout.engine.engine import Engine
from rollout.engine.values import Sample

SHARE = 0.3
"""of the samples are lies"""


def first(values: np.ndarray, value: float) -> np.ndarray:
    changed = values.copy()
    changed[0] = value
    return changed


def other_token(sample: Sample, **claims: object) -> Sample:
    """Change a token into another possible one, with claims that would keep it from being verified."""
    return replace(sample, token_ids=first(sample.token_ids, (int(sample.token_ids[0]) + 1) % 250), **claims)


LIES: dict[str, Callable[[Sample], Sample]] = {
    "beyond the vocabulary": lambda s: replace(s, token_ids=first(s.token_ids, 10**6)),
    "negative id": lambda s: replace(s, token_ids=first(s.token_ids, -5)),
    "nan": lambda s: replace(s, logprobs=first(s.logprobs, np.nan)),
    "positive": lambda s: replace(s, logprobs=first(s.logprobs, 3.0)),
    "too long": lambda s: replace(s, token_ids=np.tile(s.token_ids, 200), logprobs=np.tile(s.logprobs, 200)),
    "huge": lambda s: replace(s, token_ids=np.zeros(3_900_000, np.int32), logprobs=np.zeros(3_900_000, np.float32)),
    "empty": lambda s: replace(s, token_ids=s.token_ids[:0], logprobs=s.logprobs[:0], weight_versions=[], finish_reason="stop"),
    "lengths": lambda s: replace(s, logprobs=s.logprobs[:-1]),
    "too short": lambda s: replace(s, token_ids=s.token_ids[:-1], logprobs=s.logprobs[:-1]),
    "index": lambda s: replace(s, index=99),
    "version": lambda s: replace(s, weight_versions=[(0, 10**6)]),
    "spans": lambda s: replace(s, weight_versions=[(5, 3), (2, 9)]),
    "scored": lambda s: replace(s, finish_reason="scored"),
    "KV of no version": lambda s: other_token(s, kv_versions=[(0, 0, 10**6)]),
    "KV of its own": lambda s: other_token(s, kv_versions=[(0, 0, s.weight_versions[0][1])]),
    "KV beyond its tokens": lambda s: other_token(s, kv_versions=[(0, 0, 0), (0, 10**6, s.weight_versions[0][1])]),
    "a version to come": lambda s: other_token(s, weight_versions=[*s.weight_versions, (len(s.token_ids) - 1, 10**6)]),
    "stale": lambda s: replace(s, finish_reason="stale"),
}


def liar(rng: random.Random, told: Path) -> Callable[[Engine], list[Sample]]:
    """Make an `Engine.step` that lies."""
    honest = Engine.step

    def step(self: Engine) -> list[Sample]:
        samples = honest(self)
        for number, sample in enumerate(samples):
            if sample.finish_reason == "length" and len(sample.token_ids) > 1 and rng.random() < SHARE:
                kind = rng.choice(list(LIES))
                samples[number] = LIES[kind](sample)
                with told.open("a") as file:
                    print(kind, file=file)
        return samples

    return step


def main() -> int:
    seed, told, *words = sys.argv[1:]
    Engine.step = liar(random.Random(int(seed)), Path(told))  # type: ignore[method-assign]
    return rollout(["serve", *words])


if __name__ == "__main__":
    sys.exit(main())
