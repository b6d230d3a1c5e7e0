"""Policies during a run, as pure functions: which ranks failed and why, and which workers continue as which ranks."""
