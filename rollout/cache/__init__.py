"""`rollout cache`: a proxy before a service; it answers repeated groups from a folder. Imports no torch. docs/cache.md."""
