"""Scores rows of episodes: log-probabilities, entropies, values and features, each turn as its own sequence."""
