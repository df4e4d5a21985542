"""Selects, stores and displays sample episodes of a run. See docs/watch.md."""
