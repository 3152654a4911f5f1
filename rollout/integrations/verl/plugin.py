"""Loaded by verl itself (entry point of the group `verl.plugins`)."""

from rollout.integrations.verl import register

register()
