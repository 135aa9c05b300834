"""Looking at a swarm: board, live terminal, end summary, report. Read-only, without torch.

Law: everything here is a reader of ``telemetry.SwarmView``; nothing here speaks to a peer or changes a run.
``facts`` (of one moment) and ``summary`` (of a whole run) make the figures; ``board``, ``terminal``,
``report`` and ``metrics`` only show them.
"""
