"""libp2p through its daemon: the carrier for peers that nobody can dial, streams, relays, hole punching."""
