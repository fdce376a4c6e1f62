const FATES = { continued: "continued", dead: "given up", finished: "finished", cut: "cut at the output limit" };

/** What became of a hypothesis; one that was returned without an end was cut. */
const fateOf = ({ fate, rank }) => (fate === "dead" && rank !== null ? "cut" : fate);

const ending = (node) =>
  FATES[fateOf(node)] + (node.rank === null ? "" : `, number ${node.rank + 1}, score ${number(node.score)}`);

const pathTo = (nodes, index) => (index < 0 ? [] : [...pathTo(nodes, nodes[index].parent), index]);

/** Every hypothesis that had a slot of the beam: a row for each step, a column for each slot. */
function drawTree() {
  const { nodes, slots } = sentence().search;
  const best = nodes.findIndex((node) => node.rank === 0);
  const ways = new Set(pathTo(nodes, best));
  const box = byId("tree");
  box.style.setProperty("--slots", slots);
  const start = make("span", { class: "start" }, "<bos>");
  const steps = Math.max(...nodes.map((node) => node.step));
  const rows = Array.from({ length: steps }, (_, step) => {
    const mark = make("span", { class: "step", "aria-hidden": "true" }, String(step + 1));
    mark.style.setProperty("grid-row", step + 2);
    return mark;
  });
  const grid = make("div", { class: "grid" }, start, ...rows, ...nodes.map((_, index) => nodeButton(nodes, index, ways)));
  grid.prepend(svg("svg", { class: "links", "aria-hidden": "true" }));
  box.replaceChildren(grid);
  byId("search-lead").textContent =
    `${slots === 1 ? "Greedy search" : `A beam of ${slots}`}: a row for each step, a column for each slot. Under each token is the ` +
    "log-probability of its hypothesis. × was given up; framed ones are finished, with their place and score if they " +
    "were returned. The arrow keys go from a token to the one before, after and beside it.";
  state.node = Math.max(0, best);
  drawBranches();
  readNode(state.node);
}

const nodeButtons = () => [...byId("tree").querySelectorAll(".node")];

function nodeButton(nodes, index, ways) {
  const node = nodes[index];
  const before = node.parent < 0 ? "<bos>" : word(nodes[node.parent].label);
  const button = make(
    "button",
    {
      type: "button",
      class: `node ${fateOf(node)}${ways.has(index) ? " best" : ""}`,
      "aria-label": `step ${node.step}: ${node.label} after ${before}, log-probability ${number(node.log_prob)}, ${ending(node)}`,
      onmouseenter: () => readNode(index),
      onmouseleave: () => readNode(state.node),
      onfocus: () => chooseNode(index),
      onclick: () => chooseNode(index),
      onkeydown: (event) => goToNode(event, nodes, index),
    },
    make("span", { class: "word" }, fateOf(node) === "dead" ? `${word(node.label)} ×` : word(node.label)),
    make("span", { class: "figure" }, number(node.log_prob)),
  );
  if (node.rank !== null) button.append(make("span", { class: "score" }, `no. ${node.rank + 1}: ${number(node.score)}`));
  button.style.setProperty("grid-row", node.step + 1);
  button.style.setProperty("grid-column", node.slot + 2);
  return button;
}

function chooseNode(index) {
  state.node = index;
  readNode(index);
}

/** Up is the token before, down the likeliest one after, left and right are others of the same step. */
function goToNode(event, nodes, index) {
  const { step, slot, parent } = nodes[index];
  const all = [...nodes.keys()];
  const children = all.filter((i) => nodes[i].parent === index).sort((i, j) => nodes[j].log_prob - nodes[i].log_prob);
  const beside = all.filter((i) => nodes[i].step === step).sort((i, j) => nodes[i].slot - nodes[j].slot);
  const goal = {
    ArrowUp: parent,
    ArrowDown: children[0],
    ArrowLeft: beside.findLast((i) => nodes[i].slot < slot),
    ArrowRight: beside.find((i) => nodes[i].slot > slot),
    Home: 0,
    End: nodes.findIndex((node) => node.rank === 0),
  };
  if (!(event.key in goal)) return;
  event.preventDefault();
  nodeButtons()[goal[event.key] ?? -1]?.focus();
}

/** The whole hypothesis of a node, and its way through the tree. */
function readNode(index) {
  const { nodes } = sentence().search;
  const node = nodes[index];
  const way = pathTo(nodes, index);
  byId("node-readout").textContent =
    `${spelled(way.map((i) => nodes[i].label))} — log-probability ${number(node.log_prob)}, ${way.length} tokens, ${ending(node)}.`;
  nodeButtons().forEach((button, i) => button.classList.toggle("way", way.includes(i)));
  byId("tree").querySelectorAll("path").forEach((line, i) => line.classList.toggle("way", way.includes(i)));
  rove(nodeButtons(), state.node);
}

/** A line from each token to the one before it. */
function drawBranches() {
  const grid = byId("tree").firstElementChild;
  const frame = grid.getBoundingClientRect();
  const buttons = nodeButtons();
  const start = grid.querySelector(".start");
  const lines = sentence().search.nodes.map(({ parent }, index) => {
    const [a, b] = [parent < 0 ? start : buttons[parent], buttons[index]].map((box) => box.getBoundingClientRect());
    const [x1, x2] = [a, b].map((box) => (box.left + box.right) / 2 - frame.left);
    const [y1, y2] = [a.bottom - frame.top, b.top - frame.top];
    const line = svg("path", { d: `M${x1},${y1}L${x2},${y2}` });
    line.setAttribute("class", buttons[index].classList.contains("best") ? "best" : "");
    return line;
  });
  grid.querySelector("svg").replaceChildren(...lines);
}
