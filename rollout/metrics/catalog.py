"""The metrics: unit, period and meaning of each. docs/metrics.md has the same table; Prometheus' HELP comes from here."""

from __future__ import annotations

from typing import Literal, NamedTuple

Over = Literal["window", "total", "now", "max", "histogram"]
"""window: the last `window_s` seconds; total: since the service started, only grows; now: when the row was written; max: the
largest since the service started; histogram: all values since the service started"""


class Metric(NamedTuple):
    """One row of the table."""

    unit: str
    over: Over
    meaning: str
    """as in the docs, with Markdown"""

    @property
    def help(self) -> str:
        """Return the meaning and the unit as plain text."""
        period = " over tracking.window_s" if self.over == "window" else ""
        return f"{self.meaning.replace('`', '')} [{self.unit}{period}]"


METRICS: dict[str, Metric] = {
    "rollout/tokens_per_s": Metric("tokens/s", "window", "sampled tokens, idle time included"),
    "rollout/samples": Metric("samples", "total", "finished children, for any reason"),
    "rollout/sample_tokens": Metric("tokens", "total", "tokens of finished children"),
    "rollout/groups": Metric("groups", "total", "groups whose children have all finished"),
    "rollout/length_mean": Metric("tokens", "window", "length of the samples that ended with `stop` or `length`"),
    "rollout/length_min": Metric("tokens", "window", "length of the shortest sample that ended with `stop` or `length`"),
    "rollout/length_max": Metric("tokens", "window", "length of the longest sample that ended with `stop` or `length`"),
    "rollout/clipped_ratio": Metric(
        "fraction",
        "window",
        "fraction of the samples with `stop` or `length` that ended with `length`, that is, reached `max_tokens`",
    ),
    "rollout/unfinished_ratio": Metric(
        "fraction",
        "window",
        "fraction of finished samples that ended with `cut`, `deadline`, `aborted`, `stale`, `error`",
    ),
    "rollout/cut_ratio": Metric("fraction", "window", "fraction of finished samples that ended with `cut` or `deadline`"),
    "rollout/logprob_mean": Metric(
        "nats",
        "window",
        "mean log-prob of a sampled token, as returned; tokens that a client submitted in partial samples do not count",
    ),
    "rollout/first_token_s": Metric("s", "window", "from a group's arrival to its first tokens, mean over groups"),
    "rollout/sample_s": Metric("s", "window", "from a group's arrival to a sample's end (`stop` or `length`), mean"),
    "rollout/group_s_mean": Metric("s", "window", "from a group's arrival to its last sample's end, mean"),
    "rollout/group_s_max": Metric("s", "window", "from a group's arrival to its last sample's end, the slowest group"),
    "rollout/group_spread": Metric(
        "ratio",
        "window",
        "standard deviation over mean of the end times inside a group, mean over groups",
    ),
    "engine/time_s": Metric("s", "now", "time since the service started; the x axis in wandb"),
    "engine/running": Metric("sequences", "now", "running sequences, in the batch"),
    "engine/waiting": Metric("sequences", "now", "waiting sequences; a group whose prompt is not prefilled yet counts as one"),
    "engine/offloaded": Metric("sequences", "now", "waiting sequences whose KV is in host memory"),
    "engine/groups": Metric(
        "groups",
        "now",
        "unfinished groups; with a journal, groups that wait for their weights are included here and in `engine/waiting`",
    ),
    "engine/batch_size": Metric("tokens/step", "window", "sampled tokens per step"),
    "engine/step_s": Metric("s", "window", "duration of a step"),
    "engine/busy_ratio": Metric(
        "fraction",
        "window",
        "fraction of the time spent in steps; of a fleet, the mean over its replicas; a step that began before the window "
        "counts whole, up to a ratio of 1",
    ),
    "engine/host_ratio": Metric(
        "fraction",
        "window",
        "fraction of the host's time in steps for planning, building batches and committing; the rest is for the model and "
        "sampling, including waits for the device",
    ),
    "engine/prefill_tokens_per_s": Metric("tokens/s", "window", "computed tokens that were not sampled, idle time included"),
    "engine/tokens_per_row": Metric("tokens", "window", "tokens appended per running child and step; above 1 with drafts"),
    "engine/accepted_ratio": Metric("fraction", "window", "fraction of drafted tokens that were accepted"),
    "engine/recomputed_ratio": Metric("fraction", "window", "fraction of computed tokens that were computed before"),
    "engine/steps": Metric("steps", "total", "forwards"),
    "engine/failed_steps": Metric("steps", "total", "forwards that raised an exception"),
    "engine/unused_draws": Metric(
        "tokens",
        "total",
        "sampled and discarded, because the child had ended one step earlier; the cost of overlapping steps",
    ),
    "engine/generated_tokens": Metric("tokens", "total", "sampled tokens"),
    "engine/drafted_tokens": Metric("tokens", "total", "draft tokens computed"),
    "engine/accepted_tokens": Metric("tokens", "total", "draft tokens accepted"),
    "engine/scored_tokens": Metric("tokens", "total", "given tokens whose log-probs were computed"),
    "engine/prefill_tokens": Metric("tokens", "total", "computed tokens that were not sampled"),
    "engine/recomputed_tokens": Metric(
        "tokens",
        "total",
        "tokens computed again, after a preemption by recompute or a refresh",
    ),
    "engine/fork_saved_tokens": Metric("tokens", "total", "prompt tokens that children shared instead of prefilling"),
    "kv/device_blocks": Metric("blocks", "now", "size of the pool on the device"),
    "kv/host_blocks": Metric(
        "blocks", "now", "size of the pool in host memory; it grows while CUDA pins memory; 0 = offload is off"
    ),
    "kv/device_free": Metric("blocks", "now", "free blocks on the device"),
    "kv/host_free": Metric("blocks", "now", "free blocks in host memory"),
    "kv/device_used_ratio": Metric("fraction", "now", "fraction of the device pool held by sequences"),
    "kv/device_cached_ratio": Metric("fraction", "now", "fraction of the device pool held only by the prefix index"),
    "kv/host_used_ratio": Metric("fraction", "now", "fraction of the host pool held by sequences (offloaded or mirrored)"),
    "kv/host_cached_ratio": Metric("fraction", "now", "fraction of the host pool held only by the prefix index"),
    "kv/mirrored_blocks": Metric("blocks", "now", "blocks that are in both pools"),
    "kv/stale_token_ratio": Metric("fraction", "now", "fraction of the KV of unfinished sequences that older weights computed"),
    "kv/held_bytes": Metric("bytes", "now", "KV on the device that sequences hold, of all layers"),
    "kv/windows_used_ratio": Metric(
        "fraction", "now", "fraction of the blocks of layers with a sliding window held by sequences"
    ),
    "kv/states_used_ratio": Metric("fraction", "now", "fraction of the slots of recurrent state held by sequences"),
    "kv/states_offloaded": Metric("slots", "total", "recurrent states copied from device to host"),
    "kv/states_restored": Metric("slots", "total", "recurrent states copied from host to device"),
    "kv/offloads": Metric("sequences", "total", "preemptions that offloaded KV to host memory"),
    "kv/recompute_preemptions": Metric(
        "sequences",
        "total",
        "preemptions by recompute: the KV is dropped and prefilled again later",
    ),
    "kv/offloaded_blocks": Metric("blocks", "total", "blocks copied from device to host, mirrored blocks included"),
    "kv/restored_blocks": Metric("blocks", "total", "blocks copied from host to device"),
    "kv/bytes_to_host": Metric("bytes", "total", "bytes copied from device to host"),
    "kv/bytes_to_device": Metric("bytes", "total", "bytes copied from host to device"),
    "kv/stall_s": Metric("s", "total", "time that steps spent in KV copies, forks included"),
    "kv/stall_ratio": Metric(
        "fraction", "window", "fraction of the time of KV copies and steps that copies take; on CUDA they overlap with steps"
    ),
    "kv/failed_moves": Metric("moves", "total", "copies that raised an exception"),
    "kv/prefix_hit_tokens": Metric("tokens", "total", "tokens reused from the prefix index"),
    "kv/kept_tokens": Metric("tokens", "total", "tokens reused from the previous turn (`Sampling.kv_ttl_s`)"),
    "kv/prefix_hit_ratio": Metric("fraction", "window", "fraction of needed tokens that were reused"),
    "weights/version": Metric("version", "now", "live version"),
    "weights/refreshes": Metric("refreshes", "total", "completed refreshes"),
    "weights/pause_s": Metric("s", "now", "time without a step in the last refresh"),
    "weights/stage_s": Metric("s", "now", "time from the manifest to the last verified byte in the last refresh"),
    "weights/bytes": Metric("bytes", "now", "bytes sent in the last refresh"),
    "weights/resident_bytes": Metric("bytes", "now", "parameters on the device, including slots of `weight_offload`"),
    "weights/offloaded_bytes": Metric("bytes", "now", "decoder layers that `weight_offload` keeps in host memory"),
    "loop/stalled_s": Metric("s", "total", "time in phases of the loop, steps included, that exceeded `service.stall_s`"),
    "loop/longest_turn_s": Metric(
        "s",
        "max",
        "longest loop iteration, excluding its step, the swap of weights (`weights/pause_s`) and waiting for messages",
    ),
    "fleet/replicas": Metric("replicas", "now", "replicas of a router; all `fleet/` metrics come from the router"),
    "fleet/serving": Metric("replicas", "now", "replicas that accept groups"),
    "fleet/waiting": Metric("groups", "now", "groups with unassigned children"),
    "fleet/deaths": Metric("replicas", "total", "lost replicas"),
    "fleet/moved": Metric("children", "total", "children sent again because their replica was lost or stopped"),
    "fleet/repeats": Metric("samples", "total", "duplicate samples, dropped"),
    "fleet/verified": Metric(
        "samples", "total", "samples of untrusted replicas that a trusted one has computed again, with equal bits"
    ),
    "fleet/lies": Metric("samples", "total", "samples that were proven wrong; they are generated again"),
    "fleet/unverifiable": Metric("samples", "total", "chosen samples without a verdict, mostly because of a refresh"),
    "fleet/verify_skipped": Metric(
        "samples", "total", "chosen samples that were delivered unverified: full queue, no trusted replica"
    ),
    "fleet/verifying": Metric("samples", "now", "samples that wait for their verdict"),
    "fleet/banned": Metric("owners", "now", "keys, or names of replicas without a key, that are refused"),
    "off_policy/lag_mean": Metric(
        "versions",
        "window",
        "versions between the weights that generated a token and the live weights when its sample ended, mean over tokens",
    ),
    "off_policy/lag_max": Metric(
        "versions",
        "window",
        "versions between the weights that generated a token and the live weights when its sample ended, largest of all tokens",
    ),
    "off_policy/mixed_ratio": Metric("fraction", "window", "fraction of samples with tokens of several versions"),
    "mismatch/logprob_abs_mean": Metric(
        "nats",
        "window",
        "|log-prob of a plain forward − log-prob of the service|, mean over audited tokens",
    ),
    "mismatch/logprob_abs_max": Metric(
        "nats", "window", "|log-prob of a plain forward − log-prob of the service|, largest of all audited tokens"
    ),
    "mismatch/kl": Metric(
        "nats",
        "window",
        "KL of the service from the plain forward, estimator k3 = r − 1 − log r of the ratio r",
    ),
    "mismatch/outside_ratio": Metric(
        "fraction", "window", "fraction of audited tokens whose ratio of both probabilities is outside [0.9, 1.1]"
    ),
    "mismatch/audited_tokens": Metric("tokens", "total", "audited tokens"),
    "mismatch/skipped_samples": Metric(
        "samples",
        "total",
        "selected but not scored: replaced by a later sample, from other weights, or without comparable log-probs",
    ),
    "mismatch/audit_s": Metric("s", "total", "time spent in audits"),
    "rollout/sample_seconds": Metric("s", "histogram", "from a group's arrival to a sample's end (`stop` or `length`)"),
    "rollout/length_tokens": Metric("tokens", "histogram", "length of a sample that ended with `stop` or `length`"),
    "rollout/prompt_tokens": Metric(
        "tokens", "histogram", "length of the prompt of a sample that ended with `stop` or `length`"
    ),
}
TOTALS = frozenset(name for name, metric in METRICS.items() if metric.over == "total")
