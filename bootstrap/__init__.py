"""Starting things: the seed that peers find each other through, and whole swarms on one machine.

No torch in the seed; nothing here imports ``peers`` or ``monitoring`` (they are started as processes, or
handed in).
"""
