"""The bus: everything about NATS and JetStream, and the only package that knows it. Loads no torch.

Read consume.py first; it is the loop that every work queue runs through.
"""

from nexus_bus.bus.connection import Bus, Subscription
from nexus_bus.bus.delivery import Delivery
from nexus_bus.bus.kv import Entry, Kv
from nexus_bus.bus.outcomes import Done, Outcome, Reject, Retry
from nexus_bus.bus.publish import Published
from nexus_bus.bus.pull import Puller
from nexus_bus.bus.request import Incoming, Service
from nexus_bus.bus.rounds import Rounds
from nexus_bus.bus.server import EmbeddedServer, tie_to_parent
from nexus_bus.bus.tail import Item
from nexus_bus.bus.topology import (
    Durable,
    ensure_job,
    ensure_tenant,
    ensure_topology,
    inference_durable,
    remove_job,
    training_durable,
)

__all__ = [
    "Bus",
    "Delivery",
    "Done",
    "Durable",
    "EmbeddedServer",
    "Entry",
    "Incoming",
    "Item",
    "Kv",
    "Outcome",
    "Published",
    "Puller",
    "Reject",
    "Retry",
    "Rounds",
    "Service",
    "Subscription",
    "ensure_job",
    "ensure_tenant",
    "ensure_topology",
    "inference_durable",
    "remove_job",
    "tie_to_parent",
    "training_durable",
]
