/* Tables that sort and filter. A tall one holds any number of rows: only those in sight are elements. */

const ROW_HEIGHT = 30;
const MARGIN_ROWS = 12;
const WORDS_CH = 22;
/* Below this width of the window, px, all is smaller. */
const NARROW = 700;
const PADDING_CH = window.innerWidth < NARROW ? 1.7 : 2.4;

class SortedTable {
  constructor(block, opened) {
    this.block = block;
    this.opened = opened;
    this.columns = block.columns;
    this.visible = block.columns.filter((column) => !column.hidden);
    this.sorted = { column: null, down: false };
    this.wanted = new Map();
    this.search = "";
    this.rows = Array.from({ length: block.rows }, (_, row) => row);
    this.chosen = null;
    this.drawn = [-1, -1];
    this.state = block.columns.find((column) => column.key === "state");
    this.root = this.build();
    this.refresh();
  }

  build() {
    this.body = element("tbody");
    this.heads = this.visible.map((column) => this.heading(column));
    const widths = this.visible.map((column) => element("col", { style: `width:${column.width + PADDING_CH}ch` }));
    const total = this.visible.reduce((sum, column) => sum + column.width + PADDING_CH, 0);
    const table = element("table", {}, element("colgroup", {}, ...widths), element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    if (this.block.tall) table.style.width = `max(100%, ${total}ch)`;
    else table.style.minWidth = "100%";
    this.scroller = element("div", { className: this.block.tall ? "scroller tall" : "scroller plain", tabIndex: 0 }, table);
    const around = element("div", { className: "scrolls" }, this.scroller);
    const hint = () => around.classList.toggle("more", this.scroller.scrollWidth - this.scroller.clientWidth - this.scroller.scrollLeft > 4);
    new ResizeObserver(hint).observe(this.scroller);
    this.scroller.addEventListener("scroll", () => { this.draw(); hint(); }, { passive: true });
    this.count = element("span", { className: "count" });
    const filters = this.block.tall ? this.filters() : null;
    return element("div", { id: this.block.id }, filters, around);
  }

  heading(column) {
    const button = element("button", { type: "button", title: column.meaning }, column.label.replace(/, (?=[^,]*$)/, "\n"));
    button.addEventListener("click", () => this.sortBy(column));
    return element("th", { className: column.text ? "words" : "", scope: "col" }, button);
  }

  filters() {
    const selects = this.block.filters.map((filter) => {
      const options = [element("option", { value: "" }, "any"), ...filter.options.map((one) => element("option", { value: String(one) }, String(one)))];
      const select = element("select", { "data-column": filter.column }, ...options);
      select.addEventListener("change", () => {
        this.wanted.set(filter.column, select.value);
        this.refresh();
      });
      return element("label", {}, filter.label, select);
    });
    const search = element("input", { type: "search", placeholder: "search", "aria-label": "search in all columns" });
    search.addEventListener("input", () => {
      this.search = search.value.trim().toLowerCase();
      this.refresh();
    });
    const folded = selects.length ? element("details", { open: window.innerWidth >= NARROW, className: "selects" }, element("summary", {}, "filter"), ...selects) : null;
    return element("div", { className: "filters" }, folded, search, this.count);
  }

  sortBy(column) {
    const again = this.sorted.column === column;
    this.sorted = { column, down: again && !this.sorted.down };
    this.refresh();
  }

  refresh() {
    this.rows = [];
    for (let row = 0; row < this.block.rows; row += 1) if (this.passes(row)) this.rows.push(row);
    const { column, down } = this.sorted;
    if (column) this.rows.sort(this.comparing(column, down));
    this.heads.forEach((head, place) => {
      const own = this.visible[place] === column;
      head.setAttribute("aria-sort", own ? (down ? "descending" : "ascending") : "none");
    });
    this.count.textContent = `${shownNumber(this.rows.length, 0)} of ${shownNumber(this.block.rows, 0)} rows`;
    this.scroller.scrollTop = 0;
    this.drawn = [-1, -1];
    this.draw();
  }

  passes(row) {
    for (const [key, value] of this.wanted) {
      if (value === "") continue;
      const column = this.columns.find((one) => one.key === key);
      const own = column.values[row];
      if (own === null || String(column.text ? column.words[own] : own) !== value) return false;
    }
    return !this.search || this.visible.some((column) => cellText(column, row).toLowerCase().includes(this.search));
  }

  /* Rows without a value come last either way; equal ones stay as Python had them. */
  comparing(column, down) {
    const sign = down ? -1 : 1;
    return (one, other) => {
      let [a, b] = [column.values[one], column.values[other]];
      if (a === null || b === null) return (a === null) - (b === null) || one - other;
      if (column.text) return sign * column.words[a].localeCompare(column.words[b], "en", { numeric: true }) || one - other;
      return sign * (a - b) || one - other;
    };
  }

  draw() {
    const all = !this.block.tall;
    const first = all ? 0 : Math.max(Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - MARGIN_ROWS, 0);
    const inSight = Math.ceil((this.scroller.clientHeight || 600) / ROW_HEIGHT) + 2 * MARGIN_ROWS;
    const last = all ? this.rows.length : Math.min(first + inSight, this.rows.length);
    if (first === this.drawn[0] && last === this.drawn[1]) return;
    this.drawn = [first, last];
    const shown = this.rows.slice(first, last).map((row) => this.row(row));
    this.body.replaceChildren(this.pad(first), ...shown, this.pad(this.rows.length - last));
  }

  pad(rows) {
    const cell = element("td", { colSpan: this.visible.length, style: `height:${rows * ROW_HEIGHT}px` });
    return element("tr", { className: "pad", hidden: rows === 0 }, cell);
  }

  row(row) {
    const cells = this.visible.map((column) => {
      const text = cellText(column, row);
      const cell = element("td", { className: column.text ? "words" : "", title: this.block.tall && column.text ? text : "" }, text);
      if (column.text && !this.block.tall) cell.style.minWidth = `${Math.min(text.length + 2, column.width + 2, WORDS_CH)}ch`;
      return cell;
    });
    const found = element("tr", { "data-row": row }, ...cells);
    found.classList.toggle("unusable", Boolean(this.state) && cellText(this.state, row).startsWith("rejected: "));
    found.classList.toggle("chosen", row === this.chosen);
    if (this.opened) {
      found.classList.add("opens");
      found.tabIndex = 0;
      found.addEventListener("click", () => this.open(row, true));
      found.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          this.open(row, true);
        }
      });
    }
    return found;
  }

  open(row, scroll) {
    this.mark(row);
    this.opened(row, scroll);
  }

  mark(row) {
    this.chosen = row;
    for (const one of this.body.querySelectorAll("tr[data-row]")) one.classList.toggle("chosen", Number(one.dataset.row) === row);
  }
}
