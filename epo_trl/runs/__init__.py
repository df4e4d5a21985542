"""Support for training runs of days: one run per folder, complete checkpoints, exact resume, guards."""
