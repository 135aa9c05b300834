"""All that happens is an event first; logs, summaries, pictures and tests are readers of events.

``events`` has the frozen types; ``journal`` writes and reads them as JSON lines. ``view`` folds them into one
``SwarmView``; ``feed`` is where readers get them from. No sink, no network, no torch here.
"""
