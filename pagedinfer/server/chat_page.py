"""/chat: a page to talk with the model, with nothing from anywhere else."""

from __future__ import annotations

CHAT_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pagedinfer: chat</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 0 auto; padding: 1rem; }
#messages > div { white-space: pre-wrap; overflow-wrap: anywhere; padding: .5rem .75rem; margin: .5rem 0;
  border-radius: .5rem; background: #8882; }
#messages > .user { margin-left: 4rem; background: #48f3; }
#messages > .error { background: #f443; }
.reasoning { opacity: .6; font-size: .9em; }
form { display: flex; gap: .5rem; position: sticky; bottom: 0; padding: .5rem 0; background: Canvas; }
textarea { flex: 1; font: inherit; padding: .5rem; }
:root { color-scheme: light dark; }
</style>
</head>
<body>
<h1>pagedinfer</h1>
<div id="messages" role="log" aria-live="polite"></div>
<form>
<textarea id="text" rows="2" autofocus aria-label="Message" placeholder="Message"></textarea>
<button id="send">Send</button>
<button id="stop" type="button" hidden>Stop</button>
<button id="fresh" type="button">New chat</button>
</form>
<script>
const log = document.getElementById("messages"), text = document.getElementById("text");
const send = document.getElementById("send"), stop = document.getElementById("stop");
let messages = [], running = null;
function add(kind, content) {
  const box = document.createElement("div");
  box.className = kind;
  box.textContent = content;
  log.append(box);
  box.scrollIntoView();
  return box;
}
function busy(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
}
async function* events(body, signal) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body), signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (held + value).split("\\n\\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event.choices[0].delta;
    }
  }
}
async function ask() {
  const content = text.value.trim();
  if (!content || running) return;
  text.value = "";
  add("user", content);
  messages.push({role: "user", content});
  const box = add("assistant", ""), reasoning = document.createElement("span");
  reasoning.className = "reasoning";
  const answer = document.createElement("span");
  box.append(reasoning, answer);
  busy(new AbortController());
  try {
    for await (const delta of events({messages, stream: true}, running.signal)) {
      reasoning.textContent += delta.reasoning_content || "";
      answer.textContent += delta.content || "";
    }
  } catch (error) {
    if (error.name !== "AbortError") add("error", error.message);
  }
  messages.push({role: "assistant", content: answer.textContent});
  busy(null);
}
document.querySelector("form").addEventListener("submit", event => { event.preventDefault(); ask(); });
text.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
stop.addEventListener("click", () => running && running.abort());
document.getElementById("fresh").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  log.replaceChildren();
});
</script>
</body>
</html>
"""
