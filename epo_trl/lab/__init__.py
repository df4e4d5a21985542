"""Tools around training: studies, plots, audits, served games. Nothing outside this folder imports it."""
