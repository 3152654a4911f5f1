"""A ledger: what made each sample of a run, and digests of the samples, in a file of about a hundred bytes for each.

    rollout serve --ledger FILE ──→ writer ──→ records ──→ frames ──→ FILE ──→ reader ──→ show, bisect, replay

Imports no torch.
"""

from rollout.ledger.frames import DamagedLedger
from rollout.ledger.reader import RecordedGroup, RecordedRefresh, RecordedRun, RecordedSample, RecordedService, read

__all__ = [
    "DamagedLedger",
    "RecordedGroup",
    "RecordedRefresh",
    "RecordedRun",
    "RecordedSample",
    "RecordedService",
    "read",
]
