"""`rollout cache`: a proxy in front of a service that answers groups from a folder. Imports no torch. docs/cache.md."""
