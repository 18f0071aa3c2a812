// A tenant without Python: open an environment session, and step it through episodes, in Node.js.
//
//   npm install @nats-io/transport-node@3
//   NEXUS_URL=nats://127.0.0.1:4222 NEXUS_CREDS=acme.creds node ops/examples/step.mjs '{"id": "tabletop", "task": "touch"}'
//
// Who asks in JSON is answered in JSON; bytes (numbers of an array, pictures, a saved state) are base64 there. An environment of
// your own (`own`, `own-NAME`) is stepped in the same way.

import { readFile } from "node:fs/promises";
import { connect, credsAuthenticator, headers } from "@nats-io/transport-node";

const EPISODES = 2;
const CHUNK = 4; // actions in one call: from 1 to 64

let connection;

/** Ask the gateway, once; an answer with Nexus-Error-Code is an error, and its text says what was wrong. */
async function call(subject, message) {
  const given = headers();
  given.set("Content-Type", "application/json");
  const answer = await connection.request(subject, JSON.stringify(message), { headers: given, timeout: 70_000 });
  if (answer.headers?.get("Nexus-Error-Code")) throw new Error(answer.string());
  return answer.json();
}

/** Rows of numbers as the message has them: float32, little-endian, row after row. */
function tensor(rows) {
  const data = Buffer.alloc(4 * rows.length * rows[0].length);
  rows.flat().forEach((value, at) => data.writeFloatLE(value, 4 * at));
  return { dtype: "float32", shape: [rows.length, rows[0].length], data: data.toString("base64") };
}

/** A float32 array of a message. */
function numbers(tensor) {
  const data = Buffer.from(tensor.data, "base64");
  return Array.from({ length: data.length / 4 }, (_, at) => data.readFloatLE(4 * at));
}

/** Put your policy here: it sees a PNG by camera, the state and the sentence, and answers with actions within their bounds. */
function decide({ images, state, instruction }, action) {
  const _pictures = Object.fromEntries(Object.entries(images).map(([name, { data }]) => [name, Buffer.from(data, "base64")]));
  const _seen = [numbers(state), instruction];
  return Array.from({ length: CHUNK }, () => action.low.map((low, i) => low + Math.random() * (action.high[i] - low)));
}

async function play() {
  const environment = JSON.parse(process.argv[2]);
  const lease = await call("env.open", { environment, lease_s: 60 }); // it ends itself 60 s after the last call
  const session = (message) => call("env.call", { session: lease.session, call: message });
  try {
    for (let seed = 0; seed < EPISODES; seed++) {
      let reply = await session({ op: "reset", seed });
      const { instruction } = reply.observation;
      let total = 0;
      while (!reply.terminated && !reply.truncated) {
        const actions = decide(reply.observation, lease.environment.action);
        reply = await session({ op: "step", actions: tensor(actions) });
        total += reply.rewards.reduce((sum, reward) => sum + reward, 0);
      }
      console.log(JSON.stringify({ seed, instruction, steps: reply.steps, end: reply.end, return: total }));
    }
  } finally {
    await session({ op: "close" }).catch(() => {}); // a session that is gone needs none
  }
}

try {
  connection = await connect({
    servers: process.env.NEXUS_URL ?? "nats://127.0.0.1:4222",
    authenticator: credsAuthenticator(await readFile(process.env.NEXUS_CREDS)),
  });
  await play();
} catch (error) {
  console.error(error.message);
  process.exitCode = 2;
} finally {
  await connection?.close();
}
