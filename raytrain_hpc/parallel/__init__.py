"""One file per parallel dimension; `parallelize.py` applies them in a fixed order."""
