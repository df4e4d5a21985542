"""What a training run of days needs: one run to a folder, whole checkpoints, exact resume, guards."""
