"""Metrics of a service: meters, sinks (console, JSONL, Prometheus, wandb) and the log-prob audit."""
