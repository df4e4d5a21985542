"""Episodes that a run has kept: which ones, in which files, and how they are shown. See docs/watch.md."""
