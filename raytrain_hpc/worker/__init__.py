"""One process per device: the Ray actor that runs a rank. Only actor.py imports Ray."""
