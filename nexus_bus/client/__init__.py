"""What a tenant imports: submit jobs, follow them, fetch policies, step environments. Needs no torch.

    async with await Client.connect(tenant="acme") as client:
        submission = await client.submit("pick.toml")
        async for event in client.watch(submission.job):
            print(event.time, event.type, event.message)

The same without async: `nexus_bus.client.sync.Client`.
"""

from nexus_bus.client.client import Client, Submission
from nexus_bus.client.policies import Imported
from nexus_bus.client.sessions import Session, chunk, observed

__all__ = ["Client", "Imported", "Session", "Submission", "chunk", "observed"]
