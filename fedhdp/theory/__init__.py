"""Closed forms for federated linear regression and point estimation, and the simulation that checks them."""
