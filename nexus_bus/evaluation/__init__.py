"""Evaluation as a service: protocols, records of episodes, films, statistics, reports and comparisons."""
