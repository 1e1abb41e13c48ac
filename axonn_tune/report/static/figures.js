/* Figures: plotly is unpacked for the first one; those in sight are drawn first. */

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

/* Height that the buttons of a figure take above it. */
const MODEBAR = 30;

function baseLayout(narrow) {
  const axis = { gridcolor: "--grid", zerolinecolor: "--line", linecolor: "--line", automargin: true, ticks: "", title: { standoff: 8 } };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: "--text", size: narrow ? 11 : 12.5, family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" },
    margin: { l: 8, r: narrow ? 8 : 16, t: narrow ? 8 : MODEBAR, b: 8, pad: 2 },
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
    this.hidden = new Set();
    const { height } = this.drawing();
    this.box = element("div", { style: `height:${height + (window.innerWidth < NARROW ? 0 : MODEBAR)}px`, role: "img", "aria-label": `${block.title}. ${block.note}` });
    this.root = element("div", { className: "figure" }, this.buttons(), this.legend(), element("div", { className: "drawing" }, this.box));
    this.box.figure = this;
    sight.observe(this.box);
    undrawn.add(this);
    whenIdle(drawNext);
  }

  drawing() {
    return drawings[this.block.kind](this.block, window.innerWidth < NARROW, this.choice);
  }

  buttons() {
    if (!this.block.choices) return null;
    this.pressed = this.block.choices.map((label, number) => {
      const button = element("button", { type: "button", "aria-pressed": String(number === 0) }, label);
      button.addEventListener("click", () => this.choose(number));
      return button;
    });
    return element("div", { className: "choices", role: "group" }, ...this.pressed);
  }

  /* What each color or mark means; a click hides it. */
  legend() {
    const { data, layout } = this.drawing();
    const named = data.filter((trace) => trace.name && trace.showlegend !== false);
    if (named.length < 2 || layout.showlegend === false) return null;
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

  async draw() {
    undrawn.delete(this);
    await loadPlotly();
    const narrow = window.innerWidth < NARROW;
    const { data, layout, height } = this.drawing();
    drawnFigures.add(this);
    for (const trace of data) if (this.hidden.has(trace.name)) trace.visible = false;
    const whole = themed(mergedLayout(baseLayout(narrow), layout));
    await Plotly.react(this.box, themed(data), { ...whole, height: height + (narrow ? 0 : MODEBAR), autosize: true }, {
      responsive: true,
      displaylogo: false,
      displayModeBar: narrow ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    });
    this.box.dataset.drawn = "true";
  }
}

/* What is not in sight is drawn when there is nothing else to do, so that nothing is missing where one scrolls to. */
const undrawn = new Set();
const whenIdle = window.requestIdleCallback ?? ((work) => setTimeout(work, 50));

async function drawNext() {
  const next = [...undrawn].find((figure) => figure.box.isConnected);
  if (!next) return;
  await next.draw();
  whenIdle(drawNext);
}

const GLYPHS = { "line-ns-open": "├┤", "line-ew-open": "━", "x-thin-open": "×", "circle-open": "○", "square-open": "□", "diamond-open": "◇", "triangle-up-open": "△", "cross-thin-open": "+", "hash-open": "#", "diamond": "◆", "square": "■", "triangle-up": "▲" };

function swatch(trace) {
  const color = [trace.marker?.color, trace.line?.color].flat().find((one) => typeof one === "string") ?? "--text";
  const [variable, opacity] = color.split("/");
  const glyph = GLYPHS[trace.marker?.symbol] ?? (trace.mode === "lines" ? "┄" : "");
  const style = glyph ? `color:var(${variable})` : `background:var(${variable});opacity:${opacity ?? 1}`;
  return element("span", { className: glyph ? "glyph" : "swatch", style }, glyph);
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
