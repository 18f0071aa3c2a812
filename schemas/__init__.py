"""The contract: every message that crosses the bus, one file per family.

Nothing here imports anything else of ours, nor torch, nor nats: any process, in any language, can read it. `subjects.py`
is the table subject ↔ message ↔ delivery; `generated/` holds JSON Schema and AsyncAPI 3.0 made from it.
"""

SCHEMA_VERSION = "1"
