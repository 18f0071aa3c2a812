"""What a tenant imports. Needs no torch.

client = await Client.connect("nats://127.0.0.1:4222", tenant="acme")
await client.submit(Path("pick.toml"))
async for event in client.watch("pick"):
    print(event.type, event.message)
"""

from nexus_bus.client.client import Client, Submission

__all__ = ["Client", "Submission"]
