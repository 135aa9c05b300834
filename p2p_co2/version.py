"""The version of this software, as peers and pages name it. Releases change it here alone."""

__version__ = "0.1.0"
