"""Training state as plain data, independent of the parallel layout, and random bits with the same property."""
