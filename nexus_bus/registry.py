"""Keys of the KV buckets `registry` and `leases`. Names contain no dots, so a key is read back without doubt."""

SERVICE = "service"  # ServiceTerms


def tenant_key(tenant: str) -> str:
    """A tenant that has submitted something."""
    return f"tenant.{tenant}"


def account_key(tenant: str) -> str:
    """TenantRecord; with an empty name, the prefix of all."""
    return f"account.{tenant}"


def tenant_of(key: str) -> str:
    """The tenant of a tenant's, an account's or a job's key."""
    return key.split(".")[1]


def job_key(tenant: str, job: str) -> str:
    """JobState; with an empty job, the prefix of all of a tenant's jobs."""
    return f"job.{tenant}.{job}"


def policy_key(tenant: str, job: str, n: int) -> str:
    """PolicyVersion."""
    return f"policy.{tenant}.{job}.{n}"


def policies_prefix(tenant: str = "", job: str = "") -> str:
    """Prefix of the keys of all versions of a job, of a tenant, or of everybody."""
    return ".".join(["policy", *filter(None, (tenant, job)), ""])


def policy_of(key: str) -> tuple[str, str, int]:
    """(tenant, job, n) of a version's key."""
    _, tenant, job, n = key.split(".")
    return tenant, job, int(n)


def state_key(tenant: str, job: str) -> str:
    """TrainingState."""
    return f"state.{tenant}.{job}"


def slot_key(tenant: str, job: str) -> str:
    """Lease of a trainer's slot, in the bucket `leases`."""
    return f"slot.{tenant}.{job}"


def dataset_key(tenant: str, dataset: str) -> str:
    """DatasetRecord, of one that was pushed; with an empty dataset, the prefix of all of a tenant's."""
    return f"dataset.{tenant}.{dataset}"
