/* One function for each kind of block that Python knows. */

const panels = new Map();

function rendered(block) {
  return renderers[block.kind](block);
}

/* What a figure means stands below it, so that it comes first. */
function framed(block, ...children) {
  const title = block.title ? element("h2", {}, block.title) : null;
  const note = block.note ? element("p", { className: "note" }, block.note) : null;
  return element("div", { className: "block" }, title, ...(block.kind in drawings ? [...children, note] : [note, ...children]));
}

function paragraphs(sentences) {
  return sentences.map((sentence) => element("p", {}, sentence));
}

function cardsOf(cards) {
  return element("div", { className: "cards" }, ...cards.map((card) => element("div", { className: "card" },
    element("div", { className: "label" }, card.label),
    element("div", { className: "value" }, card.value),
    card.note ? element("div", { className: "aside" }, card.note) : null)));
}

function factsOf(rows) {
  return element("dl", { className: "facts" }, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

/* A line or a file to copy. Where the page may not use the clipboard, it is selected and copied as a person would. */
function commandOf(line) {
  const button = element("button", { type: "button" }, "copy");
  const code = element("code", { tabIndex: 0 }, line);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(line);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = document.execCommand("copy") ? "copied" : "selected";
    }
  });
  return element("div", { className: line.includes("\n") ? "command file" : "command" }, code, button);
}

const renderers = {
  cards: (block) => cardsOf(block.cards),
  text: (block) => framed(block, ...paragraphs(block.sentences)),
  facts: (block) => framed(block, factsOf(block.rows)),
  command: (block) => framed(block, commandOf(block.line)),
  ...Object.fromEntries(Object.keys(drawings).map((kind) => [kind, (block) => framed(block, new Figure(block).root)])),

  /* What is folded is made when it is first opened. */
  fold: (block) => {
    const found = element("details", {}, element("summary", {}, block.title));
    found.addEventListener("toggle", () => found.append(...block.blocks.map(rendered)), { once: true });
    return found;
  },

  table: (block) => {
    const open = block.opens ? (row, scroll) => panels.get(block.opens).show(row, scroll) : null;
    const table = new SortedTable(block, open);
    if (block.opens) panels.set(block.opens, { table });
    return framed(block, table.root);
  },

  configurations: (block) => {
    const panel = new Panel(block, panels.get(block.id).table);
    panels.set(block.id, panel);
    return panel.root;
  },
};

/* Two configurations beside each other: how much more or less one spends on each part, savings first, then a table. */
function comparisonOf(one, other) {
  return one.spent.flatMap((quantity, place) => {
    const { title, unit } = quantity;
    const [own, beside] = [quantity.values, other.spent[place].values];
    const names = [...new Set([...Object.keys(own), ...Object.keys(beside)])];
    const rows = names.map((name) => [name, own[name] ?? 0, beside[name] ?? 0]).sort((a, b) => a[1] - a[2] - b[1] + b[2]);
    const all = ["all", ...[1, 2].map((side) => rows.reduce((sum, row) => sum + row[side], 0))];
    return [differencesOf(title, unit, one, other, [all, ...rows]), differencesTable(unit, one, other, [all, ...rows])].map(rendered);
  });
}

const WORTH_DRAWING = 0.0005;

function differencesOf(title, unit, one, other, all) {
  const shown = all.filter(([name, a, b]) => name === "all" || Math.abs(a - b) > WORTH_DRAWING * all[0][1]);
  const show = unit === "s" ? seconds : bytes;
  const rows = shown.map(([name, a, b]) => [name, a - b, `${a > b ? "+" : a < b ? "−" : ""}${show(Math.abs(a - b))}`, a > b ? "--cost" : "--saving"]);
  const note = `Left: what ${one.short} saves against ${other.short}; right: what it costs more. The bars below "all" sum to it.`;
  return { kind: "bars", title: `${title}: ${one.short} vs. ${other.short}`, note, unit, rows };
}

function differencesTable(quantity, one, other, rows) {
  const [per, unit] = unitOf(quantity, rows[0][1]);
  const number = (key, label, values) => ({ key, label, meaning: "", text: false, per, decimals: 3, width: 9, values });
  const what = { key: "what", label: "spent on", meaning: "", text: true, width: 30, words: rows.map(([name]) => name), values: rows.map((_, place) => place) };
  const sides = [one, other].map((item, side) => number(`side${side}`, `${item.short.split(" ")[0]}, ${unit}`, rows.map((row) => row[side + 1])));
  const difference = number("difference", `more, ${unit}`, rows.map(([, a, b]) => a - b));
  return { kind: "fold", title: "The same as a table", blocks: [{ kind: "table", title: "", note: "", rows: rows.length, columns: [what, ...sides, difference], filters: [], opens: "", tall: false, id: "" }] };
}

/* Shows one configuration: in full if Python wrote it down, else what the table has of it; beside another, if chosen. */
class Panel {
  constructor(block, table) {
    this.block = block;
    this.table = table;
    this.content = element("div", {});
    this.select = this.chooser("configuration", []);
    this.beside = this.chooser("compare with", [element("option", { value: "" }, "none")]);
    const compared = block.items.length > 1 && block.items[0].spent ? element("label", {}, "compare with", this.beside) : null;
    const chosen = block.items.length ? element("div", { className: "filters" }, this.select, compared) : null;
    this.root = element("div", { className: "block", id: block.id }, element("h2", {}, block.title), chosen, this.content);
    if (block.items.length) this.showItem(block.items[0]);
    else this.content.append(element("p", { className: "note" }, "Click a row of the table above."));
  }

  chooser(label, first) {
    const found = element("select", { "aria-label": label }, ...first, ...this.block.items.map((item, number) => element("option", { value: number }, item.title)));
    found.addEventListener("change", () => this.showItem(this.block.items[this.select.value]));
    return found;
  }

  show(row, scroll) {
    const item = this.block.items.find((one) => one.row === row);
    if (item) this.showItem(item);
    else this.showRow(row);
    if (scroll) this.root.scrollIntoView({ behavior: "smooth", block: "start" });
  }

  showItem(item) {
    if (!item) return;
    this.select.value = String(this.block.items.indexOf(item));
    this.table.mark(item.row);
    const other = this.beside.value && this.block.items[this.beside.value];
    const compared = other && other !== item ? comparisonOf(item, other) : [];
    this.content.replaceChildren(...compared, ...item.blocks.map(rendered));
  }

  showRow(row) {
    const { columns } = this.table;
    const title = filled(this.block.rowTitle, columns, row) ?? filled(this.block.rejectedTitle, columns, row);
    const commands = Object.entries(this.block.commands ?? {}).map(([what, line]) => [what, filled(line, columns, row)]).filter(([, line]) => line);
    const rows = columns.filter((column) => !column.hidden).map((column) => [column.meaning, `${column.label}: ${cellText(column, row)}`]).filter(([, value]) => !/: –?$/.test(value));
    this.select.value = "";
    this.content.replaceChildren(
      element("h3", {}, title ?? ""),
      factsOf(rows.map(([meaning, value]) => [value, meaning])),
      ...(commands.length ? [element("p", { className: "note" }, this.block.elsewhere)] : []),
      ...commands.map(([title, line]) => rendered({ kind: "command", title, line })));
  }
}
