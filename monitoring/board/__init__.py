"""The dashboard: pages over a ``Model``, served by NiceGUI. Read-only; works with no internet.

``server`` binds, guards and ticks; ``shell`` has what all pages share, ``pages`` the pages. Law: pages read
facts and history and nothing else. Every page has a designed state for "not connected yet", "nobody here" and
"connection lost". Price: see ``benchmarks/offline.py board``.
"""
