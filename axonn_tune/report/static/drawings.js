/* Figures as plotly has them, from what Python says of them: a function for each kind, with the number of the choice. */

const LIMIT_LINE = { color: "--limit", width: 2, dash: "dash" };
const INSIDE = 0.6; /* Share of a figure's width from which on a bar has its words within. */
const LABELLED = 1.25; /* What a figure is wider than its bars, for the words beside them. */
const NEAR = 0.25; /* Size of the error at the dashed lines. */

function bar(name, x, y, color, more) {
  const said = more.text ? { textposition: "none", hovertemplate: "%{text}<extra></extra>" } : {};
  return { type: "bar", orientation: "h", name, x, y, marker: { color }, ...said, ...more };
}

function marks(name, x, y, more) {
  const said = more.text ? { hovertemplate: "%{text}<extra></extra>" } : { hoverinfo: "skip" };
  return { type: "scatter", mode: "markers", name, x, y, ...said, ...more };
}

function line(name, x, y, more) {
  return marks(name, x, y, { mode: "lines", line: { color: "--muted", width: 1, dash: "dash" }, ...more });
}

/* A name in lines of as many characters as a phone shows. */
function folded(name) {
  const lines = [""];
  for (const word of name.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= 50) lines.push(word);
    else lines.push(`${lines.pop()} ${word}`.trim());
  }
  return lines.join("<br>");
}

/* A row for each name, the first on top; on a phone names stand above their bars. */
function rowsAxis(names, narrow, above = 0.6) {
  const range = [names.length - 0.4, -above];
  if (!narrow) return { yaxis: { tickvals: names.map((_, place) => place), ticktext: names, range, fixedrange: true } };
  const look = { showarrow: false, xref: "paper", x: 0, xanchor: "left", yanchor: "bottom", align: "left" };
  const annotations = names.map((text, place) => ({ ...look, text, y: place - 0.18 }));
  return { annotations, yaxis: { tickvals: [], range: [names.length - 0.4, -0.95], fixedrange: true } };
}

/* What a figure of values up to `most` shows them in: size of a unit, its name, and how a value is written. */
function unitOf(name, most) {
  if (name === "s") return most < 1 ? [1e-3, "ms", seconds] : [1, "s", seconds];
  if (name === "bytes") return [2 ** 30, "GiB", bytes];
  return [1, name, (value) => `${three(value)} ${name}`];
}

function limitOf(block, per) {
  if (!block.limit) return [];
  const at = block.limit / per;
  return [{ type: "line", xref: "x", yref: "paper", x0: at, x1: at, y0: 0, y1: 1, line: LIMIT_LINE, layer: "below" }];
}

/* 1, 2 and 5 times powers of ten of a unit between two positive values, the powers alone where there are many. */
function roundTicks(low, high, unit) {
  const [first, last] = [Math.floor(Math.log10(low / unit)), Math.ceil(Math.log10(high / unit))];
  const steps = high / low < 300 ? [1, 2, 5] : [1];
  const found = [];
  for (let decade = first; decade <= last; decade += 1) for (const step of steps) found.push(step * 10 ** decade * unit);
  const shown = found.filter((value) => low <= value && value <= high);
  return shown.length > 1 ? shown : [low, high];
}

const drawings = {
  /* rows: [name, value, words at its end, color, above it, below it]. */
  bars: (block, narrow) => {
    const values = block.rows.map((row) => row[1]);
    const [per, unit] = unitOf(block.unit, Math.max(...values));
    const [least, most] = [Math.min(0, ...values) / per, Math.max(...values, block.limit ?? 0) / per];
    const names = block.rows.map((row) => (narrow ? folded(row[0]) : row[0]));
    const lines = Math.max(...names.map((name) => name.split("<br>").length));
    const room = block.rows.some((row) => row[2]) ? 0.4 * (most - least) : 0.05 * (most - least);
    const x = values.map((value) => value / per);
    const data = bar(block.title, x, x.map((_, place) => place + (narrow ? 0.2 : 0)), block.rows.map((row) => row[3]), {
      text: block.rows.map((row) => row[2]),
      textposition: x.map((value, place) => (block.rows[place][4] || value > INSIDE * (most + room) ? "inside" : "outside")),
      cliponaxis: false,
      insidetextanchor: block.rows.some((row) => row[4]) ? "start" : "end",
      width: narrow ? 0.5 / lines : 0.8,
      hovertemplate: undefined,
      hoverinfo: "skip",
    });
    if (block.rows.some((row) => row[4])) {
      data.error_x = { type: "data", symmetric: false, array: block.rows.map((row) => row[4] / per), arrayminus: block.rows.map((row) => row[5] / per) };
    }
    const xaxis = { title: { text: unit }, range: [least < 0 ? least - room : 0, most + room] };
    const layout = { showlegend: false, xaxis, shapes: limitOf(block, per), ...rowsAxis(names, narrow) };
    return { data: [data], layout, height: 90 + (narrow ? 6 + 32 * lines : 24) * values.length };
  },

  /* rows: {name, parts, under, low, high, own, words}; series: colors by name. Parts make a bar, `under` a thin one below
     it; low and high are the ends of an interval, of which `own` to both sides is not shared with other rows. */
  stacks: (block, narrow) => {
    const { rows } = block;
    const sum = (row) => Object.values(row.parts).reduce((total, value) => total + value, 0);
    const reach = Math.max(...rows.map((row) => Math.max(row.high ?? 0, sum(row))));
    const [per, unit, show] = unitOf(block.unit, reach);
    const [up, lower] = rows.some((row) => row.under) ? [narrow ? 0.05 : -0.1, narrow ? 0.42 : 0.3] : [narrow ? 0.1 : 0, 0];
    const data = [];
    for (const [name, color] of Object.entries(block.series)) {
      for (const [side, at, width] of [["parts", up, 0.5], ["under", lower, 0.14]]) {
        const had = rows.map((row, place) => [row, place]).filter(([row]) => row[side]?.[name] > 0);
        if (!had.length) continue;
        const text = had.map(([row]) => `${name}${side === "under" ? ", overlapped" : ""}: ${show(row[side][name])}${row.notes?.[name] ? `, ${row.notes[name]}` : ""}`);
        const shown = !data.some((one) => one.name === name);
        data.push(bar(name, had.map(([row]) => row[side][name] / per), had.map(([, place]) => place + at), color, { text, width, showlegend: shown }));
      }
    }
    data.push(...intervals(rows, per, up, show));
    const labels = { mode: "text", hovertemplate: undefined, hoverinfo: "skip", showlegend: false, textposition: "middle left", cliponaxis: false };
    const end = Math.max(LABELLED * reach, (narrow ? 1.3 : 1.1) * (block.limit ?? 0)) / per;
    data.push(marks("", rows.map(() => end), rows.map((_, place) => place + up), { text: rows.map((row) => row.words ?? show(sum(row))), ...labels }));
    const layout = { barmode: "stack", xaxis: { title: { text: block.axis ?? unit }, range: [0, end] }, shapes: limitOf(block, per), ...rowsAxis(rows.map((row) => row.name), narrow, 0.5) };
    return { data, layout, height: 70 + (narrow ? 50 : 38) * rows.length };
  },

  /* bars: [lane, what, start, end, words, share that is in use, number to write on it if numbered], s; colors by what. */
  lanes: (block, narrow) => {
    const [per, unit] = unitOf("s", Math.max(...block.bars.map((one) => one[3])));
    const data = Object.entries(block.colors).map(([what, color]) => {
      const bars = block.bars.filter((one) => one[1] === what);
      const text = bars.map(([, , start, end, words, busy]) => `${words || what}<br>${seconds(end - start)} from ${seconds(start)}${busy < 0.99 ? `, busy ${Math.round(100 * busy)}% of it` : ""}`);
      /* What is narrower than a pixel is still seen. */
      const marker = { color, opacity: bars.map((one) => 0.25 + 0.75 * one[5]), line: { width: 0.7, color: block.numbered ? "--panel" : color } };
      const found = bar(what, bars.map(([, , start, end]) => (end - start) / per), bars.map((one) => one[0]), color, { text, base: bars.map((one) => one[2] / per), width: 0.7, marker });
      if (!block.numbered) return found;
      const numbers = { text: bars.map((one) => one[6]), textposition: "inside", insidetextanchor: "middle", textangle: 0, insidetextfont: { color: "--panel" } };
      return { ...found, ...numbers, hovertext: text, hovertemplate: "%{hovertext}<extra></extra>" };
    });
    const layout = { barmode: "overlay", uniformtext: { mode: "hide", minsize: 8 }, xaxis: { title: { text: unit }, rangemode: "tozero" }, ...rowsAxis(block.lanes, false, 0.5) };
    return { data, layout, height: 80 + 34 * block.lanes.length };
  },

  /* series: {name, points: [measured, predicted, words, measured from, to, predicted from, to]}; ranges may lack. */
  points: (block, narrow, choice) => {
    const [per, , show] = unitOf(block.unit, 0);
    const all = block.series.flatMap((one) => one.points);
    const values = all.flatMap(([measured, predicted]) => [measured, predicted]);
    const ends = [0.8 * Math.min(...values), 1.25 * Math.max(...values)];
    const error = choice === 1;
    const data = block.series.map(({ name, points }, number) => {
      const marker = { size: 6, opacity: 0.7, color: `--series-${1 + (number % 8)}`, symbol: ["circle", "diamond", "square", "triangle-up"][Math.floor(number / 8) % 4] };
      const y = points.map(([measured, predicted]) => (error ? 100 * (predicted / measured - 1) : predicted));
      const found = marks(name, points.map(([measured]) => measured), y, { marker, text: points.map((one) => one[2]) });
      if (!block.ranges) return found;
      const side = (at, low) => ({ type: "data", symmetric: false, array: points.map((one) => Math.max(one[low + 1] - one[at], 0)), arrayminus: points.map((one) => Math.max(one[at] - one[low], 0)), color: marker.color, thickness: 1.2, width: 0 });
      return { ...found, error_x: side(0, 3), ...(error ? {} : { error_y: side(1, 5) }) };
    });
    for (const off of [0, NEAR, -NEAR]) {
      const y = error ? [100 * off, 100 * off] : ends.map((end) => (1 + off) * end);
      data.push(line(off ? "error of ±25%" : "measured as predicted", ends, y, { line: { color: "--muted", width: 1, dash: off ? "dash" : "solid" }, showlegend: off >= 0 }));
    }
    const ticks = roundTicks(...ends, per);
    const axis = (text) => ({ title: { text }, type: "log", tickvals: ticks, ticktext: ticks.map(show) });
    return { data, layout: { xaxis: axis("measured"), yaxis: error ? { title: { text: "error, %" } } : axis("predicted") }, height: 540 };
  },

  /* lines: {name, x, words, values, ideal, up, down}, of which the last four have a list for each choice. */
  lines: (block, narrow, choice) => {
    const all = [...new Set(block.lines.flatMap((one) => one.x))].sort((a, b) => a - b);
    const gpus = all.filter((_, place) => place % Math.ceil(all.length / 12) === 0);
    const data = block.lines.flatMap(({ name, x, words, values, ideal, up, down }, number) => {
      const color = `--series-${1 + (number % 8)}`;
      const whiskers = { type: "data", symmetric: false, array: up[choice], arrayminus: down[choice], color, thickness: 1.2, width: 3 };
      const look = { mode: "lines+markers", line: { color, width: 2 }, marker: { color, size: 7 }, legendgroup: name, error_y: whiskers };
      return [marks(name, x, values[choice], { text: words, ...look }), line(name, x, ideal[choice], { legendgroup: name, showlegend: false })];
    });
    const { label, log } = block.metrics[choice];
    const values = data.flatMap((one) => one.y).filter((value) => value > 0);
    const ticks = roundTicks(Math.min(...values), Math.max(...values), 1);
    const ticktext = ticks.map((tick) => (tick < 1000 ? String(Number(tick.toPrecision(4))) : shownNumber(tick, 0)));
    const yaxis = { title: { text: label }, ...(log ? { type: "log", tickvals: ticks, ticktext } : { rangemode: "tozero" }) };
    return { data, layout: { xaxis: { title: { text: block.axis || "GPUs" }, type: "log", tickvals: gpus, ticktext: gpus.map((one) => shownNumber(one, 0)) }, yaxis }, height: 420 };
  },
};

/* Whiskers over bars: the 80% interval, and thicker what differs between rows, above lines in the color of the page. */
function intervals(rows, per, up, show) {
  const known = rows.map((row, place) => [row, place + up]).filter(([row]) => row.low !== null && row.low !== undefined);
  if (!known.length) return [];
  const text = known.map(([row]) => `80%: ${show(row.low)} to ${show(row.high)}<br>±${show(row.own)} between rows`);
  const whole = { array: known.map(([row]) => (row.high - row.at) / per), arrayminus: known.map(([row]) => (row.at - row.low) / per) };
  const own = { array: known.map(([row]) => row.own / per), arrayminus: known.map(([row]) => row.own / per) };
  const looks = [
    ["80% interval", whole, "--panel", 4.6, 5.5],
    ["between rows", own, "--panel", 8, 0],
    ["80% interval", whole, "--text", 1.6, 4],
    ["between rows", own, "--text", 5, 0],
  ];
  return looks.map(([name, ends, color, thickness, width]) => {
    const symbol = { symbol: ends === own ? "line-ew-open" : "line-ns-open", size: 10, color: "--text", line: { width: 1.6 } };
    const error_x = { type: "data", symmetric: false, ...ends, color, thickness, width };
    return marks(name, known.map(([row]) => row.at / per), known.map(([, place]) => place), { text, marker: symbol, cliponaxis: false, error_x, showlegend: color === "--text" });
  });
}
