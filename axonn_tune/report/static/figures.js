/* Figures: plotly is unpacked when the first one comes into sight, and each is drawn when it does. */

/* What of its least width a map may have on a phone. */
let plotlyReady = null;
const drawnFigures = new Set();

function loadPlotly() {
  plotlyReady ??= (async () => {
    const packed = atob(document.getElementById("plotly").textContent.trim());
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  })();
  return plotlyReady;
}

/* A color of style.css as plotly knows it. */
const probe = element("span", { hidden: true });
function themeColor(name) {
  const [variable, opacity] = name.split("/");
  probe.style.color = `var(${variable})`;
  if (!probe.isConnected) document.body.append(probe);
  const color = getComputedStyle(probe).color;
  return opacity && opacity !== "1.0" ? color.replace("rgb(", "rgba(").replace(")", `, ${opacity})`) : color;
}

/* A copy of a figure in which names of colors are colors; lists of numbers are shared. */
function themed(value) {
  if (typeof value === "string") return /^--[a-z]/.test(value) ? themeColor(value) : value;
  if (Array.isArray(value)) return typeof value.at(-1) === "number" ? value : value.map(themed);
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one)]));
  return value;
}

function baseLayout(narrow) {
  const axis = { gridcolor: "--grid", zerolinecolor: "--line", linecolor: "--line", automargin: true, ticks: "", title: { standoff: 8 } };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: "--text", size: narrow ? 11 : 12.5, family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" },
    margin: { l: 8, r: narrow ? 8 : 16, t: 8, b: 8, pad: 2 },
    hoverlabel: { bgcolor: "--panel", bordercolor: "--line", font: { color: "--text" }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "--muted", activecolor: "--accent" },
    dragmode: narrow ? false : "zoom",
    xaxis: axis,
    yaxis: axis,
    hovermode: "closest",
    showlegend: false,
  };
}

function mergedLayout(base, own) {
  const found = { ...base };
  for (const [key, value] of Object.entries(own)) {
    const both = value && found[key] && typeof value === "object" && !Array.isArray(value);
    found[key] = both ? mergedLayout(found[key], value) : value;
  }
  return found;
}

class Figure {
  constructor(block) {
    this.block = block;
    this.choice = 0;
    this.place = element("div", { className: "waiting" }, "drawing…");
    this.box = element("div", { style: `height:${block.height}px`, role: "img", "aria-label": `${block.title}. ${block.note}` }, this.place);
    this.hidden = new Set();
    this.root = element("div", { className: "figure" }, this.buttons(), this.legend(), element("div", { className: "drawing" }, this.box));
    sight.observe(this.box);
    this.box.figure = this;
  }

  buttons() {
    if (this.block.choices.length < 2) return null;
    this.pressed = this.block.choices.map((choice, number) => {
      const button = element("button", { type: "button", "aria-pressed": String(number === 0) }, choice.label);
      button.addEventListener("click", () => this.choose(number));
      return button;
    });
    return element("div", { className: "choices", role: "group" }, ...this.pressed);
  }

  /* What each color or mark means; a click hides it. */
  legend() {
    const named = this.block.figure.data.filter((trace) => trace.name && trace.showlegend !== false);
    if (named.length < 2 || this.block.figure.layout.showlegend === false) return null;
    return element("div", { className: "legend" }, ...named.map((trace) => {
      const button = element("button", { type: "button", "aria-pressed": "true", title: "show or hide" }, swatch(trace), trace.name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(trace.name)) this.hidden.add(trace.name);
        button.setAttribute("aria-pressed", String(!this.hidden.has(trace.name)));
        if (drawnFigures.has(this)) this.draw();
      });
      return button;
    }));
  }

  choose(number) {
    this.choice = number;
    this.pressed.forEach((button, place) => button.setAttribute("aria-pressed", String(place === number)));
    if (drawnFigures.has(this)) this.draw();
  }

  /* The figure as the choice has it. */
  chosen() {
    const data = structuredClone(this.block.figure.data);
    const layout = structuredClone(this.block.figure.layout);
    const choice = this.block.choices[this.choice];
    if (choice) {
      for (const [trace, change] of Object.entries(choice.traces)) {
        for (const [path, value] of Object.entries(change)) assign(data[trace], path, Array.isArray(value) ? value[0] : value);
      }
      for (const [path, value] of Object.entries(choice.layout)) assign(layout, path, value);
    }
    return { data, layout };
  }

  async draw() {
    await loadPlotly();
    const narrow = window.innerWidth < NARROW;
    const { data, layout } = this.chosen();
    this.place.remove();
    drawnFigures.add(this);
    for (const trace of data) if (this.hidden.has(trace.name)) trace.visible = false;
    const whole = themed(mergedLayout(baseLayout(narrow), layout));
    await Plotly.react(this.box, themed(data), { ...whole, height: this.block.height, autosize: true }, {
      responsive: true,
      displaylogo: false,
      displayModeBar: narrow ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    });
    this.box.dataset.drawn = "true";
  }
}

const GLYPHS = { "line-ns-open": "├┤", "line-ew-open": "━", "x-thin-open": "×", "circle-open": "○", "square-open": "□", "diamond-open": "◇", "triangle-up-open": "△", "cross-thin-open": "+", "hash-open": "#", "diamond": "◆", "square": "■", "triangle-up": "▲" };

function swatch(trace) {
  const color = [trace.marker?.color, trace.line?.color].flat().find((one) => typeof one === "string") ?? "--text";
  const [variable, opacity] = color.split("/");
  const glyph = GLYPHS[trace.marker?.symbol] ?? (trace.mode === "lines" ? "┄" : "");
  const style = glyph ? `color:var(${variable})` : `background:var(${variable});opacity:${opacity ?? 1}`;
  return element("span", { className: glyph ? "glyph" : "swatch", style }, glyph);
}

function assign(target, path, value) {
  const keys = path.split(".");
  const last = keys.pop();
  let place = target;
  for (const key of keys) place = place[key] ??= {};
  const both = value && place[last] && typeof value === "object" && !Array.isArray(value);
  place[last] = both ? { ...place[last], ...value } : value;
}

const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    sight.unobserve(entry.target);
    entry.target.figure.draw();
  }
}, { rootMargin: "200px" });

function redrawFigures() {
  for (const figure of drawnFigures) {
    if (figure.box.isConnected) figure.draw();
    else drawnFigures.delete(figure);
  }
}
