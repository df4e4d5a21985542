"""The critic of PPO: construction, optimizer groups, file, bootstrap values, statistics."""
