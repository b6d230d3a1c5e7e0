"""Callbacks: their interface, the built-in ones, and those that other packages register."""
