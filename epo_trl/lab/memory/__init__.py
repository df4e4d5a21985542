"""Estimates the memory of a run per GPU, from its sizes or from its config. No model is loaded."""
