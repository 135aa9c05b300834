"""All that happens is an event first; logs, summaries, pictures and tests are readers of events.

``events`` has the frozen types, ``journal`` writes and reads them as JSON lines, ``view`` folds them into one
``SwarmView`` (``peer_view``: its part for one peer). No sink, no network, no torch here.
"""
