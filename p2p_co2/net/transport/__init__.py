"""Carriers: authenticated, ordered bytes between peers over gRPC or libp2p. Knows nothing of what they
mean."""

import os

# gRPC's C core writes to stderr what the carrier reports as exceptions. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
