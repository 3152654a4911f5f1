"""`rollout replay`: makes the samples of a step again, and compares them with their digests."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout import ledger
from rollout.client.replaying import Change, Reproduced
from rollout.commands.arguments import ReplayArgs
from rollout.commands.lines import counted
from rollout.commands.remaking import Picked, Remaker
from rollout.commands.sample_file import open_out
from rollout.config import InputError


def run(args: ReplayArgs) -> int:
    """Write the samples of a step as JSON lines. Returns the exit status: 0 if all are equal, or were changed as asked for.
    Raises InputError, ServiceFailed, RolloutError."""
    run = ledger.read(args.file)
    picked = picked_of(run, args)
    change = change_of(args)
    remaker = Remaker(run, args.weights, args.prompts, args.model, args.settings)
    with open_out(args.out) as sink:
        results = remaker.remade(picked, change)
        if args.out != "-" and sink.seekable():
            sink.truncate(0)
        for (group, _), result in zip(picked, results, strict=True):
            sink.write(json.dumps(line_of(group, result)) + "\n")
    return report(results, change is not None)


def picked_of(run: ledger.RecordedRun, args: ReplayArgs) -> list[Picked]:
    """Return the samples to make. Raises InputError if there are none."""
    groups = run.groups if args.step is None else run.step(args.step)
    if args.step is not None and not groups:
        steps = run.steps()
        has = f"steps {steps[0]} to {steps[-1]}" if steps else "no groups"
        raise InputError(f"--step {args.step}: the ledger has {has}")
    picked = [
        (group, sample)
        for group in groups
        for sample in group.samples.values()
        if args.group in (None, group.group_id) and args.index in (None, sample.index)
    ]
    if not picked:
        raise InputError(f"--group {args.group} --index {args.index}: the ledger has no such sample in these steps")
    return picked


def change_of(args: ReplayArgs) -> Change | None:
    """Return what is to be other than in the ledger. Raises InputError."""
    sampling = {
        name: value
        for name, value in (("seed", args.seed), ("temperature", args.temperature), ("max_tokens", args.max_tokens))
        if value is not None
    }
    if args.at is None:
        if sampling or args.append is not None:
            raise InputError("--seed, --temperature, --max-tokens or --append without --at: say from which token on")
        return None
    append = None
    if args.append is not None:
        try:
            append = msgspec.json.decode(args.append, type=list[int])
        except msgspec.DecodeError as error:
            raise InputError(f"--append {args.append}: must be token ids as in [5, 17]: {error}") from None
    return Change(token=args.at, sampling=sampling, append=append)


def line_of(group: ledger.RecordedGroup, result: Reproduced) -> dict[str, Any]:
    """Return the JSON object of one sample."""
    own = {} if result.sample is None else result.sample.to_dict()
    return own | {"group_id": group.group_id, "index": result.index, "equal": result.equal, "why": result.why}


def report(results: Sequence[Reproduced], changed: bool) -> int:
    """Print a summary. Returns the exit status."""
    counts = Counter(result.equal for result in results)
    if changed:
        made = sum(result.sample is not None for result in results)
        print(f"rollout replay: {counted(made, 'sample')} of {len(results)} made, with the change", file=sys.stderr)
        return 0 if made == len(results) else 1
    print(
        f"rollout replay: {counted(len(results), 'sample')}: {counts[True]} equal to the bit, {counts[False]} different, "
        f"{counts[None]} not made",
        file=sys.stderr,
    )
    for why, count in Counter(result.why for result in results if not result.equal).most_common(3):
        print(f"rollout replay: {count}: {why}", file=sys.stderr)
    return 0 if counts[True] == len(results) else 1
