"use strict";
/* Small helpers: elements, and numbers as the data says they are to be shown. */

function element(tag, properties, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name in found && name !== "list") found[name] = value;
    else found.setAttribute(name, value);
  }
  found.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return found;
}

const formats = new Map();

function shownNumber(value, decimals) {
  if (!formats.has(decimals)) {
    formats.set(decimals, new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
  }
  return formats.get(decimals).format(value);
}

function three(value) {
  return String(Number(value.toPrecision(3)));
}

function seconds(value) {
  const size = Math.abs(value);
  if (size < 1e-3) return `${three(1e6 * value)} µs`;
  if (size < 1) return `${three(1e3 * value)} ms`;
  return `${size < 1000 ? three(value) : value.toFixed(0)} s`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.max(Math.floor(Math.log2(Math.abs(value) || 1) / 10), 0), 4);
  const shown = value / 1024 ** power;
  return `${shown < 1000 ? three(shown) : shown.toFixed(0)} ${units[power]}`;
}

/* The cell of a column in a row, as text. */
function cellText(column, row) {
  const value = column.values[row];
  if (value === null) return column.text ? "" : "–";
  return column.text ? column.words[value] : shownNumber(value / column.per, column.decimals);
}

/* Fills {key} in a text of Python's with the cells of a row, numbers without separators; null if a cell is empty. */
function filled(text, columns, row) {
  let whole = true;
  const found = text.replace(/\{(\w+)\}/g, (mark, key) => {
    const column = columns.find((one) => one.key === key);
    const cell = column ? cellText(column, row) : "–";
    const value = column && !column.text ? cell.replaceAll(",", "") : cell;
    if (value === "–" || value === "") whole = false;
    return value;
  });
  return whole ? found : null;
}
