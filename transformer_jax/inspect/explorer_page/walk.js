/** From the query of one token to what the head gives: q · k, / √d, mask, softmax, Σ weights · values. */
function drawWalk() {
  const arrays = attention();
  const head = Math.min(state.walkHead, arrays.N - 1);
  const query = placeOf("query");
  const weights = arrays.weights(head, query);
  const key = state.key ?? largest(weights, 1)[0];
  const [asks, keys] = [word(labelsOf("query")[query]), labelsOf("key").map(word)];
  options(byId("walk-head"), Array.from({ length: arrays.N }, (_, n) => String(n)), head);
  options(byId("walk-key"), keys.map((label, s) => `${s}: ${label}`), key);
  byId("walk-lead").textContent = `${KINDS[state.kind].name}, layer ${state.layer}: “${asks}” asks, “${keys[key]}” answers.`;
  byId("walk").replaceChildren(
    make("h3", {}, "1. Its query times the key"),
    productTable(arrays, head, query, key),
    make("h3", {}, `2. Scores divided by √${arrays.H}, masked, and their softmax`),
    scoreTable(arrays, head, query, key, keys),
    make("h3", {}, "3. The values, weighted and summed"),
    valueTable(arrays, head, query, key, keys),
  );
  const row = byId("walk-scores").querySelector(".chosen");
  const box = byId("walk-scores").parentElement;
  box.scrollTop = row.offsetTop - (box.clientHeight - row.offsetHeight) / 2;
}

/** A table that scrolls sideways on its own, and can be scrolled with the keys. */
function scrolled(label, ...rows) {
  const table = make("table", {}, make("tbody", {}, ...rows));
  return make("div", { class: "scrolled", tabindex: "0", role: "region", "aria-label": label }, table);
}

const cells = (name, title, values, digits = 3) =>
  make(
    "tr",
    { "data-row": name },
    make("th", { scope: "row" }, title),
    ...Array.from(values, (value) => make("td", {}, number(value, digits))),
  );

function productTable({ query, key, relative, scores }, head, t, s) {
  const q = query(head, t);
  const k = relative ? sum(key(head, s), relative.key(t, s)) : key(head, s);
  return make(
    "div",
    {},
    scrolled(
      "Query, key and their products by dimension",
      cells("query", "q", q),
      cells("key", relative ? "k + a" : "k", k),
      cells("product", "q × k", q.map((value, i) => value * k[i])),
    ),
    make("p", { class: "result" }, "Sum of the products: q · k = ", make("output", { id: "walk-score" }, number(scores(head, t)[s]))),
  );
}

function scoreTable({ H, scores, weights, visible }, head, t, key, labels) {
  const scale = Math.fround(Math.sqrt(H));
  const heading = ["key", "q · k", "/ √d", "masked", "softmax"].map((text) => make("th", { scope: "col" }, text));
  const rows = labels.map((label, s) => {
    const score = scores(head, t)[s];
    const scaled = Math.fround(score / scale);
    const shown = [number(score), number(scaled), visible(t, s) ? number(scaled) : "−∞"];
    const weight = make("td", { class: "weight" }, number(weights(head, t)[s], 4));
    weight.style.setProperty("--weight", weights(head, t)[s]);
    const choose = make("button", { type: "button", class: "plain", onclick: () => chooseKey(s) }, label);
    choose.setAttribute("aria-pressed", String(s === key));
    const row = make("tr", {}, make("th", { scope: "row" }, choose), ...shown.map((text) => make("td", {}, text)), weight);
    row.classList.toggle("chosen", s === key);
    return row;
  });
  const table = make("table", { id: "walk-scores" }, make("thead", {}, make("tr", {}, ...heading)), make("tbody", {}, ...rows));
  return make("div", { class: "scrolled tall", tabindex: "0", role: "region", "aria-label": "Scores of all keys" }, table);
}

function chooseKey(s) {
  state.key = s;
  drawWalk();
  byId("walk-scores").querySelector('[aria-pressed="true"]').focus({ preventScroll: true });
}

function valueTable({ value, weights, output, relative }, head, t, s, labels) {
  const v = relative ? sum(value(head, s), relative.value(t, s)) : value(head, s);
  const weight = weights(head, t)[s];
  return make(
    "div",
    {},
    scrolled(
      "Value of the key, weighted, and the sum over all keys by dimension",
      cells("value", relative ? "v + a" : "v", v),
      cells("weighted", `${number(weight, 4)} × v`, v.map((x) => weight * x)),
      cells("output", "Σ weight × v", output(head, t)),
    ),
    make("p", { class: "hint" }, `The sum is over all ${labels.length} keys. It is what this head gives for the token.`),
  );
}
