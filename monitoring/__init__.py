"""Looking at a swarm: live terminal, end summary, picture. Read-only, without torch.

Law: everything here is a reader of ``telemetry.SwarmView``; nothing here speaks to a peer or changes a run.
``summary`` makes the figures, ``terminal`` and ``picture`` only show them.
"""
