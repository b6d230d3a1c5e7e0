"""One file a parallel dimension; apply.py fixes their order."""
