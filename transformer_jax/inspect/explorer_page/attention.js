const KINDS = {
  encoder: { name: "Encoder, self", rows: ["source"], columns: ["source"] },
  decoder: { name: "Decoder, self", rows: ["target", "read"], columns: ["target", "read"] },
  cross: { name: "Decoder to encoder", rows: ["target", "written"], columns: ["source"] },
};
const ROLES = {
  encoder: ["attends", "is attended to"],
  decoder: ["attends: what the decoder reads", "is attended to"],
  cross: ["attends: what the decoder writes", "is attended to: the source"],
};
const COLOURS = 8; // of heads; more heads begin anew, and their numbers stand beside them
const FEW = 24; // tokens for which lines are the clearer picture

const sentence = () => page.sentences[state.sentence];
const attention = () => arraysOf(sentence().attention[state.kind][state.layer]);
const side = (which) => KINDS[state.kind][which === "query" ? "rows" : "columns"];
const labelsOf = (which) => sentence().tokens[side(which).at(-1)];
const placeOf = (which) => state.places[side(which)[0]];
const isSelf = () => side("query")[0] === side("key")[0];
const headColour = (head) => `var(--head-${head % COLOURS})`;
const chosenHeads = () => [...state.heads].filter((head) => head < attention().N).sort((a, b) => a - b);

/** What is looked at: the token under the pointer, or else the chosen one. */
const looked = () => state.hover ?? { side: state.side, place: placeOf(state.side) };

/** The weights by head of what a token attends to (as a query) or of what attends to it (as a key). */
function weightsOf(which, place) {
  const { N, T, weights } = attention();
  return Array.from({ length: N }, (_, head) =>
    which === "query"
      ? weights(head, place)
      : Float32Array.from({ length: T }, (_, t) => weights(head, t)[place]),
  );
}

function drawControls() {
  const kinds = Object.entries(KINDS).filter(([kind]) => sentence().attention[kind].length);
  radios(byId("kinds"), "kind", kinds.map(([kind, { name }]) => [kind, name]), state.kind, (kind) => {
    const layers = sentence().attention[kind].length;
    change({ kind, layer: Math.min(state.layer, layers - 1), side: "query", hover: null, key: null });
  });
  const layers = sentence().attention[state.kind].map((_, layer) => [layer, String(layer)]);
  radios(byId("layers"), "layer", layers, state.layer, (layer) => change({ layer, key: null }));
  const views = [["lines", "Lines"], ["text", "Text"]];
  radios(byId("views"), "view", views, state.view, (view) => change({ view }));
  byId("heads").replaceChildren(...Array.from({ length: attention().N }, (_, head) => headChoice(head)));
  drawThumbnails();
}

function headChoice(head) {
  const input = make("input", { type: "checkbox", name: "head", value: head, onchange: () => toggleHead(head, input) });
  input.checked = state.heads.has(head);
  const canvas = make("canvas", { "aria-hidden": "true" });
  const label = make("label", { class: "choice head" }, input, canvas, make("span", {}, `Head ${head}`));
  label.style.setProperty("--colour", headColour(head));
  return label;
}

/** At least one head stays chosen. */
function toggleHead(head, input) {
  if (input.checked) state.heads.add(head);
  else if (chosenHeads().length > 1) state.heads.delete(head);
  else input.checked = true;
  drawAttention();
}

/** The whole matrix of each head, a pixel for a weight. */
function drawThumbnails() {
  const { T, S, weights } = attention();
  byId("heads").querySelectorAll("canvas").forEach((canvas, head) => {
    [canvas.width, canvas.height] = [S, T];
    const context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(canvas).color;
    for (let t = 0; t < T; t++) {
      weights(head, t).forEach((weight, s) => {
        context.globalAlpha = Math.sqrt(Math.min(1, weight)); // small weights can be seen
        context.fillRect(s, t, 1, 1);
      });
    }
  });
}

/** Both texts with their tokens as buttons. */
function drawAttention() {
  const focused = document.activeElement?.dataset?.side;
  const box = byId("attention");
  box.className = `attention ${state.view}`;
  box.replaceChildren(svg("svg", { class: "links", "aria-hidden": "true" }), tokenLine("query"), tokenLine("key"));
  if (focused) buttonsOf(focused)[placeOf(focused)].focus({ preventScroll: true });
  updateAttention();
}

function tokenLine(which) {
  const role = ROLES[state.kind][which === "query" ? 0 : 1];
  const line = make("div", { class: "tokens", role: "toolbar", "aria-label": role, onmouseleave: () => hover(null) });
  line.dataset.line = which;
  labelsOf(which).forEach((label, place) => {
    if (!joined(label, place)) line.append(make("span", { class: "whole" })); // pieces of a word stay together
    line.lastChild.append(tokenButton(which, place, label));
  });
  const title = make("h3", {}, role);
  return make("div", { class: "side" }, title, line);
}

function tokenButton(which, place, label) {
  const bars = make("span", { class: "bars", "aria-hidden": "true" });
  for (const head of chosenHeads()) {
    const bar = make("i");
    bar.style.setProperty("--colour", headColour(head));
    bars.append(bar);
  }
  const button = make(
    "button",
    {
      type: "button",
      class: joined(label, place) ? "token joined" : "token",
      "aria-label": `${label}, ${place}`,
      onmouseenter: () => hover({ side: which, place }),
      onfocus: () => pick(which, place),
      onclick: () => pick(which, place),
      onkeydown: (event) => goToToken(event, which, place),
    },
    make("span", { class: "word" }, word(label)),
    bars,
  );
  button.dataset.side = which;
  return button;
}

const buttonsOf = (which) => [...byId("attention").querySelectorAll(`.token[data-side="${which}"]`)];

function goToToken(event, which, place) {
  const across = state.view === "text" ? ["ArrowLeft", "ArrowRight"] : ["ArrowUp", "ArrowDown"];
  const between = state.view === "text" ? ["ArrowUp", "ArrowDown"] : ["ArrowLeft", "ArrowRight"];
  const last = labelsOf(which).length - 1;
  const places = { [across[0]]: place - 1, [across[1]]: place + 1, Home: 0, End: last };
  if (event.key in places) {
    event.preventDefault();
    buttonsOf(which)[Math.max(0, Math.min(last, places[event.key]))].focus();
  } else if (between.includes(event.key)) {
    event.preventDefault();
    const other = event.key === between[0] ? "query" : "key";
    if (other !== which) buttonsOf(other)[placeOf(other)].focus();
  }
}

function hover(token) {
  state.hover = token;
  updateAttention();
}

/** A token is chosen: the numbers, and for a target token the step of the decoding, follow. */
function pick(which, place) {
  if (state.side === which && placeOf(which) === place && !state.hover) return;
  const follows = which === "query" || isSelf();
  Object.assign(state, { side: which, hover: null });
  state.places[side(which)[0]] = place;
  if (follows) state.key = null;
  updateAttention();
  if (follows) drawWalk();
  if (side(which)[0] === "target") drawStep();
}

/** Bars, lines and words for the token that is looked at. */
function updateAttention() {
  const at = looked();
  const shown = { query: null, key: null }; // the weights that stand on each text
  if (at.side === "query" || isSelf()) shown.key = weightsOf("query", at.place);
  if (at.side === "key" || isSelf()) shown.query = weightsOf("key", at.place);
  const heads = chosenHeads();
  const most = Math.max(1e-6, ...Object.values(shown).flatMap((all) => (all ? heads.map((h) => Math.max(...all[h])) : [])));
  for (const which of ["query", "key"]) {
    const here = which === at.side || isSelf();
    const chosen = here ? at.place : -1;
    buttonsOf(which).forEach((button, place) => {
      const own = heads.map((head) => (shown[which] ? shown[which][head][place] : 0));
      button.setAttribute("aria-pressed", String(place === chosen));
      button.style.setProperty("--mean", own.reduce((a, b) => a + b, 0) / heads.length / most);
      button.querySelectorAll("i").forEach((bar, index) => bar.style.setProperty("--weight", own[index] / most));
    });
    rove(buttonsOf(which), here ? at.place : placeOf(which));
  }
  drawLinks(at, shown, heads);
  byId("scale").textContent = `A full bar is a weight of ${number(most, 4)}, the largest that is shown.`;
  readAttention(at, shown, heads);
}

/** Lines from the token to those it attends to, or to it from those which attend to it; the strongest is opaque. */
function drawLinks(at, shown, heads) {
  const drawing = byId("attention").querySelector("svg");
  drawing.replaceChildren();
  if (state.view !== "lines") return;
  const frame = byId("attention").getBoundingClientRect();
  const [from, to] = [buttonsOf("query"), buttonsOf("key")].map((all) => all.map((b) => b.getBoundingClientRect()));
  const other = at.side === "query" ? "key" : "query";
  const most = Math.max(1e-6, ...heads.map((head) => Math.max(...shown[other][head])));
  heads.forEach((head, index) => {
    const shift = 2 * (index - (heads.length - 1) / 2);
    shown[other][head].forEach((weight, place) => {
      if (weight < 0.01 * most) return;
      const [a, b] = at.side === "query" ? [from[at.place], to[place]] : [from[place], to[at.place]];
      const [y1, y2] = [a, b].map((box) => (box.top + box.bottom) / 2 - frame.top + shift);
      const [x1, x2] = [a.right - frame.left, b.left - frame.left];
      const bend = (x1 + x2) / 2;
      const line = svg("path", { d: `M${x1},${y1}C${bend},${y1} ${bend},${y2} ${x2},${y2}` });
      line.style.setProperty("stroke", headColour(head));
      line.style.setProperty("opacity", weight / most);
      drawing.append(line);
    });
  });
}

function readAttention(at, shown, heads) {
  const label = word(labelsOf(at.side)[at.place]);
  const parts = [];
  if (shown.key) parts.push(strongest(`“${label}” attends to`, shown.key, labelsOf("key"), heads));
  if (shown.query) parts.push(strongest(`“${label}” is attended to by`, shown.query, labelsOf("query"), heads));
  byId("attention-readout").replaceChildren(...parts);
}

/** The strongest of each head as a list. */
function strongest(lead, weights, labels, heads) {
  const items = heads.map((head) => {
    const found = largest(weights[head], 3).filter((place) => weights[head][place] > 0);
    const texts = found.map((place) => `${word(labels[place])} ${number(weights[head][place], 4)}`);
    const parts = texts.flatMap((text, index) => [index ? ", " : "", make("span", {}, text)]);
    const swatch = make("i", { class: "swatch" });
    swatch.style.setProperty("--colour", headColour(head));
    return make("li", {}, swatch, `head ${head}: `, ...(parts.length ? parts : ["nothing"]));
  });
  return make("div", {}, make("h3", {}, lead), make("ul", {}, ...items));
}
