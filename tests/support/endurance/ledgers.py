"""The ledger of a router that is killed again and again: what a trainer has, it has, and every record can be verified."""

from __future__ import annotations

from pathlib import Path

from rollout import ledger
from rollout.config import InputError
from tests.support.endurance.account import Account

MOST_NAMED = 5
"""missing samples that are named"""


def check(account: Account, path: Path) -> None:
    """Read a ledger, whose chain of digests proves each record, and look for each sample that a trainer has got."""
    try:
        run = ledger.read(path)
    except InputError as error:
        account.found("unrecorded", f"the ledger cannot be read: {error}")
        return
    recorded = {sample.result for _, sample in run.samples()}
    missing = [(name, digest) for digest, name in account.arrived.items() if digest not in recorded]
    account.count("unrecorded", len(missing))
    for name, digest in missing[:MOST_NAMED]:
        account.note(f"unrecorded: {name}, digest {digest}; {len(missing)} of {len(account.arrived)} are missing")
    account.count("ledger_records", sum(len(group.samples) for group in run.groups))
    account.count("ledger_services", len(run.services))
    account.count("ledger_lost", sum(lost.samples for lost in run.lost))
