// A tenant without Python: submit a job document and follow it to its end, in Node.js.
//
//   npm install @nats-io/transport-node@3
//   NEXUS_URL=nats://127.0.0.1:4222 NEXUS_CREDS=acme.creds node ops/examples/submit.mjs job.json
//
// Control messages are plain JSON (schemas/generated/ has their JSON Schema); nothing else of the project is needed.

import { readFile } from "node:fs/promises";
import { randomUUID } from "node:crypto";
import { connect, credsAuthenticator, headers } from "@nats-io/transport-node";

let document, connection;

async function open() {
  document = JSON.parse(await readFile(process.argv[2], "utf8"));
  connection = await connect({
    servers: process.env.NEXUS_URL ?? "nats://127.0.0.1:4222",
    authenticator: credsAuthenticator(await readFile(process.env.NEXUS_CREDS)),
  });
}

/** Ask the gateway; an answer with Nexus-Error-Code is an error, and its text says what was wrong. */
async function call(subject, message, id) {
  const given = headers();
  given.set("Content-Type", "application/json");
  if (id) given.set("Nats-Msg-Id", id);
  const answer = await connection.request(subject, JSON.stringify(message), { headers: given, timeout: 30_000 });
  if (answer.headers?.get("Nexus-Error-Code")) throw new Error(answer.string());
  return answer.json();
}

async function follow() {
  const taken = await call("job.submit", document, randomUUID()); // sent twice under one id, it is still one job
  let accepted = false;
  for (let after = taken.after ?? 0; ; ) {
    const page = await call("event.read", { after, wait_s: 20 }); // at most 20 s without news, then ask again
    for (const event of page.events) {
      const answers = event.submission === taken.submission;
      if (answers && event.type === "job.refused") {
        console.error(event.message);
        return 2;
      }
      accepted ||= answers && event.type === "job.accepted";
      if (!accepted || event.job !== document.name) continue;
      console.log(event.time, event.type, event.message ?? "", JSON.stringify(event.data ?? {}));
      if (["job.completed", "job.failed", "job.cancelled"].includes(event.type)) return event.type === "job.completed" ? 0 : 1;
    }
    after = page.next;
  }
}

try {
  await open();
  process.exitCode = await follow();
} catch (error) {
  console.error(error.message);
  process.exitCode = 2;
} finally {
  await connection?.close();
}
