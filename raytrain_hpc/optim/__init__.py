"""Optimizer, learning rate, gradient norm and optimizer offload."""
