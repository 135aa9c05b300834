"""State on disk and state as bytes: the agreed state of a fragment, canonical (``agreed``), and a peer's
whole checkpoint in one file (``folder``). Never pickle."""
