"""Pretraining of the small backbone that ships with this project: `python -m ops.pretrain --help`."""
