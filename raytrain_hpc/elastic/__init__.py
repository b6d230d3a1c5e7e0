"""Policies during a run, as pure functions: which ranks have failed and why, and who continues as which rank."""
