"""Bounds on everything a client can make large."""

from __future__ import annotations

import msgspec

LARGEST_LIMIT = 2**40


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on everything a client can make large, checked before anything is allocated. docs/limits.md has them as a
    table."""

    max_n: int = 1024
    """children of one group"""
    max_tokens: int = 131_072
    """`Sampling.max_tokens` of one child"""
    max_prompt_tokens: int = 131_072
    """token ids in one prompt"""
    max_stop_token_ids: int = 64
    """entries of `Sampling.stop_token_ids`"""
    max_id_bytes: int = 128
    """UTF-8 bytes of a group id or a client name"""
    max_groups_per_client: int = 4096
    """unfinished groups of one client"""
    max_samples_per_client: int = 65_536
    """samples (n of each group, summed) of unfinished groups of one client"""
    max_clients: int = 256
    """client sessions at a time"""
    max_header_bytes: int = 65_536
    """the first frame of a message"""
    max_frame_bytes: int = 16_777_216
    """any other frame"""
    max_frames: int = 64
    """frames of one message"""
    max_kv_lag: int = 1_000_000
    """`Sampling.max_kv_lag` and `Sampling.max_version_lag`"""
    max_top_logprobs: int = 20
    """`Sampling.top_logprobs`"""
    max_kv_ttl_s: int = 3600
    """`Sampling.kv_ttl_s`: seconds for which the KV of a finished child stays pinned"""
    max_logit_bias: int = 1024
    """entries of `Sampling.logit_bias`"""
    max_allowed_token_ids: int = 4096
    """entries of `Sampling.allowed_token_ids`"""
    max_stop_strings: int = 16
    """entries of `Sampling.stop`"""
    max_stop_bytes: int = 256
    """UTF-8 bytes of one stop string"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        for name in self.__struct_fields__:
            least = 2 if name == "max_frames" else 0 if name in ("max_kv_lag", "max_kv_ttl_s") else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
            if getattr(self, name) > LARGEST_LIMIT:
                raise ValueError(f"{name}={getattr(self, name)}: must be at most {LARGEST_LIMIT}")
