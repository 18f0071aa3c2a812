"""The bus: everything that knows NATS. The rest of the project sees messages, outcomes and errors."""

from nexus_bus.bus.connection import Bus, Subscription
from nexus_bus.bus.delivery import Delivery, Hold
from nexus_bus.bus.kv import Entry, Kv
from nexus_bus.bus.micro import Card, Found, Presence, discover
from nexus_bus.bus.outcomes import Done, Outcome, Reject, Retry
from nexus_bus.bus.publish import Published
from nexus_bus.bus.pull import Puller
from nexus_bus.bus.request import Incoming, Service
from nexus_bus.bus.rounds import Rounds
from nexus_bus.bus.server import EmbeddedServer, Running, die_with_parent
from nexus_bus.bus.tail import Item
from nexus_bus.bus.topology import (
    Durable,
    data_durable,
    ensure_durable,
    ensure_job,
    ensure_tenant,
    ensure_topology,
    inference_durable,
    orders_durable,
    own_durable,
    remove_job,
    remove_tenant,
    rollout_durable,
    training_durable,
)

__all__ = [
    "Bus",
    "Card",
    "Delivery",
    "Done",
    "Durable",
    "EmbeddedServer",
    "Entry",
    "Found",
    "Hold",
    "Incoming",
    "Item",
    "Kv",
    "Outcome",
    "Presence",
    "Published",
    "Puller",
    "Reject",
    "Retry",
    "Rounds",
    "Running",
    "Service",
    "Subscription",
    "data_durable",
    "die_with_parent",
    "discover",
    "ensure_durable",
    "ensure_job",
    "ensure_tenant",
    "ensure_topology",
    "inference_durable",
    "orders_durable",
    "own_durable",
    "remove_job",
    "remove_tenant",
    "rollout_durable",
    "training_durable",
]
