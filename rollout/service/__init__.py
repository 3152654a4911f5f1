"""The service: one loop that serves an engine to clients, with sessions, a journal and weight refreshes."""
