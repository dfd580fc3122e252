// One answer: its text as it streams, and the counts that tell how it came about.

import { decimal, duration, percent } from './format.js';

const STATS = [
  ['speed', 'Tokens / second'],
  ['tokens', 'Tokens'],
  ['calls', 'Model calls'],
  ['perCall', 'Tokens / call'],
  ['acceptance', 'Guesses right'],
  ['first', 'First token'],
];

const STATES = { stop: 'finished', length: 'token limit reached', context: 'context full', aborted: 'stopped' };

const SVG = 'http://www.w3.org/2000/svg';
/** Height of the strip, in tokens. Rarer, taller bars stand out of it. */
const STRIP_HEIGHT = 7;

/** Width of the strip, in calls, while the answer is short. */
const STRIP_WIDTH = 64;

/**
 * One bar per model call, as high as the tokens it yielded: equal texts have equal areas, and fewer calls are narrower. The
 * width goes by the tokens, so that equal texts are drawn to the same scale, and doubles when they need it.
 */
class Strip {
  constructor(maxTokens) {
    this.maxTokens = maxTokens;
    this.tokens = 0;
    this.root = document.createElementNS(SVG, 'svg');
    this.root.setAttribute('class', 'strip');
    this.fit();
    this.root.setAttribute('preserveAspectRatio', 'none');
    this.root.setAttribute('aria-hidden', 'true'); // the counts say the same
  }

  fit() {
    let width = STRIP_WIDTH;
    while (width < this.tokens) width *= 2;
    this.root.setAttribute('viewBox', `0 0 ${Math.min(width, this.maxTokens)} ${STRIP_HEIGHT}`);
  }

  add(call, tokens, accepted) {
    this.tokens += tokens;
    this.fit();
    const bar = (from, height, name) => {
      if (height <= 0) return;
      const rect = document.createElementNS(SVG, 'rect');
      for (const [key, value] of Object.entries({ x: call - 1, width: 0.8, y: STRIP_HEIGHT - from - height, height, class: name })) rect.setAttribute(key, value);
      this.root.append(rect);
    };
    bar(0, tokens - accepted, 'chosen');
    bar(tokens - accepted, accepted, 'guessed');
  }
}

/** A panel in the page. Counts of calls are those after the prompt, so the token that the prompt's own pass emits is left out of their ratio. */
export class Panel {
  constructor(parent, title, maxTokens) {
    this.root = document.createElement('article');
    this.root.className = 'panel';
    const heading = document.createElement('h3');
    heading.textContent = title;
    this.state = document.createElement('span');
    this.state.className = 'state quiet';
    heading.append(this.state);

    const stats = document.createElement('dl');
    stats.className = 'stats';
    this.values = {};
    for (const [key, label] of STATS) {
      const cell = document.createElement('div');
      const term = document.createElement('dt');
      term.textContent = label;
      const value = document.createElement('dd');
      value.textContent = '–';
      cell.append(term, value);
      stats.append(cell);
      this.values[key] = value;
    }

    this.text = document.createElement('div');
    this.text.className = 'text';
    this.text.dir = 'auto';
    this.strip = new Strip(maxTokens);
    this.root.append(heading, stats, this.strip.root, this.text);
    this.root.setAttribute('aria-label', `Answer: ${title}`);
    parent.append(this.root);
    this.setState('waiting');
  }

  /** Call when the generation starts. */
  start() {
    this.started = performance.now();
    this.counts = { tokens: 0, decoded: 0, calls: 0, drafted: 0, accepted: 0 };
    this.text.classList.add('caret');
    this.root.setAttribute('aria-busy', 'true');
    this.setState('reading the prompt');
  }

  /** Adds what one call brought. */
  add(part) {
    const { counts } = this;
    if (part.tokens.length > 0 && this.first === undefined) {
      this.first = performance.now();
      this.setState('writing');
    }
    counts.tokens += part.tokens.length;
    if (part.calls > 0) counts.decoded += part.tokens.length;
    if (part.calls > counts.calls) this.strip.add(part.calls, part.tokens.length, Math.min(part.accepted, part.tokens.length));
    counts.calls = part.calls;
    counts.drafted += part.drafted;
    counts.accepted += part.accepted;
    for (const piece of part.pieces) this.append(piece);
    this.show(counts, performance.now() - (this.first ?? this.started));
  }

  append({ text, accepted }) {
    // A mark begins at the word, not at the space before it.
    const space = accepted && !(this.text.lastChild instanceof HTMLElement) ? text.length - text.trimStart().length : 0;
    if (space > 0) {
      this.append({ text: text.slice(0, space), accepted: false });
      text = text.slice(space);
    }
    if (text === '') return;
    const last = this.text.lastChild;
    const marked = last instanceof HTMLElement;
    if (last && marked === accepted) {
      (marked ? last.firstChild : last).appendData(text);
    } else if (accepted) {
      const mark = document.createElement('mark');
      mark.className = 'accepted';
      mark.append(text);
      this.text.append(mark);
    } else {
      this.text.append(document.createTextNode(text));
    }
  }

  show({ tokens, decoded, calls, drafted, accepted }, ms) {
    const { values } = this;
    values.tokens.textContent = String(tokens);
    values.calls.textContent = String(calls);
    values.perCall.textContent = calls > 0 ? decimal(decoded / calls, 2) : '–';
    values.acceptance.textContent = percent(accepted, drafted);
    values.speed.textContent = decoded > 0 && ms > 0 ? decimal((1000 * decoded) / ms) : '–';
    values.first.textContent = this.first === undefined ? '–' : duration(this.first - this.started);
  }

  /** The final counts; `result` is that of the generation. */
  finish(result) {
    this.show({ ...this.counts, calls: result.calls }, result.timings.decode);
    this.values.perCall.textContent = result.calls > 0 ? decimal(result.tokensPerCall, 2) : '–';
    this.values.first.textContent = duration(result.timings.firstToken);
    this.end(STATES[result.finishReason] ?? result.finishReason);
  }

  end(state) {
    this.text.classList.remove('caret');
    this.root.removeAttribute('aria-busy');
    this.setState(state);
  }

  setState(state) {
    this.state.textContent = state;
  }
}
