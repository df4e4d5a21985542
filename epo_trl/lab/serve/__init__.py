"""Serves games to OpenEnv clients and to other trainers."""
