"""Schemas for other languages, made from the Structs: `python -m ops.schemas.generate`."""
