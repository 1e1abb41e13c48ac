/* Builds the page from its data, and switches the theme. */

const report = JSON.parse(document.getElementById("data").textContent);

function sectionOf(section) {
  const subtitle = section.subtitle ? element("p", { className: "subtitle" }, section.subtitle) : null;
  const verdict = section.verdict.length ? element("div", { className: "verdict" }, ...paragraphs(section.verdict)) : null;
  const cards = section.cards.length ? cardsOf(section.cards) : null;
  return element("section", { className: "source", id: section.id }, element("h1", {}, section.title), subtitle, verdict, cards, ...section.blocks.map(rendered));
}

const THEMES = { auto: "theme: auto", light: "theme: light", dark: "theme: dark" };

function themeButton() {
  const button = element("button", { type: "button", id: "theme", title: "light, dark, or as the system has it" });
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = THEMES[theme];
    button.value = theme;
  };
  show("auto");
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    show(names[(names.indexOf(button.value) + 1) % names.length]);
    redrawFigures();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawFigures);
  return button;
}

const links = report.sections.length > 1 ? report.sections.map((section) => element("a", { href: `#${section.id}` }, section.title)) : [];
document.getElementById("top").append(element("div", {}, element("span", { className: "name" }, "axonn-tune report"), element("nav", {}, ...links), themeButton()));
document.getElementById("sections").append(...report.sections.map(sectionOf));
document.getElementById("made").append(element("p", {}, report.made), element("p", {}, element("code", {}, report.command)));
document.documentElement.dataset.ready = "true";
