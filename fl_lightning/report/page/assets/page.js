"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const { lines, figures } = content;
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const state = { setting: 0, band: "seeds", hidden: new Set(), picks: {}, views: {}, axes: {} };
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const inSetting = () => lines.map((line, place) => ({ ...line, place })).filter((line) => line.setting === state.setting);
  const make = (tag, text, attributes = {}) => {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };

  // --- rows ---------------------------------------------------------------------------------------------------------

  const rowsOf = (figure, keep = () => true) => {
    const fields = Object.keys(figure.columns);
    const count = fields.length ? figure.columns[fields[0]].length : 0;
    const found = [];
    for (let at = 0; at < count; at += 1) {
      const row = {};
      for (const field of fields) row[field] = figure.columns[field][at];
      if (!keep(row)) continue;
      for (const [field, texts] of Object.entries(figure.names)) row[field] = texts[row[field]];
      if ("s" in row) row.label = lines[row.s].label;
      found.push(row);
    }
    return found;
  };
  const here = (row) => ("s" in row ? lines[row.s].setting === state.setting : row.g === state.setting);
  const picksOf = (figure) => {
    const own = new Set();
    rowsOf(figure, (row) => here(row) && !state.hidden.has(row.s)).forEach((row) => own.add(row.pick));
    return figure.picks.map((text, place) => ({ text, place })).filter((pick) => own.has(pick.place));
  };
  const chosen = (figure) => state.picks[figure.key];
  const shown = (figure) =>
    rowsOf(figure, (row) => here(row) && !(state.hidden.has(row.s)) && (chosen(figure) === undefined || row.pick === chosen(figure)));

  // --- drawing ------------------------------------------------------------------------------------------------------

  const filled = (node, values) => {
    if (typeof node === "string") return Object.hasOwn(values, node) ? values[node] : node;
    if (Array.isArray(node)) return node.map((each) => filled(each, values));
    if (node && typeof node === "object")
      return Object.fromEntries(Object.entries(node).map(([name, each]) => [name, filled(each, values)]));
    return node;
  };
  const theme = () => {
    const style = getComputedStyle(root);
    const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => style.getPropertyValue(name).trim());
    const axis = { labelColor: ink, titleColor: ink, gridColor: line, domainColor: soft, tickColor: soft, titleFontWeight: 500 };
    return {
      background: "transparent", font: "system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif", view: { stroke: null },
      axis, legend: { labelColor: ink, titleColor: ink, symbolBaseFillColor: ink, symbolBaseStrokeColor: ink }, header: { labelColor: ink, titleColor: ink, labelFontWeight: 600 },
      rule: { color: soft }, title: { color: ink },
    };
  };
  const bubble = (width, columns) => Math.max(4, Math.min(620, Math.round((1.1 * (width / Math.max(1, columns))) ** 2)));
  const axisOf = (figure) => { // few rounds have a tick each; the library would put ticks between them, named alike
    const rounds = [...new Set(isCurve(figure) ? shown(figure).map((row) => row.x) : [])].sort((a, b) => a - b);
    return { tickMinStep: 1, format: "d", ...(rounds.at(-1) - rounds[0] < 3 ? { values: rounds } : {}) };
  };
  const specOf = (figure, width) => {
    const own = inSetting();
    const labels = own.map((line) => line.label);
    const values = {
      $labels: labels,
      $colour: { domain: labels, range: own.map((line) => (isDark() ? line.dark : line.light)) },
      $dash: { domain: labels, range: own.map((line) => line.dash) },
      $shape: { domain: labels, range: own.map((line) => line.shape) },
      $whole: Math.max(220, width - 75),
      $third: Math.max(150, Math.floor(width / 3) - 62),
      $full: Math.max(260, width - 5),
      $limit: Math.max(80, Math.floor(0.38 * width)),
      $rounds: axisOf(figure),
      $area: bubble(width, new Set(figure.columns.client).size),
    };
    const spec = filled(figure.spec, values);
    return {
      $schema: "https://vega.github.io/schema/vega-lite/v6.json", ...spec, data: { name: "rows", values: shown(figure) },
      config: theme(), usermeta: { embedOptions: {} },
    };
  };
  const draw = async (figure) => {
    const place = document.querySelector(`[data-figure="${figure.key}"]`);
    state.views[figure.key]?.finalize();
    delete state.views[figure.key];
    const target = make("div");
    if (!shown(figure).length) {
      place.replaceChildren(make("p", "None of the runs that are shown has this.", { class: "empty" }));
      return;
    }
    place.replaceChildren(target);
    const actions = { export: { png: true, svg: true }, source: false, compiled: false, editor: false };
    const options = {
      renderer: "svg", mode: "vega-lite", ast: true, logLevel: 1, actions, downloadFileName: figure.key, hover: true,
      tooltip: (_, event, item, value) => hover(figure, event, value ? item.datum.datum ?? item.datum : null),
    };
    const result = await vegaEmbed(target, specOf(figure, place.clientWidth), options);
    state.views[figure.key] = result;
    state.axes[figure.key] = JSON.stringify(axisOf(figure));
    band(result.view);
    await result.view.runAsync();
  };
  const band = (view) => {
    try { view.signal("band", state.band); } catch { /* this figure has no choice of bands */ }
  };
  let turn = 0;
  const drawAll = async () => {
    const own = (turn += 1);
    root.dataset.drawn = "no";
    for (const figure of figures) {
      if (own !== turn) return;
      await draw(figure);
      await new Promise((resume) => setTimeout(resume));
    }
    root.dataset.drawn = "yes";
  };
  const update = async () => {
    for (const figure of figures) {
      const result = state.views[figure.key];
      const rows = shown(figure);
      const stays = state.axes[figure.key] === JSON.stringify(axisOf(figure)); // its ticks do
      if (!result || !rows.length || !stays || !("s" in figure.columns) || "facet" in figure.spec) { // whose panels stay else
        if ("s" in figure.columns) await draw(figure);
        continue;
      }
      result.view.data("rows", rows);
      band(result.view);
      await result.view.runAsync();
    }
  };

  // --- hovering -----------------------------------------------------------------------------------------------------

  const tip = document.body.appendChild(make("div", null, { id: "tip", hidden: "" }));
  const digits = (value) => String(Number.isInteger(value) ? value : Number(value.toPrecision(4))); // a seed has all of its
  const number = (value) => (typeof value === "number" ? digits(value) : value === true ? "yes" : value === false ? "no" : String(value));
  const isCurve = (figure) => "x" in figure.columns && "y" in figure.columns && figure.heads.x === "round";
  const hover = (figure, event, value) => {
    if (!value) { tip.hidden = true; return; }
    const table = make("table");
    const add = (name, text) => {
      const row = table.appendChild(make("tr"));
      row.append(make("th", name), make("td", text));
    };
    if (isCurve(figure)) {
      const at = shown(figure).filter((row) => row.x === Number(value.x) && (!("term" in row) || row.term === value.term));
      add(`round ${value.x}`, value.term ?? "");
      const end = state.band === "clients" && "ch" in figure.columns ? "ch" : "sh";
      at.sort((a, b) => b.y - a.y).forEach((row) => {
        const over = state.band !== "none" && row[end] !== null && row[end] !== undefined ? ` ± ${number(row[end] - row.y)}` : "";
        add(row.label, number(row.y) + over);
      });
    } else Object.entries(figure.heads).forEach(([field, head]) => { if (field in value) add(head, cell(figure, value, field)); });
    tip.replaceChildren(table);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 16, window.innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, window.innerHeight - box.height - 8))}px`;
  };

  // --- tables -------------------------------------------------------------------------------------------------------

  const MOST_ROWS = 2000;
  const cell = (figure, row, field) => {
    const value = field === "pick" ? figure.picks[row.pick] : row[field];
    return value === null || value === undefined ? "–" : number(value);
  };
  const fill = (details, figure) => {
    details.querySelectorAll("div").forEach((node) => node.remove());
    const rows = shown(figure);
    const fields = Object.entries(figure.heads);
    const box = make("div", null, { class: "wide", tabindex: "0", role: "region", "aria-label": "Data table" });
    const save = make("button", "Save as CSV", { type: "button" });
    save.addEventListener("click", () => {
      const formula = (text) => /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)); // a spreadsheet would run it
      const quoted = (text) => `"${formula(String(text)) ? "'" : ""}${String(text).replaceAll('"', '""')}"`;
      const text = [fields.map(([, head]) => quoted(head)), ...rows.map((row) => fields.map(([field]) => quoted(cell(figure, row, field))))];
      const link = make("a", null, { download: `${figure.key}.csv` });
      link.href = URL.createObjectURL(new Blob([text.map((each) => each.join(",")).join("\n")], { type: "text/csv" }));
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    const table = make("table");
    const rest = rows.length > MOST_ROWS ? `; the first ${MOST_ROWS} of ${rows.length} rows, all are in the CSV file` : "";
    table.append(make("caption", `${byId(`${figure.key}-title`).textContent}${rest}`));
    const head = table.appendChild(make("thead")).appendChild(make("tr"));
    fields.forEach(([, text]) => head.append(make("th", text, { scope: "col" })));
    const body = table.appendChild(make("tbody"));
    rows.slice(0, MOST_ROWS).forEach((row) => {
      const line = body.appendChild(make("tr"));
      fields.forEach(([field], place) => line.append(place ? make("td", cell(figure, row, field)) : make("th", cell(figure, row, field), { scope: "row" })));
    });
    box.append(save, table);
    details.append(box);
  };
  const refill = () => document.querySelectorAll("details[data-table][open]").forEach((details) => fill(details, figures.find((figure) => figure.key === details.dataset.table)));

  // --- what is shown ------------------------------------------------------------------------------------------------

  const said = (text) => { byId("said").textContent = text; };
  const MARKS = {
    circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", diamond: "M0,-5L4,0L0,5L-4,0Z", "triangle-up": "M0,-5L5,4L-5,4Z",
    square: "M-4,-4H4V4H-4Z", cross: "M-5,-2H-2V-5H2V-2H5V2H2V5H-2V2H-5Z",
  };
  const swatch = (line) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({ width: 30, height: 10, overflow: "visible", "aria-hidden": "true" })) svg.setAttribute(name, value);
    const own = { x1: 0, x2: 30, y1: 5, y2: 5, "stroke-width": 3, stroke: isDark() ? line.dark : line.light, "stroke-dasharray": line.dash.join(" ") };
    for (const [name, value] of Object.entries(own)) stroke.setAttribute(name, value);
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "path");
    for (const [name, value] of Object.entries({ d: MARKS[line.shape], fill: own.stroke, transform: "translate(15 5)" })) mark.setAttribute(name, value);
    svg.append(stroke, mark);
    return svg;
  };
  const toggles = () => {
    byId("toggles").replaceChildren(...inSetting().map((line) => {
      const label = make("label");
      const box = make("input", null, { type: "checkbox", "data-line": line.place });
      box.checked = !state.hidden.has(line.place);
      box.addEventListener("change", () => {
        if (box.checked) state.hidden.delete(line.place); else state.hidden.add(line.place);
        said(`${line.label} is ${box.checked ? "shown" : "hidden"}`);
        picks(); refill();
        return update();
      });
      label.append(box, swatch(line), make("span", line.runs > 1 ? `${line.label}, ${line.runs} seeds` : line.label));
      return label;
    }));
  };
  const picks = () => figures.forEach((figure) => {
    const select = document.querySelector(`[data-pick="${figure.key}"]`);
    const own = figure.picks.length ? picksOf(figure) : [];
    const stays = own.some((pick) => pick.place === chosen(figure));
    if (!stays) state.picks[figure.key] = own.length ? own[0].place : figure.picks.length ? -1 : undefined;
    if (!select) return;
    select.replaceChildren(...own.map((pick) => make("option", pick.text, { value: pick.place })));
    if (own.length) select.value = String(chosen(figure));
    select.onchange = () => { state.picks[figure.key] = Number(select.value); refill(); return draw(figure); };
  });
  const all = (visible) => {
    inSetting().forEach((line) => { if (visible) state.hidden.delete(line.place); else state.hidden.add(line.place); });
    toggles(); picks(); refill(); said(visible ? "all runs are shown" : "no run is shown");
    return update();
  };
  const themed = () => {
    byId("theme").setAttribute("aria-pressed", String(isDark()));
    if (lines.length) { toggles(); return drawAll(); }
    return undefined;
  };

  byId("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; return themed(); });
  // For the paper the system turns light and back, sooner than all can be drawn again.
  system.addEventListener("change", () => (window.matchMedia("print").matches ? undefined : themed()));
  byId("print").addEventListener("click", async () => {
    const before = root.dataset.theme;
    root.dataset.theme = "light";
    await themed();
    window.print();
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    await themed();
  });
  if (!lines.length) { themed(); root.dataset.drawn = "yes"; return; }
  byId("all").addEventListener("click", () => all(true));
  byId("none").addEventListener("click", () => all(false));
  byId("setting")?.addEventListener("change", (event) => {
    state.setting = Number(event.target.value);
    state.hidden.clear(); toggles(); picks(); refill();
    return drawAll();
  });
  document.querySelectorAll('input[name="band"]').forEach((radio) => {
    if (radio.checked) state.band = radio.value;
    radio.addEventListener("change", () => { state.band = radio.value; return update(); });
  });
  document.querySelectorAll("details[data-table]").forEach((details) => details.addEventListener("toggle", () => {
    const figure = figures.find((each) => each.key === details.dataset.table);
    if (details.open) fill(details, figure); else details.querySelectorAll("div").forEach((node) => node.remove());
  }));
  let width = window.innerWidth;
  let waiting;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 250);
  });
  picks();
  themed();
})();
