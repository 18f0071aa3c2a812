"""The one exception tree. Messages say what was wrong, where, and what to do next.

NexusError
├── Refused            the input is wrong; repeating it will not help (a tenant sees the message)
│   ├── BadMessage     it does not decode; names the field
│   ├── BadJob         the job document asks for something that cannot be done
│   ├── ContractError  policy, environment and data do not fit each other
│   ├── Denied         credentials that are missing, damaged, expired, revoked or of somebody else
│   └── NotFound       a version, job, dataset or environment that does not exist
├── Unavailable        it may work later: broker away, queue full, no worker yet
│   ├── Conflict       somebody else changed it first (compare-and-set failed, lease lost)
│   └── Unreadable     what this worker had put aside is damaged; the job goes on from its last commit
└── EnvironmentFault   a simulator crashed, hung or refused; costs a retry, is never a reward
"""


class NexusError(Exception):
    """Base of everything this project raises on purpose. `code` is stable, for programs."""

    code = "error"


class Refused(NexusError):
    """The input is wrong; repeating it will not help."""

    code = "refused"


class BadMessage(Refused):
    """A message that does not decode into its type. The text names the field."""

    code = "bad_message"


class BadJob(Refused):
    """A job document that asks for something that cannot be done."""

    code = "bad_job"


class ContractError(Refused):
    """Policy, environment and data do not fit each other."""

    code = "contract"


class Denied(Refused):
    """Credentials that are missing, damaged, expired, revoked, or not for this."""

    code = "denied"


class NotFound(Refused):
    """Something that does not exist, or not for this tenant."""

    code = "not_found"


class Unavailable(NexusError):
    """It may work later."""

    code = "unavailable"


class Conflict(Unavailable):
    """Somebody else changed it first."""

    code = "conflict"


class Unreadable(Unavailable):
    """What this worker had put aside cannot be read back; the job goes on from its last commit."""

    code = "unreadable"


class EnvironmentFault(NexusError):
    """A simulator crashed, hung or refused. It costs a retry and is never a reward."""

    code = "environment_fault"


def from_code(code: str, text: str) -> NexusError:
    """The error a remote worker meant, by its stable code; an unknown code gives the base class."""
    return _BY_CODE.get(code, NexusError)(text)


_BY_CODE: dict[str, type[NexusError]] = {
    kind.code: kind
    for kind in (
        NexusError,
        Refused,
        BadMessage,
        BadJob,
        ContractError,
        Denied,
        NotFound,
        Unavailable,
        Conflict,
        Unreadable,
        EnvironmentFault,
    )
}
