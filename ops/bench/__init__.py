"""Measurements, as ratios within one run wherever a ratio can say it. Results with machine and versions: RESULTS.md."""
