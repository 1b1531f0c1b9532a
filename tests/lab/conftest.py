"""Fixtures of the lab's own tests."""

from lab_fixture import lab

__all__ = ["lab"]
