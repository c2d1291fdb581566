"use strict";
(() => {
  const root = document.documentElement;
  const controls = document.getElementById("controls");
  const holders = [...document.querySelectorAll("[data-chart]")];
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  // --- theme: the reader's choice, else the system's -------------------------------------------
  const button = document.getElementById("theme");
  let chosen = null;

  function setTheme(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
    redraw();
  }
  const theme = () => chosen ?? (prefersDark.matches ? "dark" : "light");

  // --- charts ------------------------------------------------------------------------------------
  const ink = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // Colours are written "@name" in the figures: a name of the style sheet, which knows the theme.
  function themed(value, key = "") {
    if (Array.isArray(value)) return value.map((item) => themed(item, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, themed(item, name)]));
    }
    return /color$/.test(key) && typeof value === "string" && value[0] === "@" ? ink(value.slice(1)) : value;
  }

  function frame() {
    const axis = {
      automargin: true, gridcolor: ink("grid"), linecolor: ink("line"), zerolinecolor: ink("line"),
      tickcolor: ink("line"), title: { standoff: 8, font: { size: 12, color: ink("faint") } },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
        font: { color: ink("ink"), size: 12, family: getComputedStyle(document.body).fontFamily },
        xaxis: axis, yaxis: axis, margin: { l: 12, r: 14, t: 10, b: 12 },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
        hoverlabel: { bgcolor: ink("panel"), bordercolor: ink("line"), font: { color: ink("ink") }, align: "left" },
      },
    };
  }

  const shownPeers = () =>
    controls ? new Set([...controls.querySelectorAll("[name=peer]:checked")].map((box) => box.value)) : null;

  function draw(holder) {
    const { data, layout } = themed(figures[holder.dataset.chart]);
    const peers = shownPeers();
    for (const trace of data) if (trace.meta?.peer && peers) trace.visible = peers.has(trace.meta.peer);
    // A finger that drags means to scroll the page.
    const coarse = matchMedia("(pointer: coarse)").matches;
    // Plotly's toolbar would cover legends and titles: dragging zooms, a double click resets, PNG saves.
    const options = { responsive: true, displayModeBar: false };
    holder.dataset.drawn = "yes";
    return Plotly.react(holder, data, { ...layout, template: frame(), dragmode: coarse ? false : "zoom" }, options);
  }

  const isShown = (holder) => holder.closest("[hidden]") === null;
  const near = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      near[isIntersecting ? "add" : "delete"](target);
      if (isIntersecting && !target.dataset.drawn) draw(target);
    }
  }, { rootMargin: "600px" });

  // What is near the window is drawn now, the others when they come near.
  function redraw() {
    for (const holder of holders) {
      delete holder.dataset.drawn;
      if (near.has(holder) && isShown(holder)) draw(holder);
    }
  }

  // --- which cells the charts show ---------------------------------------------------------------
  const switches = ["device", "mode", "dtype"];
  const views = [...document.querySelectorAll("figure[data-mode]")];
  const value = (name) => controls.querySelector(`[name=${name}]:checked`)?.value;

  function setView() {
    // A later switch offers what exists under the earlier ones, and moves there when its choice does not.
    let left = views;
    for (const name of switches) {
      const found = new Set(left.map((figure) => figure.dataset[name]));
      const boxes = [...controls.querySelectorAll(`[name=${name}]`)];
      for (const box of boxes) box.disabled = !found.has(box.value);
      if (!found.has(value(name))) boxes.find((box) => !box.disabled).checked = true;
      left = left.filter((figure) => figure.dataset[name] === value(name));
    }
    for (const figure of views) figure.hidden = !left.includes(figure);
    for (const note of document.querySelectorAll("[data-nothing]")) {
      note.hidden = note.parentElement.querySelector("figure:not([hidden])") !== null;
    }
    redraw();
  }

  // --- tables --------------------------------------------------------------------------------------
  const collator = new Intl.Collator("en", { numeric: true });

  function order(left, right) {
    const numbers = left !== "" && right !== "" && !isNaN(left) && !isNaN(right);
    return numbers ? left - right : collator.compare(left, right);
  }

  function sortBy(table, column, heading) {
    const body = table.tBodies[0];
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const figureColumn = !heading.classList.contains("text");
    const keyed = [...body.rows].map((row) => {
      const cell = row.cells[column];
      return [cell.dataset.value ?? (figureColumn ? "" : cell.textContent), row];
    });
    // What has no figure stays at the end, whichever way the others run.
    keyed.sort(([a], [b]) => (a === "") - (b === "") || (descending ? -order(a, b) : order(a, b)));
    body.append(...keyed.map(([, row]) => row));
  }

  function makeSortable(table) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const control = document.createElement("button");
      control.type = "button";
      control.append(...heading.childNodes);
      control.addEventListener("click", () => sortBy(table, column, heading));
      heading.append(control);
    });
  }

  const filters = document.getElementById("filters");

  function filter() {
    const wanted = Object.fromEntries(new FormData(filters));
    const names = [...filters.querySelectorAll("select")].map((item) => item.name);
    const words = wanted.search.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.getElementById("cell-table").tBodies[0].rows];
    for (const row of rows) {
      const chosen = names.every((name) => !wanted[name] || row.dataset[name] === wanted[name]);
      row.hidden = !chosen || !words.every((word) => row.textContent.toLowerCase().includes(word));
    }
    const shown = rows.filter((row) => !row.hidden).length;
    document.getElementById("count").textContent = `${shown} of ${rows.length} rows`;
  }

  function save(event) {
    const figure = event.currentTarget.closest("figure");
    const holder = figure.querySelector(".chart");
    const name = figure.querySelector("b").textContent.replace(/\W+/g, "-");
    Plotly.downloadImage(holder, { format: "png", scale: 2, filename: `attnspan-${name}` });
  }

  // --- start ---------------------------------------------------------------------------------------
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = theme() === "dark" ? "light" : "dark";
    setTheme(chosen);
  });
  prefersDark.addEventListener("change", () => setTheme(theme()));
  setTheme(theme());
  if (controls) {
    controls.addEventListener("change", (event) => (event.target.name === "peer" ? redraw() : setView()));
    controls.addEventListener("submit", (event) => event.preventDefault());
    setView();
  }
  document.querySelectorAll("[data-sortable]").forEach(makeSortable);
  for (const item of document.querySelectorAll("button.save")) {
    item.hidden = false;
    item.addEventListener("click", save);
  }
  if (filters) {
    filters.addEventListener("input", filter);
    filters.addEventListener("submit", (event) => event.preventDefault());
    filter();
  }
  for (const holder of holders) watcher.observe(holder);

  // Paper is white and narrow, and shows what was not scrolled to.
  addEventListener("beforeprint", () => {
    setTheme("light");
    for (const holder of holders) if (isShown(holder)) draw(holder).then(() => Plotly.relayout(holder, { width: 660 }));
  });
  addEventListener("afterprint", () => {
    for (const holder of holders) if (holder.data) Plotly.relayout(holder, { width: null, autosize: true });
    setTheme(theme());
  });
})();
