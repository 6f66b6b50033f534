// The page's state, and what brings a frame onto it. Everything that comes from the server is set as text.

const page = { hello: null, frame: null, selected: null, story: null, timelineIds: [], drawing: 0, lastNews: 0, retry: 1000 };

const setText = (id, text) => {
  const target = $(id);
  if (target.textContent !== String(text)) target.textContent = text;
};

function setStatus(kind, text) {
  $('status').dataset.kind = kind;
  setText('status', text);
}

// -- tables: rows are kept and rewritten in place, so that focus and scrolling stay where they are ------------------

function fillTable(body, rows, cells, emptyText) {
  while (body.rows.length > Math.max(rows.length, 1)) body.deleteRow(-1);
  if (!rows.length) {
    if (body.rows[0]?.dataset.id !== undefined || !body.rows.length) {
      const cell = element('td', 'empty', emptyText);
      cell.colSpan = cells.length;
      const row = element('tr');
      row.append(cell);
      body.replaceChildren(row);
    }
    return;
  }
  if (body.rows[0] && body.rows[0].dataset.id === undefined) body.replaceChildren();
  rows.forEach((data, index) => {
    let row = body.rows[index];
    if (!row) {
      row = body.insertRow();
      cells.forEach((cell) => row.append(cell.make()));
    }
    row.dataset.id = data.id;
    row.setAttribute('aria-selected', String(data.id === page.selected));
    cells.forEach((cell, column) => cell.fill(row.cells[column], data));
  });
}

const textCell = (className, value) => ({
  make: () => element('td', className),
  fill: (cell, data) => {
    const text = String(value(data));
    if (cell.textContent !== text) cell.textContent = text;
  },
});

const idCell = {
  make: () => {
    const cell = element('td'), button = element('button', 'id');
    button.type = 'button';
    button.append(element('span', 'swatch'), element('span'));
    button.addEventListener('click', () => select(cell.parentElement.dataset.id));
    cell.append(button);
    return cell;
  },
  fill: (cell, data) => {
    const [swatch, label] = cell.firstChild.children;
    const shown = data.id.length > 26 ? `${data.id.slice(0, 10)}…${data.id.slice(-12)}` : data.id;
    if (label.textContent !== shown) label.textContent = shown;
    cell.firstChild.title = data.id;
    swatch.style.background = ownerColour(data.colour);
  },
};

const stateCell = {
  make: () => {
    const cell = element('td');
    cell.append(element('span', 'state'));
    return cell;
  },
  fill: (cell, data) => {
    cell.firstChild.dataset.state = data.state;
    if (cell.firstChild.textContent !== data.state) cell.firstChild.textContent = data.state;
  },
};

const BATCH = [
  idCell, stateCell, textCell('num', (r) => r.priority),
  textCell('num', (r) => (r.cached_tokens ? `${r.prompt_tokens} (${r.cached_tokens} cached)` : r.prompt_tokens)),
  textCell('num', (r) => (r.max_tokens === null ? r.output_tokens : `${r.output_tokens} / ${r.max_tokens}`)),
  textCell('num', (r) => r.blocks), textCell('num', (r) => r.preemptions || ''), textCell('num', (r) => age(r.age)),
];
const QUEUE = [
  idCell, stateCell, textCell('num', (r) => r.priority), textCell('num', (r) => age(r.age)),
  textCell('why', (r) => (r.swap_slots ? `${r.reason}; ${r.swap_slots} swap slots` : r.reason)),
];

// -- a frame ----------------------------------------------------------------------------------------------------------

function showHello(hello) {
  page.hello = hello;
  const facts = [
    hello.model, `${hello.device} · ${hello.dtype}`, `${hello.num_blocks} blocks of ${hello.block_size}`,
    `context ${hello.max_model_len}${hello.max_model_len_reduced ? ' (reduced to the pool)' : ''}`,
    hello.scheduler === 'static' ? 'static batching' : `queue ${hello.queue_policy} · victim ${hello.victim_policy} · ${hello.preemption_mode}`,
  ];
  $('facts').replaceChildren(...facts.map((fact) => element('li', '', fact)));
}

function showTiles(frame, rates) {
  const { stats, hidden } = frame, blocks = stats.blocks;
  setText('t-running', stats.running);
  setText('t-running-more', `of ${page.hello?.max_num_seqs ?? '–'}, ${stats.prefilling} prefilling`);
  setText('t-waiting', stats.waiting);
  setText('t-waiting-more', frame.queue.length ? `first ${frame.queue[0].reason.split('; ').pop()}` : 'queue is empty');
  setText('t-swapped', stats.swapped);
  setText('t-swapped-more', `${frame.swap.used} of ${frame.swap.total} slots`);
  setText('t-rate', compact(rates.output[1]));
  setText('t-rate-more', `prefill ${compact(rates.prefill[1])}/s`);
  setText('t-kv', share(blocks.held, blocks.total));
  setText('t-kv-more', `${share(Math.round(stats.fragmentation * 1000), 1000)} of it unused slots`);
  setText('t-hits', stats.hit_rate === null ? '–' : share(Math.round(stats.hit_rate * 1000), 1000));
  setText('t-hits-more', 'of blocks looked up');
  setText('t-preempt', compact(stats.preemptions.swap + stats.preemptions.recompute));
  setText('t-preempt-more', `${stats.preemptions.swap} swap, ${stats.preemptions.recompute} recompute`);
  setText('t-ended', compact(stats.ended.finished));
  setText('t-ended-more', `${stats.ended.cancelled} cancelled, ${stats.ended.failed} failed`);
  setText('batch-note', hidden.running > 0 ? `first ${frame.running.length} of ${stats.running}` : '');
  setText('queue-note', hidden.queue > 0 ? `first ${frame.queue.length} of ${stats.waiting + stats.swapped}` : '');
}

function showLatency(latency) {
  for (const name of ['ttft', 'tpot']) {
    const values = latency[name];
    const texts = [duration(values.p50), duration(values.p90), duration(values.p99), values.count];
    [...$(`l-${name}`).querySelectorAll('td')].forEach((cell, i) => { cell.textContent = texts[i]; });
  }
}

function showBlocks(frame) {
  const blocks = frame.stats.blocks, map = frame.blocks;
  drawBlocks($('blocks'), map);
  for (const kind of ['free', 'cached', 'held', 'shared', 'quarantined']) setText(`b-${kind}`, blocks[kind]);
  setText('blocks-note', map.stride > 1 ? `every ${map.stride}th of ${map.total}` : `${map.total}, one square each`);
  $('blocks').setAttribute('aria-label', `Map of ${blocks.total} KV blocks: ${blocks.free} free, ${blocks.cached} cached, ` +
    `${blocks.held} held, ${blocks.shared} of them shared, ${blocks.quarantined} quarantined`);
  drawSwap($('swap'), frame.swap);
  const moved = frame.stats.swapped_blocks;
  setText('swap-note', frame.swap.total
    ? `${frame.swap.used} of ${frame.swap.total} slots; ${compact(moved.out)} blocks out, ${compact(moved.in)} back in all`
    : 'swapping is off');
  $('swap').setAttribute('aria-label', `Swap pool: ${frame.swap.used} of ${frame.swap.total} slots used by ${frame.swap.owners.length} requests`);
}

/** Draw the latest frame at the browser's next chance: a slow machine skips frames, a hidden tab draws none. */
function show(frame) {
  page.frame = frame;
  page.lastNews = Date.now();
  if (!page.drawing) page.drawing = requestAnimationFrame(draw);
}

function draw() {
  const frame = page.frame;
  page.drawing = 0;
  setStatus(frame.alive ? 'live' : 'dead', frame.alive ? `live · step ${frame.stats.steps.toLocaleString('en')}` : 'the engine is dead');
  const rates = drawRates($('rates'), frame.throughput);
  $('rates').setAttribute('aria-label', `Last second: ${rates.output[1]} output tokens, ${rates.prefill[1]} prefill tokens`);
  showTiles(frame, rates);
  showLatency(frame.latency);
  showBlocks(frame);
  fillTable($('batch'), frame.running, BATCH, 'nothing is running');
  fillTable($('queue'), frame.queue, QUEUE, 'nothing is waiting');
  page.timelineIds = drawTimeline($('time'), frame.timelines, Number($('window').value), page.selected);
  $('time').setAttribute('aria-label', `Timeline of ${page.timelineIds.length} requests: ${page.timelineIds.join(', ')}`);
}

// -- one request --------------------------------------------------------------------------------------------------------

function select(id) {
  page.ended = false;
  page.selected = id;
  explain();
}

async function explain() {
  const id = page.selected;
  if (!id) return;
  let story;
  try {
    const response = await fetch(`v1/requests/${encodeURIComponent(id)}/explain`, { headers: headers() });
    story = response.ok ? await response.json() : { story: await errorText(response) };
  } catch {
    return;
  }
  if (page.selected !== id) return;
  setText('story-id', id);
  const parts = [element('p', '', story.story.split('\n')[0])];
  if (story.prompt !== undefined) parts.push(element('p', 'why', `prompt: ${story.prompt}`), element('p', 'why', `output: ${story.output}`));
  const list = element('ol');
  for (const entry of (story.timeline || []).slice().reverse()) {
    const item = element('li');
    item.append(element('span', '', `+${entry.seconds.toFixed(3)} s`), element('span', '', entry.step === null ? '' : `step ${entry.step}`), element('span', '', entry.reason));
    list.append(item);
  }
  $('story').replaceChildren(...parts, list);
  page.story = story;
  page.ended = Boolean(story.finish_reason) || !story.state;
}

setInterval(() => { if (page.selected && !page.ended && !document.hidden) explain(); }, 1000);

$('time').addEventListener('click', (event) => {
  const id = page.timelineIds[Math.floor(event.offsetY / TIME_ROW)];
  if (id) select(id);
});

// -- key, theme, connection -----------------------------------------------------------------------------------------------

function askForKey(why) {
  if (why) setText('key-why', `${why} It is sent as a bearer token to this server, and kept in this tab alone.`);
  if (!$('key-dialog').open) $('key-dialog').showModal();
}

$('key').addEventListener('click', () => askForKey(''));
$('key-cancel').addEventListener('click', () => $('key-dialog').close());
$('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  const key = $('key-value').value.trim();
  if (key) sessionStorage.setItem('minillm-key', key);
  else sessionStorage.removeItem('minillm-key');
  $('key-value').value = '';
  $('key-dialog').close();
  page.retry = 200;
  page.wake?.();
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText('theme', theme === 'dark' ? 'Light' : 'Dark');
  if (page.frame) show(page.frame);
}

const prefersDark = matchMedia('(prefers-color-scheme: dark)');
const systemTheme = () => (prefersDark.matches ? 'dark' : 'light');
setTheme(sessionStorage.getItem('minillm-theme') || systemTheme());
prefersDark.addEventListener('change', () => { if (!sessionStorage.getItem('minillm-theme')) setTheme(systemTheme()); });
$('theme').addEventListener('click', () => {
  const theme = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
  sessionStorage.setItem('minillm-theme', theme);
  setTheme(theme);
});
window.addEventListener('resize', () => { if (page.frame) show(page.frame); });
$('window').addEventListener('change', () => { if (page.frame) show(page.frame); });

const pause = (ms) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  page.wake = () => { clearTimeout(timer); resolve(); };
});

async function follow() {
  const response = await fetch('dashboard/events', { headers: headers(), cache: 'no-store' });
  if (response.status === 401) {
    askForKey('The server wants a key.');
    throw new Error('a key is needed');
  }
  if (!response.ok) throw new Error(await errorText(response));
  page.retry = 1000;
  for await (const event of serverEvents(response)) {
    if (event.name === 'hello') showHello(JSON.parse(event.data));
    else if (event.name === 'frame') show(JSON.parse(event.data));
  }
}

async function followForEver() {
  for (;;) {
    let problem = 'the server ended the stream';
    try {
      await follow();
    } catch (error) {
      problem = error.message;
    }
    setStatus('wait', `not connected: ${problem}`);
    await pause(page.retry);
    page.retry = Math.min(page.retry * 2, 15000);
  }
}

setInterval(() => {
  if ($('status').dataset.kind === 'live' && Date.now() - page.lastNews > 5000) setStatus('wait', 'no news for 5 s');
}, 1000);
followForEver();
