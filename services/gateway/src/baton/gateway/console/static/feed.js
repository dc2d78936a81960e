// The feed: server-sent events, read through fetch because a key travels in a header.

const SILENCE_MS = 10000;
const FIRST_PAUSE_MS = 500;
const MAX_PAUSE_MS = 8000;

export class KeyNeeded extends Error {}

/** Calls `on.event(kind, object)` for each event and `on.state(word)`: "connecting", "live", "lost". Ends with KeyNeeded where a key is asked for. */
export async function follow(key, on) {
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    try {
      await once(key, on, () => { pause = FIRST_PAUSE_MS; });
    } catch (error) {
      if (error instanceof KeyNeeded) throw error;
    }
    on.state("lost");
    await new Promise((resolve) => setTimeout(resolve, pause * (0.5 + Math.random() / 2)));
    pause = Math.min(2 * pause, MAX_PAUSE_MS);
    on.state("connecting");
  }
}

async function once(key, on, begun) {
  const control = new AbortController();
  let silence = setTimeout(() => control.abort(), SILENCE_MS);
  try {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const answer = await fetch("feed", { headers, signal: control.signal, cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) throw new KeyNeeded((await answer.json()).error.message);
    if (!answer.ok) throw new Error(`the feed answered ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(silence);
      silence = setTimeout(() => control.abort(), SILENCE_MS);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const { kind, data } = parse(part);
        on.event(kind, JSON.parse(data));
        if (kind === "snapshot") {
          begun();
          on.state("live");
        }
      }
    }
  } finally {
    clearTimeout(silence);
    control.abort();
  }
}

function parse(text) {
  const event = { kind: "message", data: "" };
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) event.kind = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}
