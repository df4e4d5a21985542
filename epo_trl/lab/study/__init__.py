"""A study: several methods, several seeds, one environment, from one YAML file to a report. Loads no torch."""
