"""How messages travel: typed messages, frames, and two interchangeable ends (sockets, loopback)."""
