
"use strict";
const $ = id => document.getElementById(id);
const make = (tag, of = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), of);
  element.append(...children);
  return element;
};
const powers = (low, high) => Array.from({length: high - low + 1}, (_, i) => 2 ** (low + i));

// Job and plan: every field is an option of the command line.
const FIRST = {model: "llama-3-8b", cluster: "dgx-h100", chips: "64", global_batch: "512", seq_len: "8192", tp: "2", zero: "1"};
const FIELDS = {
  job: [["model", "Model", "list"], ["cluster", "Cluster or chip", "list"], ["profile", "Framework", "choice"], ["precision", "Precision", "choice"],
    ["optimizer", "Optimizer", "choice"]],
  sizes: [["chips", "Chips", powers(0, 14)], ["global_batch", "Global batch", powers(0, 14)], ["seq_len", "Sequence length", powers(9, 20)],
    ["micro_batch", "Micro-batch", powers(0, 6)], ["tp", "Tensor parallel", powers(0, 6)], ["pp", "Pipeline parallel", powers(0, 6)]],
  more: [["zero", "ZeRO stage", ["0", "1", "2", "3"]], ["recompute", "Recompute", "choice"], ["cp", "Context parallel", "number"],
    ["ep", "Expert parallel", "number"], ["schedule", "Schedule", "choice"], ["virtual_stages", "Virtual stages", "number"]],
};
const EMPTY = {profile: "generic", precision: "bf16-mixed", optimizer: "adamw", recompute: "none", schedule: "1f1b", zero: "0"};
const NAMES = Object.fromEntries(Object.values(FIELDS).flat().map(([name, label]) => [name, label]));

let known = null, state = {}, pasted = "", kept = null, answer = null, keptAnswer = null, result = null;

// --- text ---
const digits = value => Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en-US") : value.toPrecision(3);
const time = value => value >= 1 || !value ? `${digits(value)} s` : value >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
const size = value => value >= 2 ** 30 || !value ? `${digits(value / 2 ** 30)} GiB` : `${digits(value / 2 ** 20)} MiB`;
const share = value => `${(100 * value).toFixed(1)} %`;
const chance = value => value > .99 ? "over 99 %" : value < .01 ? "under 1 %" : `${Math.round(100 * value)} %`;
const words = name => name.replaceAll("_", " ");
const count = value => Math.round(value).toLocaleString("en-US");
const VERDICTS = {fits: "✓ Fits", tight: "! Tight: likely to run out of memory", "does not fit": "✗ Does not fit"};
const isUsual = order => order.join("-") === "tp-cp-dp_shard-dp_replicate-pp";
const planText = plan => [
  ...["tp", "cp", "pp", "dp_replicate", "dp_shard"].filter(each => plan.layout[each] > 1).map(each => `${words(each)} ${plan.layout[each]}`),
  ...["ep", "etp"].filter(each => plan[each] > 1).map(each => `${each} ${plan[each]}`), plan.zero ? `ZeRO ${plan.zero}` : "",
  plan.layout.pp > 1 ? plan.schedule + (plan.virtual_stages > 1 ? ` x${plan.virtual_stages}` : "") : "", plan.micro_batch > 1 ? `micro-batch ${plan.micro_batch}` : "",
  plan.layout.tp > 1 && !plan.sequence_parallel ? "no sequence parallelism" : "",
  plan.recompute === "none" ? "" : `recompute ${(modulesOf(plan) || plan.recompute).replaceAll(",", "+")}`,
  isUsual(plan.order) ? "" : `order ${plan.order.join("-")}`,
].filter(Boolean).join(", ") || "one chip";
const modulesOf = plan => {
  if (plan.recompute !== "selective" || !known) return "";
  const names = Object.keys(known.modules).filter(name => known.modules[name].every(each => plan.recompute_operators.includes(each)));
  return names.join() === "core_attn" ? "" : names.join();
};

// --- state and links: short values in the query, pasted text in the fragment, which is never sent ---
const linkOf = () => {
  const query = new URLSearchParams(state), fragment = new URLSearchParams();
  if (kept) query.set("vs", new URLSearchParams(kept.state));
  if (pasted) fragment.set("config", pasted);
  if (kept && kept.pasted) fragment.set("vs_config", kept.pasted);
  return `?${query}${fragment.size ? `#${fragment}` : ""}`;
};
const readLink = () => {
  const query = new URLSearchParams(location.search), fragment = new URLSearchParams(location.hash.slice(1));
  const vs = query.get("vs");
  query.delete("vs");
  pasted = fragment.get("config") || "";
  state = query.size || pasted ? Object.fromEntries(query) : {...FIRST};
  kept = vs === null ? null : {state: Object.fromEntries(new URLSearchParams(vs)), pasted: fragment.get("vs_config") || ""};
};
const body = (of = {state, pasted}, more = {}) => ({...of.state, ...(of.pasted ? {config: of.pasted} : {}), ...more});
const set = (changes, replaced = state) => {
  state = Object.fromEntries(Object.entries({...replaced, ...changes}).filter(([, value]) => value !== "" && value !== null));
  update();
};
let extras = new AbortController(); // of requests in addition to the prediction of this state
const update = () => {
  extras.abort();
  extras = new AbortController();
  history.replaceState(null, "", linkOf());
  showState();
  predict();
  searchSoon();
};

// --- requests: `ask` and `askKnown` are defined in transport_server.js or transport_static.js ---
class Refused extends Error {
  constructor(error) { super(error.message); this.error = error; }
}
const ready = askKnown().then(found => { known = found; });

let isAsking = false, isAskedAgain = false;
const predict = async () => { // one request at a time; of requests during it only the last is sent
  if (isAsking) { isAskedAgain = true; return; }
  isAsking = true;
  do {
    isAskedAgain = false;
    try {
      const [found, other] = [await ask("predict", body()), kept && !keptAnswer ? await ask("predict", body(kept)) : keptAnswer];
      await ready;
      [answer, keptAnswer] = [found, kept ? other : null];
      showError(null);
      showAnswer();
    } catch (error) { if (!fillIn(error.message)) showError(error); }
  } while (isAskedAgain);
  isAsking = false;
  document.body.dataset.predicted = Number(document.body.dataset.predicted || 0) + 1;
};

let searchKey = "", searchTimer = 0, running = null;
const jobOf = () => Object.fromEntries(Object.entries(body()).filter(([name]) => !known.knobs.includes(name)));
const searchSoon = () => ready.then(() => {
  clearTimeout(searchTimer);
  const key = JSON.stringify(jobOf());
  if (key !== searchKey && running) running.abort();
  searchTimer = setTimeout(() => {
    if (key !== searchKey) search(key);
    adviseSoon();
  }, 400);
});
const search = async key => {
  if (running) running.abort();
  const own = running = new AbortController();
  searchKey = key;
  result = null;
  showSearch("Searching...", 0);
  const started = performance.now();
  try {
    result = await ask("search", jobOf(), {signal: own.signal, progress: done => { if (running === own) showSearch(`Searching... ${Math.round(100 * done)} %`, done); }});
    showSearch(`${count(result.num_evaluated)} plans evaluated, ${count(result.num_feasible)} fit (${time((performance.now() - started) / 1e3)})`);
    showPlans();
  } catch (error) {
    if (running !== own) return;
    showSearch(error.name === "AbortError" ? "Search cancelled." : error.message);
    $("plans").replaceChildren(...(error.name === "AbortError" ? [button("Search again", () => search(key))] : []));
  }
  if (running === own) running = null;
};
const adviseSoon = async () => { // the smallest changes that fit need a separate search
  const asked = JSON.stringify(body());
  if (!answer || answer.fits || isAsking || $("remedies").dataset.asked === asked) return;
  $("remedies").dataset.asked = asked;
  try {
    const found = await ask("predict", body(undefined, {remedies: true}), {signal: extras.signal});
    if (JSON.stringify(body()) === asked) showRemedies(found.remedies || []);
  } catch { if ($("remedies").dataset.asked === asked) $("remedies").dataset.asked = ""; } // the prediction shows the error
};

// --- controls ---
const button = (text, action, label) => {
  const found = make("button", {type: "button", textContent: text, onclick: action});
  if (label) found.setAttribute("aria-label", label);
  return found;
};
const effective = name => { // value of the plan if the field is empty
  if (state[name]) return state[name];
  const plan = answer && answer.plan;
  if (!plan) return "";
  const values = {chips: plan.num_chips, profile: plan.profile, ...plan.job, model: plan.job.model.name, cluster: plan.cluster, ...plan, ...plan.layout};
  return name === "model" ? plan.job.model.name : String(values[name] ?? "");
};
const makeFields = () => {
  for (const [group, fields] of Object.entries(FIELDS)) for (const [name, label, kind] of fields) {
    const row = make("div", {className: "field"}, make("label", {htmlFor: name, textContent: label}));
    if (Array.isArray(kind) && typeof kind[0] === "number") {
      const slider = make("input", {type: "range", id: name, min: 0, max: kind.length - 1, step: 1});
      const exact = make("input", {id: `${name}-exact`, inputMode: "numeric"});
      exact.setAttribute("aria-label", `${label}, exact value`);
      slider.oninput = () => set({[name]: String(kind[slider.value])});
      exact.onchange = () => set({[name]: exact.value.trim()});
      row.className += " slider";
      row.append(slider, exact);
    } else if (kind === "list" || kind === "number") {
      const input = make("input", {id: name, onchange: () => set({[name]: input.value.trim()})});
      if (kind === "number") input.inputMode = "numeric"; else input.setAttribute("list", `${name}-names`);
      row.append(input, ...(kind === "list" ? [make("datalist", {id: `${name}-names`})] : []));
    } else {
      const select = make("select", {id: name, onchange: () => set({[name]: select.value})});
      select.append(...(kind === "choice" ? [] : kind).map(each => make("option", {value: each, textContent: each})));
      row.append(select);
    }
    $(group).append(row);
  }
};
const showState = () => {
  for (const fields of Object.values(FIELDS)) for (const [name, , kind] of fields) {
    const element = $(name), value = effective(name);
    if (Array.isArray(kind) && typeof kind[0] === "number") {
      const number = Number(value.replace(/k$/i, "") * (/k$/i.test(value) ? 1024 : 1)) || kind[0];
      element.value = kind.reduce((best, each, i) => Math.abs(Math.log(each / number)) < Math.abs(Math.log(kind[best] / number)) ? i : best, 0);
      element.setAttribute("aria-valuetext", value || String(kind[0]));
      if (document.activeElement !== $(`${name}-exact`)) $(`${name}-exact`).value = value;
    } else if (element.tagName === "SELECT") {
      const shown = value || EMPTY[name] || "";
      if (shown && ![...element.options].some(each => each.value === shown)) element.append(make("option", {value: shown, textContent: shown}));
      element.value = shown;
    } else if (document.activeElement !== element) element.value = value;
  }
  const others = Object.keys(state).filter(name => !(name in NAMES));
  $("others").replaceChildren(...others.map(name => button(`${words(name)}: ${state[name]} ×`, () => set({[name]: ""}), `Remove ${words(name)} ${state[name]}`)));
  if (document.activeElement !== $("config")) $("config").value = pasted;
  $("clear").hidden = !pasted;
};
const showKnown = () => {
  for (const [name, , kind] of Object.values(FIELDS).flat()) {
    const options = (known[name] || []).map(each => make("option", {value: each, textContent: each}));
    if (kind === "list") $(`${name}-names`).replaceChildren(...options);
    if (kind === "choice") $(name).replaceChildren(...options);
  }
  showState();
};
let replaced = {}; // fields before a text was pasted; they complete it
const paste = text => {
  const wasPasted = Boolean(pasted);
  pasted = text.trim();
  const isModel = /^\s*\{[^]*"(model_type|architectures)"/.test(pasted), {model, ...rest} = state;
  replaced = wasPasted ? replaced : state;
  if (!pasted) set({}, {...FIRST, ...replaced, ...state});
  else set({}, isModel ? rest : rest.cluster ? {cluster: rest.cluster} : {});
};
const fillIn = message => {
  const lacking = (message.match(/: ([a-z_, ]+): missing in the file/) || ["", ""])[1].split(", ").filter(name => replaced[name] && !state[name]);
  if (lacking.length) set(Object.fromEntries(lacking.map(name => [name, replaced[name]])));
  return lacking.length > 0;
};

// --- answers ---
const table = (headers, rows, caption) => make("div", {className: "scroll"}, make("table", {},
  ...(caption ? [make("caption", {textContent: caption})] : []),
  make("thead", {}, make("tr", {}, ...headers.map((each, i) => make("th", {scope: "col", textContent: each.replace(">", ""), className: each[0] === ">" ? "number" : ""})))),
  make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map((each, i) => make("td", {className: headers[i][0] === ">" ? "number" : ["plan", "change", "changed"].includes(headers[i]) ? "plan" : ""}, each)))))));
const stack = (label, total, sizes, text, limit = 0) => {
  const names = Object.keys(sizes).filter(name => sizes[name] > 0 && name !== "total");
  const whole = names.reduce((sum, name) => sum + sizes[name], 0), longest = Math.max(whole, limit) || 1;
  const colour = name => known.colours[name] || "#999999";
  const pieces = names.map(name => {
    const piece = make("i");
    piece.style.cssText = `width:${100 * sizes[name] / longest}%;background:${colour(name)}`;
    piece.dataset.tip = `${words(name)}: ${text(sizes[name])}, ${share(sizes[name] / whole)}`;
    return piece;
  });
  const line = make("u");
  line.style.left = `${100 * limit / longest}%`;
  line.dataset.tip = `usable: ${text(limit)}`;
  const bar = make("div", {}, ...pieces, ...(limit ? [line] : []));
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", names.map(name => `${words(name)} ${text(sizes[name])}`).join(", "));
  const legend = names.filter(name => sizes[name] / whole > .005).map(name => {
    const box = make("i");
    box.style.background = colour(name);
    return make("span", {}, box, `${words(name)} ${share(sizes[name] / whole)} `);
  });
  return [make("div", {className: "stack"}, make("span", {textContent: label}), make("b", {textContent: total}), bar), make("p", {className: "legend"}, ...legend)];
};
const showError = error => {
  const found = error && (error.error || {message: `perfmodel does not answer (${error.message}); ${WHEN_SILENT}`, suggestions: []});
  $("error").hidden = !found;
  for (const each of ["prediction", "verdict"]) $(each).classList.toggle("stale", Boolean(found));
  for (const each of document.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
  if (!found) return;
  const field = found.field && ($(`${found.field}-exact`) || $(found.field));
  if (field && field.closest("#form")) field.setAttribute("aria-invalid", "true");
  const names = found.field in NAMES ? found.suggestions.filter(each => /^[\w.@+/-]+$/.test(each)) : [];
  $("error").replaceChildren(make("p", {textContent: found.message}), ...names.map(each => button(each, () => set({[found.field]: each}), `Set ${words(found.field)} to ${each}`)));
};
const showAnswer = () => {
  const {plan} = answer, room = answer.memory_spare;
  $("verdict").textContent = `${VERDICTS[answer.verdict]} (${chance(answer.fits_probability)}): ${time(answer.step_time)} a step, MFU ${share(answer.mfu_palm)}`;
  const cards = [
    ["step time", time(answer.step_time), answer.step_time_low ? `80 % interval ${time(answer.step_time_low)} to ${time(answer.step_time_high)}` : `${answer.num_microbatches} micro-batch${answer.num_microbatches > 1 ? "es" : ""}`],
    ["throughput", count(answer.tokens_per_second_per_chip), "tokens/s a chip"],
    ["MFU", share(answer.mfu_palm), `${digits(answer.tflops_per_chip)} TFLOP/s a chip`],
    ["memory of a chip", size(answer.memory.total), `of ${size(answer.memory_usable)} usable, ${room < 0 ? `${size(-room)} too much` : `${size(room)} to spare`}`],
  ];
  $("cards").replaceChildren(...cards.map(each => make("div", {}, make("span", {textContent: each[0]}), make("b", {textContent: each[1]}), make("small", {textContent: each[2]}))));
  $("bars").replaceChildren(...stack("step time", time(answer.step_time), answer.parts, time),
    ...stack("memory", `${size(answer.memory.total)} of ${size(answer.memory_usable)}`, answer.memory, size, answer.memory_usable), make("p", {textContent: planText(plan)}));
  if (answer.fits || $("remedies").dataset.asked !== JSON.stringify(body())) showRemedies(null);
  showComparison();
  const notes = [...answer.warnings, answer.not_runnable_reason].filter(Boolean);
  $("tables").lastChild.replaceChildren(
    table(["part of the step", ">time", ">share"], Object.entries(answer.parts).filter(([, value]) => value).map(([name, value]) => [words(name), time(value), share(value / answer.step_time)])),
    table(["memory", ">size"], Object.entries(answer.memory).filter(([, value]) => value).map(([name, value]) => [words(name), size(value)])));
  $("sources").lastChild.replaceChildren(...notes.map(each => make("p", {textContent: each})), table(["assumption", "value"], [["model", plan.job.model.source],
    ["framework", plan.profile], ["calibration", plan.calibration], ["peak", `${digits(answer.peak_flop_rate / 1e12)} TFLOP/s ${answer.peak_dtype}, dense`], ["MFU", answer.flop_convention]]),
    table(["part", "based on"], Object.entries(answer.rests_on).map(([name, value]) => [words(name), value])));
  $("command").lastChild.textContent = commandOf();
  const config = answer.config;
  $("config-notes").replaceChildren(...(config ? [`Read as ${config.framework}: ${Object.keys(config.read).length} keys.`, ...config.notes,
    ...(config.ignored.length ? [`Not used: ${config.ignored.slice(0, 20).join(", ")}${config.ignored.length > 20 ? " and more" : ""}.`] : [])] : []).map(each => make("p", {textContent: each})));
  if ($("changes").open) showChanges();
  showState();
};
const commandOf = () => {
  const flag = ([name, value]) => value === "false" ? `--no-${name.replaceAll("_", "-")}` : value === "true" ? `--${name.replaceAll("_", "-")}`
    : `--${name === "settings" ? "setting" : name.replaceAll("_", "-")} ${/^[\w.@+/,=-]+$/.test(value) ? value : `'${value.replaceAll("'", "'\\''")}'`}`;
  return ["perfmodel predict", ...(pasted ? [answer.config ? "config" : "--model config.json"] : []), ...Object.entries(state).map(flag)].join(" ");
};
const showRemedies = found => {
  const rows = (found || []).map(each => [button("use", () => set(Object.fromEntries(Object.entries(each.changes).map(([name, value]) => [name, String(value)]))), `Use ${each.flags}`),
    each.flags, time(each.step_time), size(each.memory), chance(each.fits_probability)]);
  $("remedies").replaceChildren(...(rows.length ? [table(["", "change", ">step time", ">memory", ">fits"], rows, "Smallest changes that fit")] : found ? [make("p", {textContent: "No other plan of this job fits on these chips, nor this plan on more of them."})] : []));
};
const showComparison = () => {
  if (!keptAnswer) { $("comparison").replaceChildren(); return; }
  const [a, b] = [keptAnswer, answer], against = (x, y) => x && y ? `${y >= x ? "+" : "−"}${(100 * Math.abs(y / x - 1)).toFixed(1)} %` : "";
  const row = (name, of, text) => [name, text(of(a)), text(of(b)), against(of(a), of(b))];
  const rows = [row("step time", each => each.step_time, time), row("tokens/s a chip", each => each.tokens_per_second_per_chip, count), row("MFU", each => each.mfu_palm, share),
    row("memory", each => each.memory.total, size), ["fits", ...[a, b].map(each => chance(each.fits_probability)), ""], ["plan", planText(a.plan), planText(b.plan), ""],
    ...Object.keys({...a.parts, ...b.parts}).filter(name => Math.abs((a.parts[name] || 0) - (b.parts[name] || 0)) > .005 * a.step_time).map(name => row(words(name), each => each.parts[name] || 0, time))];
  const differ = [...new Set([...Object.keys(kept.state), ...Object.keys(state)])].filter(name => !known.knobs.includes(name) && kept.state[name] !== state[name]);
  rows.push(...differ.map(name => [words(name), kept.state[name] || "-", state[name] || "-", ""]));
  const swap = button("Back to the kept plan", () => { const old = kept; kept = {state, pasted}; keptAnswer = answer; pasted = old.pasted; set({}, old.state); });
  const drop = button("Remove", () => { kept = keptAnswer = null; showComparison(); history.replaceState(null, "", linkOf()); }, "Remove the comparison");
  $("comparison").replaceChildren(make("h2", {textContent: "Comparison"}), table(["", "kept", "now", ">change"], rows), make("p", {className: "buttons"}, swap, drop));
};
const showSearch = (text, done) => {
  $("search-state").textContent = text;
  $("progress").hidden = $("cancel").hidden = done === undefined;
  if (done !== undefined) { $("progress").value = done; $("plans").classList.add("stale"); } else $("plans").classList.remove("stale");
};
const knobsOf = plan => { // options that reproduce this plan
  const {layout} = plan, is = (condition, found) => condition || pasted ? found : {};
  return {
    ...is(layout.tp > 1, {tp: layout.tp, sequence_parallel: plan.sequence_parallel}), ...is(layout.pp > 1, {pp: layout.pp, schedule: plan.schedule, virtual_stages: plan.virtual_stages}),
    ...is(layout.cp > 1, {cp: layout.cp}), ...(plan.ep ? {ep: plan.ep, etp: plan.etp, dispatcher: plan.dispatcher} : {}), ...is(plan.micro_batch > 1, {micro_batch: plan.micro_batch}),
    ...is(plan.zero, {zero: plan.zero}), ...(layout.dp_replicate > 1 && layout.dp_shard > 1 ? {dp_replicate: layout.dp_replicate, dp_shard: layout.dp_shard} : {}),
    ...(modulesOf(plan) ? {recompute_modules: modulesOf(plan)} : is(plan.recompute !== "none", {recompute: plan.recompute})),
    ...(plan.attention === "flash" ? {} : {attention: plan.attention}), ...(isUsual(plan.order) ? {} : {order: plan.order.join("-")}),
    ...(["megatron", "megatron-sp"].includes(plan.rules) ? {} : {rules: plan.rules}),
  };
};
const use = plan => set(Object.fromEntries(Object.entries(knobsOf(plan)).map(([name, value]) => [name, String(value)])), Object.fromEntries(Object.entries(state).filter(([name]) => !known.knobs.includes(name))));
const showPlans = () => {
  if (!result.plans.length) {
    const least = result.least_memory.memory;
    showSearch(`No plan fits: the smallest needs ${least ? size(least.total) : "more"} of ${size(result.memory_usable)} usable.`);
    $("plans").replaceChildren();
    showRemediesOfSearch();
    return;
  }
  const best = result.plans[0].step_time;
  $("plans").replaceChildren(table([">rank", "", "plan", ">step time", ">slower", ">MFU", ">memory", ">fits"], result.plans.map(each => [String(each.place),
    button("use", () => use(each.plan), `Use plan ${each.place}: ${planText(each.plan)}`), planText(each.plan), time(each.step_time),
    each.step_time > 1.0005 * best ? share(each.step_time / best - 1) : "", share(each.mfu_palm), size(each.memory.total), chance(each.fits_probability)])));
};
const showRemediesOfSearch = () => { if (answer && !answer.fits) showRemedies(result.remedies || []); };
const showChanges = async () => {
  const asked = JSON.stringify(body()), place = $("changes").lastChild;
  if (place.dataset.asked === asked) return;
  place.dataset.asked = asked;
  place.textContent = "Predicting...";
  try {
    const found = await ask("explain", body(), {signal: extras.signal});
    if (place.dataset.asked !== asked) return;
    const rows = found.neighbours.filter(each => each.prediction.step_time).sort((a, b) => a.prediction.step_time - b.prediction.step_time).map(each => [
      button("use", () => use(each.prediction.plan), "Use this plan"), Object.entries({...each.knobs, ...each.changed}).map(([name, value]) => `${words(name)} ${value}`).join(", "), time(each.prediction.step_time),
      `${each.prediction.step_time >= found.step_time ? "+" : "−"}${(100 * Math.abs(each.prediction.step_time / found.step_time - 1)).toFixed(1)} %`, size(each.prediction.memory.total),
      chance(each.prediction.fits_probability)]);
    place.replaceChildren(table(["", "changed", ">step time", ">change", ">memory", ">fits"], rows));
  } catch (error) {
    if (place.dataset.asked !== asked) return;
    place.dataset.asked = "";
    place.textContent = error.name === "AbortError" ? "" : error.message;
  }
};

// --- start ---
makeFields();
readLink();
$("form").onsubmit = event => event.preventDefault();
$("keep").onclick = () => { kept = {state: {...state}, pasted}; keptAnswer = answer; history.replaceState(null, "", linkOf()); if (answer) showComparison(); };
$("copy").onclick = async () => { await navigator.clipboard.writeText(location.href); $("copy").textContent = "Copied"; setTimeout(() => { $("copy").textContent = "Copy link"; }, 1500); };
$("cancel").onclick = () => { if (running) running.abort(); };
$("read").onclick = () => paste($("config").value);
$("clear").onclick = () => paste("");
$("file").onchange = async event => { if (event.target.files[0]) paste(await event.target.files[0].text()); };
$("changes").ontoggle = () => { if ($("changes").open && answer) showChanges(); };
addEventListener("popstate", () => { readLink(); keptAnswer = null; update(); });
$("paste").open = Boolean(pasted);
ready.then(showKnown);
update();
