"""One peer of several processes on one node: ranks of a process group, of which one speaks to the swarm."""
