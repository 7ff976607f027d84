"""Federated learning in which every client chooses its own differential privacy."""

__version__ = "0.1.0"
