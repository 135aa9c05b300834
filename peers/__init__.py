"""The peer daemon: joins a run by its ticket, trains the run's recipe, leaves cleanly."""
