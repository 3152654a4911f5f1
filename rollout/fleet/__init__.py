"""Many engines as one: what stands behind a service that has replicas. Imports neither torch nor an engine.

    Service ── EngineLike ──> Fleet ── Link, one each ──> replica 0 … N-1, ordinary services

Everything in here runs in the thread of the front's service. The links' threads only put events into `Inbox`.
"""
