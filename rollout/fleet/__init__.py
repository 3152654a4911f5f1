"""The router: presents several replicas as one engine. Imports neither torch nor an engine.

    Service ── EngineLike ──> Fleet ── Link, one each ──> replica 0 … N-1, ordinary services

The code runs in the thread of the router's service. The threads of the links only add events to `EventQueue`.
"""
