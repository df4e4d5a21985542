"""What a run shows of itself: metrics of rollouts and groups, warnings, stored episodes."""
