// The chat page: a conversation with the model behind this server, over OpenAI's protocol.
// Text is only ever set as text, so nothing that a model writes becomes part of the page.

const byId = (id) => document.getElementById(id);
const log = byId("log");
const text = byId("text");

let model = "";
let history = []; // messages of finished turns
let pictures = []; // data URLs to send with the next message
let running = null; // AbortController of the reply being written
let failed = null; // a turn that the server refused, with what shows it

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function article(kind, title) {
  const body = element("div", { className: "body" });
  const node = element("article", { className: kind }, element("h2", { textContent: title }), body);
  log.append(node);
  return { node, body };
}

function headers() {
  const key = byId("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// --- what is asked

function request(messages) {
  const system = byId("system").value.trim();
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    reasoning_effort: byId("effort").value,
    stream: true,
    stream_options: { include_usage: true },
  };
  const tools = byId("tools").value.trim();
  if (tools) body.tools = parsed(tools);
  if (byId("temperature").value) body.temperature = Number(byId("temperature").value);
  if (byId("limit").value) body.max_tokens = Number(byId("limit").value);
  return body;
}

function parsed(tools) {
  try {
    return JSON.parse(tools);
  } catch (error) {
    byId("settings").open = true;
    throw new Error(`The tools in the settings are not JSON: ${error.message}`);
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function problem(response) {
  try {
    const { error } = await response.json();
    return `${error.message} (${response.status})`;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// --- one reply

class Reply {
  constructor() {
    ({ node: this.node, body: this.body } = article("assistant", model || "assistant"));
    this.message = { role: "assistant", content: "" };
    this.began = performance.now();
    this.first = null;
    this.usage = null;
    this.reason = null;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { reasoning_content: reasoning, content, tool_calls: calls } = choice.delta;
    if (reasoning || content || calls) this.first ??= performance.now();
    if (reasoning) this.think(reasoning);
    if (content) this.say(content);
    for (const call of calls ?? []) this.call(call);
    this.reason = choice.finish_reason ?? this.reason;
  }

  think(piece) {
    if (!this.thinking) {
      this.thinking = element("div", { className: "text" });
      this.title = element("summary", { textContent: "Thinking…" });
      this.body.prepend(element("details", { className: "thinking" }, this.title, this.thinking));
    }
    this.message.reasoning_content = (this.message.reasoning_content ?? "") + piece;
    this.thinking.append(piece);
  }

  say(piece) {
    if (!this.content) {
      this.content = element("div", { className: "text" });
      this.body.append(this.content);
    }
    this.message.content += piece;
    this.content.append(piece);
  }

  // A call comes piece by piece: its id and name first, then its arguments.
  call({ index, id, function: { name, arguments: piece } }) {
    const calls = (this.message.tool_calls ??= []);
    if (id) {
      calls.push({ id, type: "function", function: { name, arguments: "" } });
      const result = element("textarea", { rows: 2, ariaLabel: `Result of ${name}`, placeholder: "Result" });
      result.dataset.call = id;
      this.body.append(
        element("div", { className: "call" },
          element("div", {}, "Tool call ", element("code", { textContent: name })), element("pre"), result));
    }
    calls[index].function.arguments += piece;
    this.body.querySelectorAll(".call pre")[index].append(piece);
  }

  layOutCalls() {
    for (const pre of this.body.querySelectorAll(".call pre")) {
      try {
        pre.textContent = JSON.stringify(JSON.parse(pre.textContent), null, 2);
      } catch {
        // the model's text is shown as it is
      }
    }
  }

  get isEmpty() {
    return !this.message.content && !this.message.reasoning_content && !this.message.tool_calls;
  }

  close(note) {
    const spent = this.usage?.completion_tokens_details?.reasoning_tokens;
    this.layOutCalls();
    if (this.title) this.title.textContent = spent ? `Thought for ${spent} tokens` : "Thought";
    const words = note ? [note] : [];
    if (this.reason === "length") words.push("cut off at the limit of tokens");
    if (this.usage) words.push(...this.numbers());
    if (this.isEmpty && !note) words.unshift("an empty reply");
    this.body.append(element("div", { className: "stats", textContent: words.join(" · ") }));
    if (this.message.tool_calls) this.askForResults();
  }

  numbers() {
    const { prompt_tokens: prompt, completion_tokens: written, prompt_tokens_details: details } = this.usage;
    const seconds = (performance.now() - (this.first ?? this.began)) / 1000;
    const numbers = [`${written} tokens`];
    if (written > 1) numbers.push(`${((written - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.first) numbers.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    numbers.push(`${details.cached_tokens} of ${prompt} prompt tokens from the cache`);
    return numbers;
  }

  askForResults() {
    const results = [...this.body.querySelectorAll("textarea[data-call]")];
    const button = element("button", { type: "button", textContent: results.length > 1 ? "Send results" : "Send result" });
    button.addEventListener("click", () => {
      if (running) return;
      const turn = results.map((box) => ({ role: "tool", tool_call_id: box.dataset.call, content: box.value }));
      button.remove();
      for (const box of results) box.readOnly = true;
      ask(turn, []);
    });
    this.body.append(button);
    results[0].focus();
  }
}

// --- turns

async function ask(turn, nodes) {
  failed = null;
  running = new AbortController();
  setRunning(true);
  const conversation = history;
  let reply = null;
  let error = null;
  try {
    const body = request([...history, ...turn]);
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (response.status === 401) byId("settings").open = true;
    if (!response.ok) throw new Error(await problem(response));
    reply = new Reply();
    for await (const chunk of events(response)) {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      reply.take(chunk);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
    if (!reply.reason) throw new Error("The connection ended before the reply did.");
  } catch (caught) {
    error = caught;
  }
  running = null;
  setRunning(false);
  if (conversation !== history) return; // a new one was begun meanwhile
  const wasStopped = error?.name === "AbortError";
  if (reply && (!error || (wasStopped && !reply.isEmpty))) {
    reply.close(wasStopped ? "stopped" : "");
    history.push(...turn, reply.message);
  } else {
    reply?.node.remove();
    if (wasStopped) giveBack(turn, nodes);
    else showError(error, turn, nodes);
  }
  log.scrollTop = log.scrollHeight;
  if (!document.activeElement?.dataset.call) text.focus();
}

function showError(error, turn, nodes) {
  const box = element("div", { className: "error", role: "alert" }, error.message);
  const again = element("button", { type: "button", textContent: "Try again" });
  again.addEventListener("click", () => { if (!running) { box.remove(); ask(turn, nodes); } });
  box.append(element("br"), again);
  if (turn[0].role === "user") {
    const edit = element("button", { type: "button", textContent: "Edit message" });
    edit.addEventListener("click", () => { box.remove(); giveBack(turn, nodes); text.focus(); });
    box.append(edit);
  }
  log.append(box);
  failed = { nodes: [...nodes, box], isUser: turn[0].role === "user" };
}

// Back into the composer, as if it had not been sent.
function giveBack(turn, nodes) {
  failed = null;
  if (turn[0].role !== "user") return;
  for (const node of nodes) node.remove();
  const parts = [turn[0].content].flat();
  text.value = parts.map((part) => part.text ?? (typeof part === "string" ? part : "")).join("");
  pictures = parts.filter((part) => part.image_url).map((part) => part.image_url.url);
  showPictures();
}

function send() {
  const words = text.value.trim();
  if (running || (!words && !pictures.length)) return;
  if (failed) for (const node of failed.isUser ? failed.nodes : failed.nodes.slice(-1)) node.remove();
  const { node, body } = article("user", "You");
  for (const url of pictures) body.append(element("img", { src: url, alt: "picture you sent" }));
  body.append(element("div", { className: "text", textContent: words }));
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = parts.length ? [...parts, ...(words ? [{ type: "text", text: words }] : [])] : words;
  text.value = "";
  pictures = [];
  showPictures();
  ask([{ role: "user", content }], [node]);
}

function setRunning(isRunning) {
  byId("stop").hidden = !isRunning;
  byId("send").disabled = isRunning;
  byId("status").textContent = isRunning ? "Writing…" : "";
}

// --- pictures

function addPictures(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.addEventListener("load", () => { pictures.push(reader.result); showPictures(); });
    reader.readAsDataURL(file);
  }
}

function showPictures() {
  byId("pictures").replaceChildren(...pictures.map((url, place) => {
    const remove = element("button", { type: "button", textContent: "Remove" });
    remove.addEventListener("click", () => { pictures.splice(place, 1); showPictures(); text.focus(); });
    return element("li", {}, element("img", { src: url, alt: `picture ${place + 1} to send` }), remove);
  }));
}

// --- start

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("stop").addEventListener("click", () => running?.abort());
byId("file").addEventListener("change", (event) => { addPictures(event.target.files); event.target.value = ""; });
text.addEventListener("paste", (event) => addPictures(event.clipboardData.files));
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
byId("new").addEventListener("click", () => {
  running?.abort();
  history = [];
  failed = null;
  log.replaceChildren();
  text.focus();
});

async function start() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    model = (await response.json()).data[0].id;
    byId("model").textContent = model;
    document.title = model;
  } catch {
    byId("status").textContent = "The server does not answer.";
  }
}

start();
