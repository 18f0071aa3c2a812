"""THE table: subject ↔ message ↔ stream ↔ who reads it. Everything that names a subject takes it from here.

A subject carries its tenant, and a job's subject carries its job, so that consumers can filter and the server can stamp. A
tenant asks under the short names of the `api.*` rows; all else is the provider's. Tokens are names (`schemas.base.Name`), hence
never contain dots or wildcards.
"""

import re
from typing import Literal

import msgspec

from schemas import api, control, dataset, environment, evaluation, events, inference, job, policy, rollout, training, usage
from schemas.base import NAME_PATTERN

Codec = Literal["json", "msgpack"]
Delivery = Literal["work", "log", "request", "beat"]  # one worker takes it | kept and replayable | core request | core publish

GATEWAY = "tenant.{tenant}."  # before what a tenant asks: put there by the server, see nexus_bus/bus/authority.py
EVENTS_EXPORT = "event.{tenant}.>"  # what a tenant may listen to; on its side `event.>`
ASK_EXPORT = "ask.{tenant}.>"  # what its own environment workers are asked; on its side `ask.>`

_TOKEN = re.compile(NAME_PATTERN)
_FIELD = re.compile(r"\{(\w+)\}")


class SubjectEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    name: str
    pattern: str  # with {tokens}
    message: type
    reply: type | None = None  # of a core request
    stream: str | None = None
    codec: Codec = "json"
    delivery: Delivery = "work"
    producer: str
    consumer: str
    summary: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """Names of the tokens, in order."""
        return tuple(_FIELD.findall(self.pattern))

    @property
    def wildcard(self) -> str:
        """The subject with every token a `*`: what a stream or a subscription names."""
        return _FIELD.sub("*", self.pattern)

    @property
    def local(self) -> str:
        """What a tenant calls it; empty if it is none of its concern."""
        return self.pattern.removeprefix(GATEWAY) if self.pattern.startswith(GATEWAY) else ""

    def subject(self, **tokens: str) -> str:
        """See `subject`."""
        return subject(self.name, **tokens)

    @property
    def type(self) -> str:
        """The `ce-type` of its messages."""
        return f"nexus.{self.name}"


def _row(name: str, pattern: str, message: type, **kw: object) -> SubjectEntry:
    return SubjectEntry(name=name, pattern=pattern, message=message, **kw)  # type: ignore[arg-type]  # kw are the Struct's own fields


def _call(name: str, message: type, reply: type, summary: str, codec: Codec = "json") -> SubjectEntry:
    """A request to the gateway; a tenant calls it by its name alone."""
    return _row(
        f"api.{name}", GATEWAY + name, message, reply=reply, codec=codec, delivery="request", producer="tenant",
        consumer="gateway", summary=summary,
    )  # fmt: skip


# fmt: off
TABLE: tuple[SubjectEntry, ...] = (
    _call("job.submit", job.JobSpec, api.Taken, "Send a job document."),
    _call("job.cancel", job.JobCancel, api.Taken, "Stop a job."),
    _call("job.pause", job.JobPause, api.Taken, "Let a job rest."),
    _call("job.resume", job.JobResume, api.Taken, "Go on with a paused job."),
    _call("job.get", api.JobQuery, api.JobFound, "One job's state."),
    _call("job.list", api.PageQuery, api.JobPage, "All jobs."),
    _call("policy.get", api.PolicyQuery, api.PolicyFound, "One policy version."),
    _call("policy.list", api.PageQuery, api.PolicyPage, "Policy versions, of one job or of all."),
    _call("policy.state", api.JobQuery, api.StateFound, "Where training of a job stands."),
    _call("policy.read", api.ContentQuery, api.Content, "A piece of a version's weights.", codec="msgpack"),
    _call("policy.pin", policy.PolicyPin, api.Taken, "Keep a policy version for good, or no longer."),
    _call("policy.upload", api.UploadChunk, control.Ack, "A piece of a policy that comes from elsewhere.", codec="msgpack"),
    _call("policy.import", api.UploadedImport, api.Taken, "Register a policy that was sent before."),
    _call("infer.request", inference.InferenceRequest, inference.InferenceReply, "Ask a version to act.", codec="msgpack"),
    _call("env.describe", environment.EnvironmentQuery, environment.EnvironmentFound, "What a policy must fit."),
    _call("env.open", environment.SessionAsk, environment.SessionLease, "Lease an environment session."),
    _call("env.call", environment.SessionStep, environment.SessionReply, "One call on a session.", codec="msgpack"),
    _call("env.list", environment.OwnQuery, environment.OwnPage, "Environments of one's own that are served right now."),
    _call("env.offer", environment.OwnOffer, control.Ack, "Serve an environment of one's own."),
    _call("env.answer", environment.OwnAnswer, control.Ack, "What its worker says when asked on `ask.>`.", codec="msgpack"),
    _call("data.begin", dataset.DatasetBegin, dataset.DatasetBegun, "A page of the files of a dataset that is to be sent."),
    _call("data.put", dataset.DatasetPut, dataset.DatasetHeld, "A piece of one of them.", codec="msgpack"),
    _call("data.commit", dataset.DatasetCommit, dataset.DatasetCommitted, "Check what was sent, and put it in place."),
    _call("data.list", dataset.DatasetQuery, dataset.DatasetPage, "Datasets that jobs can name."),
    _call("data.drop", dataset.DatasetDrop, dataset.DatasetDropped, "Take one away."),
    _call("event.read", api.LogQuery, api.EventPage, "What happened. Live, without replay: subscribe `event.>`."),
    _call("eval.read", api.LogQuery, api.EpisodePage, "Episodes of evaluations, as they end."),
    _call("eval.film", api.FilmQuery, api.FilmFound, "What the policy saw in one of them.", codec="msgpack"),
    _call("usage.read", api.LogQuery, api.UsagePage, "What was used."),
    _call("audit.read", api.LogQuery, api.AuditPage, "Who did what."),
    _call("account.show", api.AccountQuery, api.Account, "Limits, keys, and how much is taken."),
    _row("job.submit", "job.submit.{tenant}", job.JobSpec, stream="JOBS", producer="gateway", consumer="master",
         summary="A job document."),
    _row("job.cancel", "job.cancel.{tenant}", job.JobCancel, stream="JOBS", producer="gateway", consumer="master",
         summary="Stop a job."),
    _row("job.pause", "job.pause.{tenant}", job.JobPause, stream="JOBS", producer="gateway", consumer="master",
         summary="Let a job rest."),
    _row("job.resume", "job.resume.{tenant}", job.JobResume, stream="JOBS", producer="gateway", consumer="master",
         summary="Go on with a paused job."),
    _row("job.report", "job.report.{tenant}.{job}", control.JobReport, stream="JOBS", producer="any worker", consumer="master",
         summary="Progress of a job, on the master's own work queue."),
    _row("policy.import", "policy.import.{tenant}", policy.PolicyImport, stream="JOBS", producer="gateway", consumer="master",
         summary="Register a policy that comes from elsewhere."),
    _row("policy.pin", "policy.pin.{tenant}", policy.PolicyPin, stream="JOBS", producer="gateway", consumer="master",
         summary="Keep a policy version for good, or no longer."),
    _row("rollout.run", "rollout.run.{tenant}.{job}", rollout.RolloutOrder, stream="ROLLOUT", producer="master",
         consumer="rollout", summary="Play one episode."),
    _row("rollout.own", "rollout.own.{tenant}.{environment}.{job}", rollout.RolloutOrder, stream="ROLLOUT", producer="master",
         consumer="rollout", summary="Play one episode in an environment of the tenant's own."),
    _row("env.prepare", "env.prepare.{tenant}.{job}", environment.PrepareOrder, stream="ROLLOUT", producer="master",
         consumer="environment", summary="Record or open a job's dataset, and report its statistics."),
    _row("env.feed", "env.feed.{tenant}.{job}", environment.FeedOrder, stream="ROLLOUT", producer="master",
         consumer="environment", summary="Put SFT batches on the Training Queue."),
    _row("env.open", "env.open.{tenant}", environment.SessionOpen, reply=environment.SessionOpened, delivery="request",
         producer="rollout", consumer="environment", summary="Lease an environment session."),
    _row("env.session", "env.session.{tenant}.{session}", environment.SessionCall, reply=environment.SessionReply,
         codec="msgpack", delivery="request", producer="rollout", consumer="environment", summary="One call on a session."),
    _row("env.own", "env.own.{tenant}", environment.SessionOpen, reply=environment.SessionOpened, delivery="request",
         producer="rollout", consumer="gateway", summary="Lease a session of an environment of the tenant's own."),
    _row("data.begin", "data.begin.{tenant}", dataset.DatasetAsked, reply=dataset.DatasetBegun, delivery="request",
         producer="gateway", consumer="environment", summary="Begin a dataset, or go on with it."),
    _row("data.put", "data.put.{tenant}", dataset.DatasetPut, reply=dataset.DatasetHeld, codec="msgpack", delivery="request",
         producer="gateway", consumer="environment", summary="A piece of one of its files."),
    _row("data.commit", "data.commit.{tenant}", dataset.DatasetCommit, reply=dataset.DatasetCommitted, delivery="request",
         producer="gateway", consumer="environment", summary="Check it, and put it in place."),
    _row("data.list", "data.list.{tenant}", dataset.DatasetQuery, reply=dataset.DatasetPage, delivery="request",
         producer="gateway", consumer="environment", summary="Datasets of a tenant."),
    _row("data.drop", "data.drop.{tenant}", dataset.DatasetDrop, reply=dataset.DatasetDropped, delivery="request",
         producer="gateway", consumer="environment", summary="Take one away."),
    _row("ask.open", "ask.{tenant}.open.{environment}", environment.OwnAsk, codec="msgpack", delivery="beat",
         producer="gateway", consumer="a tenant's environment worker", summary="Open a session; one of them answers."),
    _row("ask.call", "ask.{tenant}.call.{worker}", environment.OwnAsk, codec="msgpack", delivery="beat",
         producer="gateway", consumer="a tenant's environment worker", summary="A call on a session of this one's."),
    _row("env.answered", "env.answered.{gateway}", environment.OwnAnswered, reply=control.Ack, codec="msgpack",
         delivery="request", producer="gateway", consumer="gateway", summary="An answer for another gateway."),
    _row("infer.request", "infer.request.{tenant}", inference.InferenceRequest, stream="INFERENCE", codec="msgpack",
         producer="rollout, gateway", consumer="inference",
         summary="THE INFERENCE QUEUE: one observation for one policy version."),
    _row("infer.reply", "infer.reply.{worker}", inference.InferenceReply, codec="msgpack", delivery="beat",
         producer="inference", consumer="rollout", summary="The answer, to the asker's inbox."),
    _row("train.record", "train.record.{tenant}.{job}", rollout.RolloutRecord, stream="TRAINING", codec="msgpack",
         producer="rollout", consumer="trainer", summary="THE TRAINING QUEUE: one training episode."),
    _row("train.batch", "train.batch.{tenant}.{job}", training.TrainingBatch, stream="TRAINING", codec="msgpack",
         producer="environment", consumer="trainer", summary="THE TRAINING QUEUE: one SFT batch."),
    _row("upload", "upload.{tenant}.{upload}", api.UploadChunk, stream="UPLOADS", codec="msgpack", delivery="log",
         producer="gateway", consumer="gateway", summary="Pieces of policies that come from elsewhere, until they are whole."),
    _row("event", "event.{tenant}.{job}", events.Event, stream="EVENTS", delivery="log", producer="any worker",
         consumer="tenants, dashboards", summary="Everything that happened."),
    _row("eval.episode", "eval.{tenant}.{job}", evaluation.EvaluationEpisode, stream="EVALS", delivery="log",
         producer="rollout", consumer="gateway, for nexus report", summary="One episode of an evaluation."),
    _row("eval.film", "film.{tenant}.{job}.{film}", evaluation.EvaluationFilm, stream="FILMS", codec="msgpack", delivery="log",
         producer="rollout", consumer="gateway, for nexus report", summary="What the policy saw in the first of each outcome."),
    _row("usage", "usage.{tenant}.{job}", usage.Usage, stream="USAGE", delivery="log", producer="workers",
         consumer="nexus usage", summary="What a job used."),
    _row("audit", "audit.{tenant}", usage.Audit, stream="AUDIT", delivery="log", producer="master", consumer="nexus audit",
         summary="Who did what."),
    _row("trace", "trace.{worker}", control.Spans, stream="TRACES", codec="msgpack", delivery="log", producer="any worker",
         consumer="nexus trace", summary="Spans, while no OTLP endpoint is set."),
    _row("dead", "dead.{stream}.{tenant}", control.DeadLetter, stream="DEAD", codec="msgpack", delivery="log",
         producer="any worker", consumer="operators", summary="Messages given up, with the reason and the original."),
    _row("health.beat", "health.beat.{role}.{worker}", control.Heartbeat, delivery="beat", producer="any worker",
         consumer="health", summary="A worker lives and moves."),
    _row("health.exit", "health.exit.{host}", control.ProcessExit, delivery="beat", producer="host", consumer="health",
         summary="A supervised process ended."),
    _row("host.order", "host.order.{host}", control.ProcessOrder, reply=control.Ack, delivery="request", producer="health, cli",
         consumer="host", summary="Restart or stop a supervised process."),
    _row("host.scale", "host.scale.{host}", control.ScaleOrder, reply=control.Scaled, delivery="request", producer="cli",
         consumer="host", summary="Run more or fewer workers of a role."),
    _row("health.known", "health.known", control.WorkersQuery, reply=control.WorkersKnown, delivery="request", producer="cli",
         consumer="health", summary="Everybody whom the Health Manager knows."),
)
# fmt: on

BY_NAME: dict[str, SubjectEntry] = {row.name: row for row in TABLE}
CALLS: tuple[SubjectEntry, ...] = tuple(row for row in TABLE if row.local)  # what tenants may ask
BY_TYPE: dict[str, SubjectEntry] = {row.type: row for row in TABLE}

_SHAPES: dict[tuple[int, str], list[tuple[SubjectEntry, list[str]]]] = {}  # by how many words a subject has, and its first
for _entry in TABLE:
    _shape = _entry.pattern.split(".")
    _SHAPES.setdefault((len(_shape), _shape[0]), []).append((_entry, _shape))


def subject(name: str, **tokens: str) -> str:
    """Render the subject `name` with its tokens.

    Raises:
        KeyError: the table has no such name, or a token is missing.
        ValueError: a token is not a name (lower-case letters, digits, `-`, `_`), so it could break out of its place.
    """
    row = BY_NAME[name]
    for key in row.tokens:
        value = tokens[key]
        if not _TOKEN.match(value) and value != "_":
            raise ValueError(f"{name}: {key} {value!r} is not a name (pattern {NAME_PATTERN})")
    return row.pattern.format(**tokens)


def parse(text: str) -> tuple[SubjectEntry, dict[str, str]]:
    """Find the row and the tokens of a concrete subject.

    Raises:
        KeyError: no row of the table has this shape.
    """
    parts = text.split(".")
    for row, shape in _SHAPES.get((len(parts), parts[0]), ()):
        if all(s == p or s.startswith("{") for s, p in zip(shape, parts, strict=True)):
            return row, {s[1:-1]: p for s, p in zip(shape, parts, strict=True) if s.startswith("{")}
    raise KeyError(f"no subject of the table looks like {text!r}")
