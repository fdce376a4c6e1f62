/** A new element. Attributes named on… are listeners; children that are strings become text, whatever is in them. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

/** A number with so many digits behind the point, and a true minus. */
function number(x, digits = 3) {
  if (x === -Infinity) return "−∞";
  const text = x.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

const SPECIAL = new Set(["<bos>", "<eos>", "<unk>"]);

/** What stands on a token: its piece without the mark of the space before it. */
const word = (label) => (label.length > 1 && label.startsWith("▁") ? label.slice(1) : label);

/** Whether a piece continues the word before it. */
const joined = (label, index) => index > 0 && !label.startsWith("▁") && !SPECIAL.has(label);

/** The text of pieces. */
const spelled = (labels) =>
  labels.map((label) => (SPECIAL.has(label) ? ` ${label}` : label.replaceAll("▁", " "))).join("").trim();

/** Little-endian float32 numbers from base64. */
function floats(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

const decoded = new WeakMap();

/** The arrays of an attention sub-layer, decoded when it is first looked at. */
function arraysOf(attention) {
  if (!decoded.has(attention)) {
    const { heads: N, queries: T, keys: S, key_width: H, value_width: V } = attention;
    const [q, k, v, scores, weights, outputs] = ["q", "k", "v", "scores", "weights", "outputs"].map((name) =>
      floats(attention[name]),
    );
    const vector = (array, rows, width) => (n, row) => array.subarray((n * rows + row) * width, (n * rows + row + 1) * width);
    decoded.set(attention, {
      N, T, S, H, V,
      query: vector(q, T, H),
      key: vector(k, S, H),
      value: vector(v, S, V),
      scores: vector(scores, T, S),
      weights: vector(weights, T, S),
      output: vector(outputs, T, V),
      visible: (t, s) => attention.mask[t][s] === "1",
      relative: attention.relative && relativeArrays(attention.relative, H, V),
    });
  }
  return decoded.get(attention);
}

function relativeArrays({ keys, values, distances }, H, V) {
  const [a, b] = [floats(keys), floats(values)];
  return {
    key: (t, s) => a.subarray(distances[t][s] * H, (distances[t][s] + 1) * H),
    value: (t, s) => b.subarray(distances[t][s] * V, (distances[t][s] + 1) * V),
  };
}

const sum = (x, y) => x.map((value, index) => value + y[index]);

/** The places of the largest numbers, the largest first. */
const largest = (array, count) =>
  [...array.keys()].sort((i, j) => array[j] - array[i] || i - j).slice(0, count);

/** A choice of one: native radio buttons, which bring their own keys. */
function radios(parent, name, options, chosen, onChoose) {
  parent.replaceChildren(
    ...options.map(([value, text]) => {
      const input = make("input", { type: "radio", name, value, onchange: () => onChoose(value) });
      input.checked = value === chosen;
      return make("label", { class: "choice" }, input, make("span", {}, text));
    }),
  );
}

function options(select, labels, chosen) {
  select.replaceChildren(...labels.map((label, index) => make("option", { value: index }, label)));
  select.value = chosen;
}

/** Exactly one of the buttons can be reached by Tab; the arrow keys go on from it. */
function rove(buttons, current) {
  buttons.forEach((button, index) => button.setAttribute("tabindex", index === current ? "0" : "-1"));
}

function svg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
