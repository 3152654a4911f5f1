"""`rollout ledger show`: what a ledger says, in a few lines, or one of its tables."""

from __future__ import annotations

import sys
import time

import msgspec

from rollout import ledger
from rollout.commands.arguments import LedgerArgs
from rollout.commands.lines import bytes_of, counted
from rollout.config import InputError

MOST_ROWS = 20


def run(args: LedgerArgs) -> int:
    """Print a summary, a table, or JSON lines. Raises InputError for a file that is no whole ledger."""
    run = ledger.read(args.file)
    if args.table is None and not args.json:
        print("\n".join(summary(run, args.file)))
        return 0
    rows = run.rows(args.table or "samples")
    if args.step is not None:
        key = {"groups": "version", "samples": "step", "refreshes": "version"}.get(args.table or "samples")
        if key is None:
            raise InputError(f"--step with the table {args.table}: it has no steps; leave it out")
        rows = [row for row in rows if row[key] == args.step]
    if args.json:
        for row in rows:
            sys.stdout.buffer.write(msgspec.json.encode(row) + b"\n")
        return 0
    for row in rows[:MOST_ROWS]:
        print("  ".join(f"{name}={shown(value)}" for name, value in row.items() if value not in (None, [], {}, "", False)))
    if len(rows) > MOST_ROWS:
        print(f"… and {len(rows) - MOST_ROWS:,} more; --json prints all")
    return 0


def summary(run: ledger.RecordedRun, path: str) -> list[str]:
    """Describe a run."""
    count = sum(len(group.samples) for group in run.groups)
    each = f", {run.bytes / count:.0f} a sample" if count else ""
    lines = [f"{path}: {bytes_of(run.bytes)}{each}, digest {run.digest}"]
    for service in run.services:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(service.at))
        end = "ended in order" if service.closed else "was killed, or runs"
        lines.append(
            f"service of {began}: {service.model}, arithmetic {service.arithmetic}, blocks of {service.block_size}, KV in "
            f"{service.kv_dtype}, {end}"
        )
    steps = run.steps()
    between = f", steps {steps[0]} to {steps[-1]}" if steps else ""
    refreshes = counted(sum(bool(refresh.kv) for refresh in run.refreshes), "refresh", "refreshes")
    lines.append(f"{refreshes}, {counted(len(run.groups), 'group')}, {counted(count, 'sample')}{between}")
    lines += [f"{counted(len(run.prompts), 'prompt')} with tokens"] if run.prompts else []
    for lost in run.lost:
        refreshes = counted(lost.refreshes, "refresh", "refreshes")
        lines.append(f"missing: {counted(lost.samples, 'sample')} and {refreshes}: {lost.why}")
    if run.torn_bytes:
        lines.append(f"torn: the last {counted(run.torn_bytes, 'byte')} are the incomplete end of a service that was killed")
    return lines


def shown(value: object) -> str:
    """Return a value for a line."""
    text = str(value)
    return text if len(text) <= 44 else f"{text[:40]}…"
