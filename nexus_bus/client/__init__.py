"""What a tenant imports: submit jobs, follow them, fetch policies. Needs no torch.

    async with await Client.connect(tenant="acme") as client:
        submission = await client.submit("pick.toml")
        async for event in client.watch(submission.job):
            print(event.time, event.type, event.message)

The same without async: `nexus_bus.client.sync.Client`.
"""

from nexus_bus.client.client import Client, Submission
from nexus_bus.client.policies import Imported

__all__ = ["Client", "Imported", "Submission"]
