const page = JSON.parse(byId("explorer-data").textContent);

const state = {
  sentence: 0,
  kind: "encoder", // of attention
  layer: 0,
  heads: new Set(), // those which are shown
  view: "lines",
  side: "query", // on which text the chosen token was picked
  places: { source: 0, target: 0 }, // the chosen token of each text
  hover: null, // the token under the pointer
  walkHead: 0,
  key: null, // of the walk; null: the one with the largest weight
  node: 0, // of the tree
};

function change(changes) {
  Object.assign(state, changes);
  drawControls();
  const radio = "kind" in changes ? "kind" : "layer" in changes ? "layer" : "view" in changes ? "view" : null;
  if (radio) document.querySelector(`input[name="${radio}"]:checked`).focus();
  drawAttention();
  drawWalk();
}

/** Starts where there is most to see: the top layer, all heads, the last word. */
function openSentence(index) {
  const { tokens, attention: kinds } = page.sentences[index];
  const longest = Math.max(tokens.source.length, tokens.written.length);
  const lastWord = tokens.source.findLastIndex((label) => !SPECIAL.has(label) && /\p{L}/u.test(label));
  Object.assign(state, {
    sentence: index,
    kind: "encoder",
    layer: kinds.encoder.length - 1,
    view: longest <= FEW ? "lines" : "text",
    side: "query",
    places: { source: Math.max(0, lastWord), target: 0 },
    hover: null,
    key: null,
  });
  state.heads = new Set(Array.from({ length: kinds.encoder[0].heads }, (_, head) => head));
  byId("chosen-sentence").hidden = byId("panels").hidden = false;
  options(byId("sentence"), page.sentences.map(({ text }) => text), index);
  byId("translation").textContent = `→ ${page.sentences[index].translation}`;
  drawControls();
  drawAttention();
  drawWalk();
  drawStep();
  drawTree();
}

/** A page that is served asks its server; a file has all it can show. */
async function ask(event) {
  event.preventDefault();
  const status = byId("ask-status");
  const button = byId("ask").querySelector("button");
  button.disabled = true;
  status.textContent = "Translating …";
  try {
    const body = JSON.stringify({ text: byId("ask-text").value });
    const answer = await fetch("/explore", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    page.sentences.push(found);
    openSentence(page.sentences.length - 1);
    status.textContent = "";
  } catch (error) {
    status.textContent = error.message;
  } finally {
    button.disabled = false;
  }
}

byId("ask").hidden = !page.asks;
byId("ask").addEventListener("submit", ask);
byId("sentence").addEventListener("change", (event) => openSentence(Number(event.target.value)));
byId("walk-head").addEventListener("change", (event) => {
  Object.assign(state, { walkHead: Number(event.target.value), key: null });
  drawWalk();
});
byId("walk-key").addEventListener("change", (event) => {
  state.key = Number(event.target.value);
  drawWalk();
});
byId("all-heads").addEventListener("click", () => {
  state.heads = new Set(Array.from({ length: attention().N }, (_, head) => head));
  drawControls();
  drawAttention();
});
byId("one-head").addEventListener("click", () => {
  state.heads = new Set(chosenHeads().slice(0, 1));
  drawControls();
  drawAttention();
});
byId("step").addEventListener("input", (event) => goToStep(Number(event.target.value)));
byId("step-back").addEventListener("click", () => goToStep(state.places.target - 1));
byId("step-on").addEventListener("click", () => goToStep(state.places.target + 1));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.sentences.length && drawThumbnails());
new ResizeObserver(() => {
  if (!page.sentences.length) return;
  updateAttention();
  drawBranches();
}).observe(byId("panels"));
if (page.sentences.length) openSentence(0);
