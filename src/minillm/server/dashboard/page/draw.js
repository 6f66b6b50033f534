'use strict';
// Everything that is drawn on a canvas. Colours come from the style sheet, so a theme needs no code here.

const STATES = ['waiting', 'prefilling', 'decoding', 'swapped', 'preempted'];
const BLOCK_KINDS = ['free', 'cached', 'quarantined', 'held', 'shared'];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();

/** The colour that a request keeps everywhere; neighbours in order of arrival are far apart. 0: nobody's. */
function ownerColour(number) {
  if (!number) return css('cached');
  // Every 34th hue comes back (the golden angle): lightness tells those apart.
  const light = parseFloat(css('owner-light')) + [0, 11, -11][Math.floor(number / 8) % 3];
  return `hsl(${(number * 137.508) % 360} ${css('owner-sat')} ${light}%)`;
}

/** Size a canvas to its box, in device pixels; returns its context in CSS pixels. */
function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '11px system-ui, sans-serif';
  return { context, width, height };
}

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

/** The largest square size with which `count` cells fit the box. */
function cellSize(count, width, height) {
  let size = Math.max(1, Math.min(36, Math.floor(Math.sqrt((width * height) / Math.max(1, count)))));
  while (size > 1 && Math.floor(width / size) * Math.floor(height / size) < count) size -= 1;
  return size;
}

/** One square per block: filled in the owner's colour, with a core where several requests hold it. */
function drawBlocks(canvas, map) {
  const { context, width, height } = prepare(canvas);
  const owners = bytes(map.owners), states = bytes(map.states);
  const size = cellSize(states.length, width, height), columns = Math.max(1, Math.floor(width / size));
  const gap = size >= 5 ? 1 : 0;
  const fills = BLOCK_KINDS.map(css), colours = new Map();
  for (let i = 0; i < states.length; i += 1) {
    const x = (i % columns) * size, y = Math.floor(i / columns) * size;
    const kind = BLOCK_KINDS[states[i]];
    let fill = fills[states[i]];
    if (kind === 'held' || kind === 'shared') {
      if (!colours.has(owners[i])) colours.set(owners[i], ownerColour(owners[i]));
      fill = colours.get(owners[i]);
    }
    context.fillStyle = fill;
    context.fillRect(x, y, size - gap, size - gap);
    if (kind === 'shared') {
      const core = Math.max(1, Math.floor(size / 3)), inset = Math.floor((size - gap - core) / 2);
      context.fillStyle = fills[4];
      context.fillRect(x + inset, y + inset, core, core);
    }
  }
}

/** A bar as wide as the pool; each swapped-out request has its share of it, and never less than can be seen. */
function drawSwap(canvas, swap) {
  const { context, width, height } = prepare(canvas);
  context.fillStyle = css('free');
  context.fillRect(0, 0, width, height);
  let x = 0;
  for (const [colour, slots] of swap.owners) {
    const share = Math.max(5, (width * slots) / Math.max(1, swap.total));
    context.fillStyle = ownerColour(colour);
    context.fillRect(x, 0, Math.min(share, width - x) - 1, height);
    x = Math.min(width, x + share);
  }
}

function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= value);
}

/** Tokens of each whole second: output as a filled line, prefill as a thin one with its own scale. */
function drawRates(canvas, seconds) {
  const { context, width, height } = prepare(canvas);
  const span = 120, left = 40, right = 40, top = 16, bottom = 14;
  const output = new Array(span + 1).fill(0), prefill = new Array(span + 1).fill(0);
  for (const [ago, generated, computed] of seconds) {
    if (ago >= 1 && ago <= span) { output[ago] = generated; prefill[ago] = computed; }
  }
  const most = niceCeiling(Math.max(10, ...output)), mostPrefill = niceCeiling(Math.max(10, ...prefill));
  const x = (ago) => left + ((span - ago) / (span - 1)) * (width - left - right);
  const y = (value, scale) => height - bottom - (value / scale) * (height - top - bottom);
  context.strokeStyle = css('line');
  context.fillStyle = css('dim');
  context.lineWidth = 1;
  context.textBaseline = 'middle';
  for (const share of [0, 0.5, 1]) {
    const level = Math.round(y(share, 1)) + 0.5;
    context.beginPath(); context.moveTo(left, level); context.lineTo(width - right, level); context.stroke();
    context.textAlign = 'right'; context.fillText(compact(share * most), left - 5, level);
    context.textAlign = 'left'; context.fillText(compact(share * mostPrefill), width - right + 5, level);
  }
  context.textAlign = 'center';
  context.textBaseline = 'alphabetic';
  for (const ago of [120, 60, 1]) {
    context.textAlign = ago === 120 ? 'left' : ago === 1 ? 'right' : 'center';
    context.fillText(ago === 1 ? 'now' : `${ago} s ago`, x(ago), height - 2);
  }
  const line = (values, scale) => {
    context.beginPath();
    for (let ago = span; ago >= 1; ago -= 1) context.lineTo(x(ago), y(values[ago], scale));
  };
  line(output, most);
  context.lineTo(x(1), y(0, 1)); context.lineTo(x(span), y(0, 1)); context.closePath();
  context.fillStyle = css('area'); context.fill();
  line(prefill, mostPrefill); context.strokeStyle = css('second'); context.lineWidth = 1; context.stroke();
  line(output, most); context.strokeStyle = css('accent'); context.lineWidth = 1.8; context.stroke();
  context.textAlign = 'left'; context.fillStyle = css('accent'); context.fillText('output', left, 9);
  context.textAlign = 'right'; context.fillStyle = css('second'); context.fillText('prefill', width - right, 9);
  return { output, prefill };
}

const TIME_ROW = 15;

/** A row per request; returns which request is at which height. */
function drawTimeline(canvas, timelines, seconds, selected) {
  const { context, width, height } = prepare(canvas);
  const left = 150, bottom = 15;
  const rows = Math.max(1, Math.floor((height - bottom) / TIME_ROW));
  const shown = timelines.filter((row) => !row.finish_reason || row.spans.some((span) => span[2] < seconds)).slice(0, rows);
  const x = (ago) => left + (1 - Math.min(ago, seconds) / seconds) * (width - left - 2);
  const fills = Object.fromEntries(STATES.map((state) => [state, css(state)]));
  context.textBaseline = 'middle';
  context.strokeStyle = css('line');
  for (let tick = 0; tick <= 4; tick += 1) {
    const ago = (seconds * (4 - tick)) / 4, at = Math.round(x(ago)) - 0.5;
    context.beginPath(); context.moveTo(at, 0); context.lineTo(at, height - bottom); context.stroke();
    context.fillStyle = css('dim');
    context.textAlign = tick === 0 ? 'left' : tick === 4 ? 'right' : 'center';
    context.fillText(ago ? `${Math.round(ago)} s ago` : 'now', at, height - bottom / 2);
  }
  shown.forEach((row, index) => {
    const top = index * TIME_ROW;
    if (row.id === selected) {
      context.fillStyle = css('area');
      context.fillRect(0, top, width, TIME_ROW);
    }
    for (const [state, begin, end] of row.spans) {
      if (end > seconds) continue;
      context.fillStyle = fills[state] || css('dim');
      context.fillRect(x(begin), top + 3, Math.max(1.5, x(end) - x(begin)), TIME_ROW - 6);
    }
    context.fillStyle = row.colour ? ownerColour(row.colour) : css('line');
    context.fillRect(0, top + 4, 8, 8);
    context.fillStyle = row.finish_reason ? css('dim') : css('text');
    context.textAlign = 'left';
    const mark = row.finish_reason ? ` · ${row.finish_reason}` : '';
    context.fillText(clipText(context, row.id + mark, left - 22), 14, top + TIME_ROW / 2 + 1);
  });
  return shown.map((row) => row.id);
}

/** The middle goes: ends of ids tell requests apart. */
function clipText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let keep = Math.max(4, Math.floor((text.length * width) / context.measureText(text).width) - 1);
  const cut = (n) => `${text.slice(0, Math.ceil(n / 3))}…${text.slice(text.length - Math.floor((2 * n) / 3))}`;
  while (keep > 4 && context.measureText(cut(keep)).width > width) keep -= 1;
  return cut(keep);
}

const compact = (n) => (n >= 10000 ? `${Math.round(n / 1000)}k` : n >= 1000 ? `${(n / 1000).toFixed(1)}k` : String(Math.round(n)));
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : '–');
const duration = (s) => (s === null || s === undefined ? '–' : s < 0.9995 ? `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms` : s < 100 ? `${s.toFixed(2)} s` : `${Math.round(s)} s`);
const age = (s) => (s < 100 ? `${s.toFixed(1)} s` : s < 6000 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);
