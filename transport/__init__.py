"""Transport of messages: typed messages, frames, and two interchangeable ends (sockets, loopback)."""
