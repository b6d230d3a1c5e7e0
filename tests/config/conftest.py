"""Fixtures shared with the tests of the model."""

from tests.model.conftest import tiny

__all__ = ["tiny"]
