"""Attention over paged KV: the seam to transformers, and backends behind it."""

from __future__ import annotations

from engine.attention.reference import ReferenceAttention
from engine.attention.seam import Backend

__all__ = ["Backend", "ReferenceAttention"]
