"""Optimizer, learning rate, gradient norm, and optimizer state off the device."""
