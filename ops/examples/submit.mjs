// A tenant without Python: submit a job document and follow it to its end, in Node.js.
//
//   npm install @nats-io/transport-node@3 @nats-io/jetstream@3
//   NEXUS_URL=nats://127.0.0.1:4222 NEXUS_TENANT=default node ops/examples/submit.mjs job.json
//
// Control messages are plain JSON (schemas/generated/ has their JSON Schema); nothing else of the project is needed.

import { readFile } from "node:fs/promises";
import { randomUUID } from "node:crypto";
import { connect, headers } from "@nats-io/transport-node";
import { DeliverPolicy, jetstream } from "@nats-io/jetstream";

const tenant = process.env.NEXUS_TENANT ?? "default";
const document = JSON.parse(await readFile(process.argv[2], "utf8"));
const submission = `${tenant}/${document.name}/${randomUUID()}`; // sent twice with this id, it is still one job

const connection = await connect({ servers: process.env.NEXUS_URL ?? "nats://127.0.0.1:4222", name: `client-${tenant}` });
const stream = jetstream(connection);

const events = await stream.consumers.get("EVENTS", {
  filter_subjects: `event.${tenant}.>`,
  deliver_policy: DeliverPolicy.StartTime,
  opt_start_time: new Date(Date.now() - 60_000).toISOString(), // clocks differ
});

const given = headers();
given.set("Content-Type", "application/json");
await stream.publish(`job.submit.${tenant}`, JSON.stringify(document), { msgID: submission, headers: given });

let accepted = false;
for await (const message of await events.consume()) {
  const event = message.json();
  if (event.submission === submission && event.type === "job.refused") {
    console.error(event.message);
    process.exitCode = 2;
    break;
  }
  accepted ||= event.submission === submission && event.type === "job.accepted";
  if (!accepted || event.job !== document.name) continue;
  console.log(event.time, event.type, event.message ?? "", JSON.stringify(event.data ?? {}));
  if (["job.completed", "job.failed", "job.cancelled"].includes(event.type)) {
    process.exitCode = event.type === "job.completed" ? 0 : 1;
    break;
  }
}
await connection.close();
