"""Value types: inputs and outputs of the engine. No torch.

A `Group` is a prompt and `sampling.n` children; a `Sample` is one finished child. `transport` and `rollout.client` import only
this package of the engine. To send tensors, the client also imports `rollout.engine.weights.tensors` and, for tensors on a GPU,
`rollout.engine.cuda.digests`.
"""

from rollout.engine.values.columns import (
    COLUMNS,
    KVSpans,
    Layout,
    Routing,
    Spans,
    TokenColumns,
    concat_arrays,
    no_tokens,
    slice_kv_spans,
    slice_spans,
    valid_kv_spans,
)
from rollout.engine.values.group import Group
from rollout.engine.values.lifecycle import DeviceLost, Mode, RankLost, Tag
from rollout.engine.values.limits import LARGEST_LIMIT, Limits
from rollout.engine.values.sample import FinishReason, PartialSample, Sample, TokenChunk, html_table
from rollout.engine.values.sampling import (
    ACCEPTED,
    MAX_PRIORITY,
    OPTIONS,
    SEED_LIMIT,
    Accepted,
    NearestField,
    Option,
    Role,
    Sampling,
    nearest,
)
from rollout.engine.values.weights import (
    NONE_SERVED,
    Adapter,
    BaseMismatch,
    KVPolicy,
    LoraTarget,
    Refreshed,
    Served,
    TensorInfo,
    WeightUpdate,
    manifest_digest,
)

__all__ = [
    "ACCEPTED", "Accepted", "Adapter", "BaseMismatch", "COLUMNS", "DeviceLost", "FinishReason", "Group",
    "KVPolicy", "KVSpans", "LARGEST_LIMIT", "Layout", "Limits", "LoraTarget", "MAX_PRIORITY", "Mode", "NONE_SERVED",
    "NearestField", "OPTIONS", "Option", "PartialSample", "RankLost", "Refreshed", "Role", "Routing", "SEED_LIMIT",
    "Sample", "Sampling", "Served", "Spans", "Tag", "TensorInfo", "TokenChunk", "TokenColumns", "WeightUpdate",
    "concat_arrays", "html_table", "manifest_digest", "nearest", "no_tokens", "slice_kv_spans", "slice_spans",
    "valid_kv_spans",
]  # fmt: skip
