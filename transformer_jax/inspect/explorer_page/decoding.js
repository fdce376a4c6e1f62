/** The step of the decoding that is chosen: what was written so far, and what could come next. */
function drawStep() {
  const { tokens, steps } = sentence();
  const at = state.places.target;
  const { labels, probabilities, chosen } = steps[at];
  Object.assign(byId("step"), { max: steps.length - 1, value: at });
  byId("step").setAttribute("aria-valuetext", `step ${at + 1} of ${steps.length}: ${word(tokens.written[at])}`);
  byId("step-back").disabled = at === 0;
  byId("step-on").disabled = at === steps.length - 1;
  byId("step-text").replaceChildren(
    make("span", {}, spelled(tokens.written.slice(0, at)) || "<bos>"),
    joined(tokens.written[at], at) ? "" : " ",
    make("mark", {}, word(tokens.written[at])),
  );
  byId("step-readout").textContent =
    `Step ${at + 1} of ${steps.length}: “${word(tokens.written[at])}” has the probability ${number(chosen.probability, 4)}.`;
  const rows = labels.map((label, rank) => alternative(label, probabilities[rank], rank, rank === chosen.rank));
  if (chosen.rank >= labels.length) rows.push(alternative(tokens.written[at], chosen.probability, chosen.rank, true));
  byId("alternatives").replaceChildren(...rows);
}

function alternative(label, probability, rank, isChosen) {
  const row = make(
    "li",
    { value: rank + 1, class: isChosen ? "chosen" : null },
    make("span", { class: "word" }, label),
    make("span", { class: "bar", "aria-hidden": "true" }),
    make("span", { class: "figure" }, number(probability, 4)),
    make("span", { class: "mark" }, isChosen ? "✓ written" : ""),
  );
  row.style.setProperty("--weight", probability);
  return row;
}

/** Goes to a step; attention of the decoder goes with it. */
function goToStep(at) {
  state.places.target = Math.max(0, Math.min(sentence().steps.length - 1, at));
  drawStep();
  if (side("query")[0] !== "target") return;
  Object.assign(state, { side: "query", hover: null, key: null });
  updateAttention();
  drawWalk();
}
