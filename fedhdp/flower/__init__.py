"""FedHDP deployed on Flower: the same mechanism, the same server.py and client.py, over messages between machines."""
