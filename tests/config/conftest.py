"""Fixtures that tests of model specs share with those of the model."""

from tests.model.conftest import tiny

__all__ = ["tiny"]
