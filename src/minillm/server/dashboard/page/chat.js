// The chat box: an ordinary streaming client of /v1/chat/completions. What the model says is text, never markup.

const $ = (id) => document.getElementById(id);
const conversation = [];
let speaking = null;

function headers() {
  const key = sessionStorage.getItem('minillm-key');
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** The `data:` payloads of a server-sent stream, with the name of their event. */
async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end;
    while ((end = buffer.indexOf('\n\n')) >= 0) {
      const event = { name: 'message', data: '' };
      for (const line of buffer.slice(0, end).split('\n')) {
        if (line.startsWith('event:')) event.name = line.slice(6).trim();
        if (line.startsWith('data:')) event.data += line.slice(5).trimStart();
      }
      buffer = buffer.slice(end + 2);
      if (event.data) yield event;
    }
  }
}

async function errorText(response) {
  try {
    const body = await response.json();
    return body.error?.message || `HTTP ${response.status}`;
  } catch {
    return `HTTP ${response.status}`;
  }
}

function say(kind, text) {
  const log = $('chat-log'), bubble = element('div', `msg ${kind}`, text);
  log.append(bubble);
  log.scrollTop = log.scrollHeight;
  return bubble;
}

async function chat(text) {
  const asked = { role: 'user', content: text };
  conversation.push(asked);
  say('user', text);
  const bubble = say('assistant', ''), log = $('chat-log');
  speaking = new AbortController();
  $('chat-send').hidden = true;
  $('chat-stop').hidden = false;
  const begin = performance.now();
  let first = 0, tokens = 0, id = '', answer = '', problem = '';
  try {
    const response = await fetch('v1/chat/completions', {
      method: 'POST',
      headers: { ...headers(), 'Content-Type': 'application/json' },
      body: JSON.stringify({
        model: page.hello?.model,
        messages: conversation,
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: Number($('chat-max').value) || 128,
        priority: Number($('chat-priority').value) || 0,
      }),
      signal: speaking.signal,
    });
    if (response.status === 401) askForKey('The server wants a key.');
    if (!response.ok) throw new Error(await errorText(response));
    for await (const event of serverEvents(response)) {
      if (event.data === '[DONE]') break;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.id && !id) { id = chunk.id; select(id); }
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      const piece = chunk.choices?.[0]?.delta?.content;
      if (!piece) continue;
      first = first || performance.now();
      answer += piece;
      const below = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      bubble.textContent = answer;
      if (below) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    problem = error.name === 'AbortError' ? 'stopped' : error.message;
  }
  const isKept = conversation.includes(asked);  // it may have been cleared meanwhile
  if (isKept && answer) conversation.push({ role: 'assistant', content: answer });
  else if (isKept) conversation.pop();
  if (!answer) { bubble.textContent = problem || '(no text)'; bubble.classList.toggle('error', Boolean(problem)); }
  const meta = element('div', 'meta');
  const parts = [];
  if (first) parts.push(`first token ${duration((first - begin) / 1000)}`);
  if (tokens > 1) parts.push(`${tokens} tokens, ${((tokens - 1) / ((performance.now() - first) / 1000)).toFixed(1)}/s`);
  if (answer && problem) parts.push(problem);
  meta.textContent = parts.join(' · ');
  if (isKept) log.append(meta);
  log.scrollTop = log.scrollHeight;
  speaking = null;
  $('chat-send').hidden = false;
  $('chat-stop').hidden = true;
}

$('chat-form').addEventListener('submit', (event) => {
  event.preventDefault();
  const text = $('chat-text').value.trim();
  if (!text || speaking) return;
  $('chat-text').value = '';
  chat(text);
});
$('chat-text').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $('chat-form').requestSubmit();
  }
});
$('chat-stop').addEventListener('click', () => speaking?.abort());
$('chat-clear').addEventListener('click', () => {
  speaking?.abort();
  conversation.length = 0;
  $('chat-log').replaceChildren();
});
