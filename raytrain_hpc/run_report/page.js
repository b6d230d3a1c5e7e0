// Controls of the page: axis, scale, smoothing, hidden lines, and the values under the pointer.

const PAPER_WIDTH = 720; // pixels of a chart over the whole width of A4 or letter paper

if (typeof document !== "undefined") startPage();

function startPage() {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const view = { x: "step", log: false, smoothing: 0, fullRange: false, hidden: new Set() };
  const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => ({
    figure,
    chart: charts[Number(figure.dataset.chart)],
    plot: figure.querySelector(".plot"),
    note: figure.querySelector(".note"),
    drawing: null,
  }));

  const draw = (entry, paperWidth = null) => {
    const width = paperWidth || Math.floor(entry.plot.clientWidth);
    if (!width) return;
    entry.drawing = drawChart(entry.chart, runs, view, width);
    entry.plot.innerHTML = entry.drawing.svg;
    entry.note.textContent = entry.drawing.note;
  };
  const drawAll = () => figures.forEach((entry) => draw(entry));
  const resizes = new ResizeObserver((changes) => {
    for (const { target } of changes) draw(figures.find((entry) => entry.plot === target));
  });
  figures.forEach((entry) => resizes.observe(entry.plot));

  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details.settings")) details.open = true;
    figures.forEach((entry) => draw(entry, entry.chart.wide ? PAPER_WIDTH : PAPER_WIDTH / 2));
  });
  window.addEventListener("afterprint", drawAll);

  connectTools(view, drawAll);
  connectKeys(view, drawAll);
  connectPointer(figures, runs);
}

function connectTools(view, drawAll) {
  const tools = document.getElementById("tools");
  if (!tools) return;
  tools.hidden = false;
  tools.addEventListener("input", ({ target }) => {
    if (target.name === "x") view.x = target.value;
    if (target.name === "log") view.log = target.checked;
    if (target.name === "full") view.fullRange = target.checked;
    if (target.name === "smoothing") {
      view.smoothing = Number(target.value);
      tools.querySelector("output").textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
    }
    drawAll();
  });
}

/** Make every legend entry a switch. Lines of the same name are switched in all charts. */
function connectKeys(view, drawAll) {
  const keys = [...document.querySelectorAll(".key")];
  const update = (name) => {
    if (!view.hidden.delete(name)) view.hidden.add(name);
    for (const key of keys) key.setAttribute("aria-pressed", String(!view.hidden.has(key.textContent)));
    drawAll();
  };
  for (const key of keys) {
    Object.assign(key, { role: "button", tabIndex: 0, title: "click to hide or show" });
    key.setAttribute("aria-pressed", "true");
    key.addEventListener("click", () => update(key.textContent));
    key.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      update(key.textContent);
    });
  }
}

/** Show the values of all lines at the step under the pointer, and the incidents close to it. */
function connectPointer(figures, runs) {
  const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip" }));
  for (const entry of figures) {
    const leave = () => {
      tip.style.display = "none";
      const cursor = entry.plot.querySelector(".cursor");
      if (cursor) cursor.setAttribute("visibility", "hidden");
    };
    entry.plot.addEventListener("pointerleave", leave);
    entry.plot.addEventListener("pointermove", (event) => {
      const { drawing } = entry;
      const pointer = event.clientX - entry.plot.getBoundingClientRect().left;
      if (!drawing || !drawing.lines.length || pointer < drawing.left || pointer > drawing.right) return leave();
      const rows = describePointer(drawing, pointer);
      tip.replaceChildren(
        ...rows.map(({ text, color }) =>
          Object.assign(document.createElement("div"), { textContent: text, className: color }),
        ),
      );
      tip.style.display = "block";
      const space = document.documentElement.clientWidth - tip.offsetWidth - 8;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, space))}px`;
      tip.style.top = `${event.clientY + 14}px`;
      const cursor = entry.plot.querySelector(".cursor");
      cursor.setAttribute("x1", pointer);
      cursor.setAttribute("x2", pointer);
      cursor.setAttribute("visibility", "visible");
    });
  }
}

/** The rows of the tip: the value of each line at the point closest to x, and the marks within 6 pixels. */
function describePointer(drawing, x) {
  const rows = drawing.lines.map((line) => {
    const near = line.points.reduce((a, b) => (Math.abs(drawing.toX(b.x) - x) < Math.abs(drawing.toX(a.x) - x) ? b : a));
    const text = `${line.name}, step ${near.step}: ${Number(near.value.toPrecision(5))}`;
    return { text, color: colorClass(line.color) };
  });
  const marks = drawing.marks.filter((mark) => Math.abs(mark.x - x) < 6);
  return [...rows, ...marks.map((mark) => ({ text: mark.text, color: colorClass(mark.color) }))];
}
