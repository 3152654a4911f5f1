"""`rollout bisect`: the first difference of two runs. Exit status as that of `diff`: 0 = equal, 1 = different, 2 = trouble."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from rollout import ledger
from rollout.client.replaying import Reproduced
from rollout.commands.arguments import BisectArgs
from rollout.commands.remaking import Remaker
from rollout.config import CannotServe, InputError
from rollout.ledger.bisect import Difference, Pair, bisect, different_samples
from rollout.models import ModelNotFound
from rollout.process import ServiceFailed
from rollout.transport.errors import RolloutError


def run(args: BisectArgs) -> int:
    """Compare two ledgers, and print the first difference. Returns the exit status."""
    try:
        a, b = ledger.read(args.a), ledger.read(args.b)
        difference = bisect(a, b)
        judged = None
        if difference is not None and args.weights_a is not None:
            judged = judge(a, b, difference, args, args.weights_a)
        elif args.weights_b is not None:
            raise InputError("--weights-b without --weights-a: give the first run's too")
    except (InputError, CannotServe, ModelNotFound, RolloutError, ServiceFailed) as error:
        print(f"rollout bisect: {error}", file=sys.stderr)
        return 2
    if args.json:
        found = None if difference is None else msgspec.to_builtins(difference)
        print(msgspec.json.encode({"equal": found is None, "difference": found, "computed": judged}).decode())
    else:
        print("\n".join(lines_of(difference, judged, a)))
    return 0 if difference is None else 1


def lines_of(difference: Difference | None, judged: dict[str, Any] | None, a: ledger.RecordedRun) -> list[str]:
    """Describe the difference."""
    if difference is None:
        count = sum(len(group.samples) for group in a.groups)
        return [f"equal: {len(a.refreshes)} refreshes, {count} samples"]
    place = [] if difference.step is None else [f"step {difference.step}"]
    place += [f"group {difference.group_id}"] if difference.group_id else []
    place += [f"child {difference.index}"] if difference.index is not None else []
    where = f"{', '.join(place)}: " if place else ""
    lines = [f"{difference.kind}: {where}{difference.why}", f"{difference.samples_equal} samples before are equal"]
    if judged is not None:
        for side in "ab":
            lines.append(f"{side}, computed again: {judged[side]['says']}")
        if judged["token"] is not None:
            token = judged["token"]
            lines.append(
                f"token {token['at']}: {token['a']} (log-prob {token['a_logprob']}) in a, {token['b']} (log-prob "
                f"{token['b_logprob']}) in b"
            )
        lines.append(judged["says"])
    return lines


def judge(
    a: ledger.RecordedRun, b: ledger.RecordedRun, difference: Difference, args: BisectArgs, weights_a: str
) -> dict[str, Any]:
    """Make the first sample that differs under the weights of both runs. Raises InputError if there is none."""
    pair = pair_of(a, b, difference)
    if pair is None:
        raise InputError(f"{difference.why}; no sample of both runs differs, so there is nothing to compute")
    results = {}
    for side, run, picked, weights in (
        ("a", a, (pair.a_group, pair.a), weights_a),
        ("b", b, (pair.b_group, pair.b), args.weights_b or weights_a),
    ):
        (results[side],) = Remaker(run, weights, args.prompts, args.model, args.settings).remade([picked])
    return {
        "group_id": pair.a_group.group_id,
        "index": pair.a.index,
        **{side: {"equal": result.equal, "says": said(result)} for side, result in results.items()},
        "token": token_of(results["a"], results["b"]),
        **right(results["a"].equal, results["b"].equal),
    }


def pair_of(a: ledger.RecordedRun, b: ledger.RecordedRun, difference: Difference) -> Pair | None:
    """Return the sample of the difference, or the first one that differs."""
    pairs = list(different_samples(a, b))
    named = (pair for pair in pairs if (pair.a_group.group_id, pair.a.index) == (difference.group_id, difference.index))
    return next(named, pairs[0] if pairs else None)


def said(result: Reproduced) -> str:
    """Describe a result in words."""
    return "the sample of its ledger, to the bit" if result.equal else result.why


def token_of(a: Reproduced, b: Reproduced) -> dict[str, Any] | None:
    """Return the first token, or log-prob, that differs between two samples; None: there is none."""
    if a.sample is None or b.sample is None:
        return None
    for at in range(min(len(a.sample.token_ids), len(b.sample.token_ids))):
        ids = [int(each.sample.token_ids[at]) for each in (a, b) if each.sample is not None]
        logprobs = [float(each.sample.logprobs[at]) for each in (a, b) if each.sample is not None]
        if ids[0] != ids[1] or logprobs[0] != logprobs[1]:
            return {"at": at, "a": ids[0], "b": ids[1], "a_logprob": logprobs[0], "b_logprob": logprobs[1]}
    return None


def right(a: bool | None, b: bool | None) -> dict[str, str]:
    """Say which side has computed what its ledger says."""
    match a, b:
        case True, True:
            return {"right": "both", "says": "both runs have computed what they say: the difference above is the cause"}
        case True, False:
            return {"right": "a", "says": "a is right: b has not computed what it says"}
        case False, True:
            return {"right": "b", "says": "b is right: a has not computed what it says"}
        case False, False:
            return {"right": "neither", "says": "neither run has computed what it says, or the weights given are others"}
    return {"right": "unknown", "says": "at least one side cannot be computed here, which is no accusation"}
