"""Bytes between peers, and finding them: carriers over gRPC and libp2p, and the DHT."""
