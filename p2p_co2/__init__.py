"""p2p-co2: volunteers train one PyTorch model together over the internet."""

__version__ = "0.1.0"
