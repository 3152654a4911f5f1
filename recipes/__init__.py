"""Programs to copy: trainers, and agents, that use a rollout service."""
