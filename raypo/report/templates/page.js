"use strict";
(() => {
  const COLOURS = document.body.dataset.colours.split(" ");
  const PAGE = 24;
  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const unpack = async (id, page = document) => {
    const packed = page.getElementById(id).textContent.trim();
    if (!packed) return "";
    const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  // Charts

  const narrow = () => window.innerWidth < 820;
  const layoutOf = (layout) => {
    const ink = colour("--ink"), line = colour("--line");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, exponentformat: "power" };
    return {
      margin: { l: 50, r: 14, t: 10, b: 44 }, hovermode: "x unified", dragmode: narrow() ? false : "zoom",
      ...layout,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 }, ...layout.legend },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12, family: "inherit" },
      colorway: COLOURS, modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: ink },
      hoverlabel: { bgcolor: colour("--paper"), bordercolor: line, font: { color: ink } },
      xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis },
    };
  };
  const drawn = new Map();
  const draw = (element, figure) => {
    drawn.set(element, figure);
    const layout = layoutOf(figure.layout);
    if (figure.data.some((trace) => trace.hovertemplate || trace.orientation === "h")) layout.hovermode = "closest";
    return Plotly.react(element, figure.data, layout, {
      responsive: true, displaylogo: false,
      displayModeBar: narrow() ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    });
  };
  const redraw = () => drawn.forEach((figure, element) => draw(element, figure));

  const explore = (element, choice, columns) => {
    const names = [...new Set(Object.values(columns).flatMap((run) => Object.keys(run)))];
    names.filter((name) => name !== "step").sort().forEach((name) => choice.add(new Option(name, name)));
    const show = () => {
      const data = Object.entries(columns).filter(([, run]) => run[choice.value]).map(([run, values]) => ({
        x: values.step.filter((_, i) => values[choice.value][i] !== null),
        y: values[choice.value].filter((value) => value !== null),
        name: run, mode: "lines+markers", marker: { size: 5 },
      }));
      const layout = { xaxis: { title: { text: "step" } }, yaxis: { title: { text: choice.value } }, showlegend: data.length > 1 };
      draw(element, { data, layout });
    };
    choice.addEventListener("change", show);
    if (names.includes("ppo/policy_loss")) choice.value = "ppo/policy_loss";
    if (choice.options.length) show();
  };

  // Samples

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const short = (value) => (value === undefined ? "-" : Math.abs(value) < 1e-6 ? "0" : Number(value.toPrecision(3)).toString());

  const browse = (root, samples) => {
    const form = root.querySelector("form"), list = root.querySelector(".list");
    const more = root.querySelector(".more"), count = root.querySelector(".count"), key = root.querySelector(".key");
    const field = (name) => form.elements[name];
    const unique = (name) => [...new Set(samples.map((sample) => sample[name]))];
    const runs = unique("run");
    let shown = PAGE, across = null;

    field("run").add(new Option("all", ""));
    runs.forEach((run) => field("run").add(new Option(run, run)));
    field("run").parentElement.hidden = runs.length < 2;
    field("step").add(new Option("all", ""));
    unique("step").sort((a, b) => a - b).forEach((step) => field("step").add(new Option(step, step)));
    const kinds = [...new Set(samples.map((sample) => (sample.held_out ? "held out" : "trained")))];
    field("kind").add(new Option("all", ""));
    kinds.forEach((kind) => field("kind").add(new Option(kind, kind)));
    field("kind").parentElement.hidden = kinds.length < 2;
    const colours = { advantages: "advantage", changes: "log-prob against the reference" };
    Object.keys(colours).filter((name) => samples.some((sample) => sample[name] && sample.tokens))
      .forEach((name) => field("colour").add(new Option(colours[name], name)));
    field("colour").add(new Option("none", ""));

    const scores = samples.map((sample) => sample.score).filter((score) => score !== undefined);
    const lowest = Math.min(...scores), highest = Math.max(...scores);
    const scales = {};
    Object.keys(colours).forEach((name) => {
      const sizes = samples.flatMap((sample) => sample[name] || []).map(Math.abs).sort((a, b) => a - b);
      scales[name] = sizes[Math.floor(0.95 * sizes.length)] || 1;
    });
    const stepsOf = new Map();
    const idOf = (sample) => `${sample.held_out ? "held out" : "trained"} ${sample.prompt_id} ${sample.prompt}`;
    samples.forEach((sample) => {
      if (!stepsOf.has(idOf(sample))) stepsOf.set(idOf(sample), new Set());
      stepsOf.get(idOf(sample)).add(`${sample.run} ${sample.step}`);
    });

    const lengthOf = (sample) => [sample, ...(sample.more || [])].reduce((sum, each) => sum + each.num_tokens, 0);
    const tint = (value, name) => {
      if (value === null || value === undefined) return "";
      const strength = Math.min(Math.abs(value) / scales[name], 1) * 0.6;
      return `rgba(${colour(value > 0 ? "--more" : "--less")}, ${strength.toFixed(2)})`;
    };
    const response = (sample) => {
      const text = make("div", "text response"), name = field("colour").value;
      if (!sample.tokens) { text.textContent = sample.response; return text; }
      const others = new Set(sample.others), rewards = sample.rewards || {}, tools = sample.tools || {};
      sample.tokens.forEach((piece, i) => {
        const special = /^<[^ ]+>$/.test(piece) && i === sample.tokens.length - 1;
        const kind = special ? "token special" : others.has(i) ? "token other" : "token";
        const token = make("span", kind, piece);
        const values = sample[name];
        if (values && !others.has(i)) token.style.background = tint(values[i], name);
        token.title = others.has(i) ? "of the environment: read, not trained" : Object.keys(colours).filter((each) => sample[each])
          .map((each) => `${colours[each]} ${short(sample[each][i] ?? undefined)}`).join("\n");
        text.append(token);
        if (rewards[i] !== undefined) text.append(make("span", "earned", ` ${rewards[i] > 0 ? "+" : ""}${rewards[i]} `));
        (tools[i] || []).forEach((words) => text.append(make("div", "tool", words)));
      });
      const left = sample.num_tokens - sample.tokens.length;
      if (left > 0) text.append(make("span", "quiet", ` … ${left} more tokens`));
      if (sample.error) text.append(make("div", "failed", sample.error));
      return text;
    };
    const card = (sample, { withPrompt }) => {
      const box = make("article", "sample");
      const meta = make("div", "meta");
      if (withPrompt) meta.append(make("span", "", `${runs.length > 1 ? `${sample.run}, ` : ""}step ${sample.step}${sample.held_out ? ", held out" : ""}`));
      const score = make("span", "", "score ");
      score.append(make("b", "", short(sample.score)));
      meta.append(score);
      if (sample.sources) meta.append(make("span", "", Object.entries(sample.sources).map(([name, value]) => `${name} ${value}`).join(", ")));
      if (sample.advantage !== undefined) meta.append(make("span", "", `advantage ${short(sample.advantage)}`));
      if (sample.kl !== undefined) meta.append(make("span", "", `KL ${short(sample.kl)}`));
      if (sample.turns) meta.append(make("span", "", `${sample.turns} turns`));
      meta.append(make("span", "", `${lengthOf(sample)} tokens${sample.finish === "length" ? ", cut off" : ""}`));
      if (sample.metrics) meta.append(make("span", "", Object.entries(sample.metrics).map(([name, value]) => `${name} ${value}`).join(", ")));
      if (sample.label !== undefined) meta.append(make("span", "", `label ${sample.label}`));
      box.append(meta);
      if (sample.score !== undefined && highest > lowest) {
        const bar = make("div", "bar"), fill = make("i");
        fill.style.width = `${100 * (sample.score - lowest) / (highest - lowest)}%`;
        bar.append(fill); box.append(bar);
      }
      if (withPrompt) box.append(make("div", "text prompt", sample.prompt));
      box.append(response(sample));
      (sample.more || []).forEach((other, i) => box.append(
        make("div", "meta", `conversation ${i + 2} of ${sample.more.length + 1}`), make("div", "text prompt", other.prompt), response(other)));
      const steps = stepsOf.get(idOf(sample)).size;
      if (withPrompt && steps > 1) {
        const link = make("button", "link", `this prompt in ${steps} steps, side by side`);
        link.type = "button";
        link.addEventListener("click", () => { across = idOf(sample); show(); root.scrollIntoView(); });
        box.append(link);
      }
      return box;
    };

    const orders = {
      step: (a, b) => a.step - b.step,
      best: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
      worst: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity),
      longest: (a, b) => lengthOf(b) - lengthOf(a),
      kl: (a, b) => (b.kl ?? -Infinity) - (a.kl ?? -Infinity),
    };
    const chosen = () => {
      const run = field("run").value, step = field("step").value, kind = field("kind").value, words = field("text").value.toLowerCase();
      const low = field("low").value === "" ? -Infinity : Number(field("low").value);
      const high = field("high").value === "" ? Infinity : Number(field("high").value);
      const bounded = low > -Infinity || high < Infinity;
      return samples.filter((sample) =>
        (!run || sample.run === run) && (!kind || (kind === "held out") === Boolean(sample.held_out)) && (!step || sample.step === Number(step)) &&
        (!bounded || (sample.score !== undefined && sample.score >= low && sample.score <= high)) &&
        (!words || [sample, ...(sample.more || [])].some((each) => `${each.prompt}\n${each.response}`.toLowerCase().includes(words))),
      ).sort(orders[field("order").value]);
    };
    const explain = () => {
      key.replaceChildren();
      const name = field("colour").value;
      if (!name) return;
      [[-1, "less"], [0.001, "none"], [1, "more"]].forEach(([sign, word]) => {
        const token = make("span", "token", sign === 0.001 ? "0" : `${sign > 0 ? "+" : "−"}${short(scales[name])}`);
        token.style.background = tint(sign * scales[name], name);
        token.title = word;
        key.append(token, " ");
      });
      key.append(`${colours[name]} of a token`);
    };
    const showAcross = () => {
      const same = samples.filter((sample) => idOf(sample) === across).sort(orders.step);
      const back = make("button", "link back", "back to all samples");
      back.type = "button";
      back.addEventListener("click", () => { across = null; show(); });
      count.replaceChildren(`The prompt ${JSON.stringify(same[0].prompt)}${same[0].label !== undefined ? `, label ${same[0].label}` : ""}: `, back);
      const columns = new Map();
      same.forEach((sample) => {
        const name = `${runs.length > 1 ? `${sample.run}, ` : ""}step ${sample.step}`;
        if (!columns.has(name)) {
          const column = make("div", "column");
          column.append(make("h3", "", name));
          columns.set(name, column);
        }
        columns.get(name).append(card(sample, { withPrompt: false }));
      });
      list.className = "list across";
      list.replaceChildren(...columns.values());
      more.hidden = true;
    };
    const show = () => {
      explain();
      if (across) { showAcross(); return; }
      const found = chosen();
      list.className = "list";
      list.replaceChildren(...found.slice(0, shown).map((sample) => card(sample, { withPrompt: true })));
      count.textContent = `${Math.min(shown, found.length)} of ${found.length} samples`;
      more.hidden = found.length <= shown;
    };
    ["input", "change"].forEach((kind) => form.addEventListener(kind, (event) => {
      if (event.target.name !== "colour") { shown = PAGE; across = null; }
      show();
    }));
    form.addEventListener("submit", (event) => event.preventDefault());
    more.addEventListener("click", () => { shown += PAGE; show(); });
    show();
    return show;
  };

  const recolour = [];
  const fill = async (elements, data) => {
    for (const element of elements) {
      if (element.classList.contains("samples")) { recolour.push(browse(element, data[element.id])); continue; }
      if (!window.Plotly) {
        const script = make("script");
        script.textContent = await unpack("packed-plotly");
        document.head.append(script);
      }
      if (element.classList.contains("explorer")) explore(element, byId(`${element.id}-choice`), data[element.id]);
      else await draw(element, data[element.id]);
    }
  };
  const BLOCKS = ".samples, .chart";

  // A live page asks its server for another version, and takes it over without losing the reader's
  // place: charts that are drawn get new data, and sections that the reader operates stay as they are.

  const ASK_EVERY_MS = 3000;
  const take = async (page) => {
    const data = JSON.parse((await unpack("packed-data", page)) || "{}");
    const opened = [...document.querySelectorAll("details[open] summary")].map((each) => each.textContent);
    const y = window.scrollY, fresh = [];
    const sections = [...page.querySelectorAll("main > section")].map((section) => {
      const old = byId(section.id);
      if (old && old.querySelector(".samples, .explorer")) return old;
      section.querySelectorAll(BLOCKS).forEach((element) => {
        const known = byId(element.id);
        if (known && drawn.has(known)) element.replaceWith(known);
        fresh.push(known && drawn.has(known) ? known : element);
      });
      section.querySelectorAll("summary").forEach((each) => { each.parentElement.open = opened.includes(each.textContent); });
      return section;
    });
    document.title = page.title;
    document.querySelector("header").replaceWith(page.querySelector("header"));
    document.querySelector("main").replaceChildren(byId("problem"), ...sections);
    drawn.forEach((_, element) => { if (!element.isConnected) drawn.delete(element); });
    window.scrollTo(0, y);
    await fill(fresh, data);
    window.scrollTo(0, y);
    document.body.dataset.version = page.body.dataset.version;
  };
  const follow = async () => {
    const headers = { "If-None-Match": document.body.dataset.version };
    let told = "";
    try {
      const answer = await fetch(location.href, { headers, cache: "no-store" });
      if (answer.ok) await take(new DOMParser().parseFromString(await answer.text(), "text/html"));
      else if (answer.status !== 304) told = `raypo monitor answers ${answer.status}: this is what it told last.`;
    } catch (error) {
      told = "raypo monitor does not answer any more: this is what it told last.";
      console.error(error);
    }
    const problem = byId("problem");
    problem.hidden = !told;
    problem.textContent = told;
    setTimeout(follow, ASK_EVERY_MS);
  };

  const start = async () => {
    const data = JSON.parse((await unpack("packed-data")) || "{}");
    await fill(document.querySelectorAll(BLOCKS), data);
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => { redraw(); recolour.forEach((show) => show()); });
    document.body.dataset.ready = "true";
    if (document.body.dataset.version) setTimeout(follow, ASK_EVERY_MS);
  };
  start().catch((error) => {
    const problem = byId("problem");
    problem.textContent = `The charts could not be drawn: ${error}. A browser of 2023 or later is needed.`;
    problem.hidden = false;
    console.error(error);
  });
})();
