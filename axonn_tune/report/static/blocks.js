/* One function for each kind of block that Python knows. */

const panels = new Map();

function rendered(block) {
  return renderers[block.kind](block);
}

function framed(block, ...children) {
  const title = block.title ? element("h2", {}, block.title) : null;
  const note = block.note ? element("p", { className: "note" }, block.note) : null;
  return element("div", { className: "block" }, title, note, ...children);
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

function commandOf(line) {
  const button = element("button", { type: "button" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(line);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(button.previousSibling);
    }
  });
  return element("div", { className: "command" }, element("code", {}, line), button);
}

const renderers = {
  cards: (block) => cardsOf(block.cards),
  text: (block) => framed(block, ...block.sentences.map((sentence) => element("p", {}, sentence))),
  facts: (block) => framed(block, factsOf(block.rows)),
  command: (block) => framed(block, commandOf(block.line)),
  figure: (block) => framed(block, new Figure(block).root),

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

/* Shows one configuration: in full if Python wrote it down, else what the table has of it. */
class Panel {
  constructor(block, table) {
    this.block = block;
    this.table = table;
    this.content = element("div", {});
    this.select = element("select", { "aria-label": "configuration" }, ...block.items.map((item, number) => element("option", { value: number }, item.title)));
    this.select.addEventListener("change", () => this.showItem(block.items[this.select.value]));
    const heading = element("h2", {}, block.title);
    this.root = element("div", { className: "block", id: block.id }, heading, this.select, this.content);
    this.select.style.maxWidth = "100%";
    this.select.hidden = block.items.length === 0;
    if (block.items.length) this.showItem(block.items[0]);
    else this.content.append(element("p", { className: "note" }, "Click a row of the table above."));
  }

  show(row, scroll) {
    const item = this.block.items.find((one) => one.row === row);
    if (item) this.showItem(item);
    else this.showRow(row);
    if (scroll) this.root.scrollIntoView({ behavior: "smooth", block: "start" });
  }

  showItem(item) {
    this.select.value = String(this.block.items.indexOf(item));
    this.table.mark(item.row);
    this.content.replaceChildren(...item.blocks.map(rendered));
  }

  showRow(row) {
    const { columns } = this.table;
    const title = filled(this.block.rowTitle, columns, row) ?? filled(this.block.rejectedTitle, columns, row);
    const command = this.block.command ? filled(this.block.command, columns, row) : null;
    const rows = columns.filter((column) => !column.hidden).map((column) => [column.meaning, `${column.label.replaceAll("\u00ad", "")}: ${cellText(column, row)}`]).filter(([, value]) => !/: –?$/.test(value));
    this.select.value = "";
    this.content.replaceChildren(
      element("h3", {}, title ?? ""),
      factsOf(rows.map(([meaning, value]) => [value, meaning])),
      ...(command ? [element("p", { className: "note" }, this.block.elsewhere), commandOf(command)] : []));
  }
}
