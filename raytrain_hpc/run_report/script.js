"use strict";
// The value of every line of a chart at the step under the pointer.
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip" }));
for (const chart of document.querySelectorAll("svg.chart")) {
  const lines = JSON.parse(chart.dataset.lines);
  const [left, right, low, high] = ["left", "right", "low", "high"].map((key) => Number(chart.dataset[key]));
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", 26);
  cursor.setAttribute("y2", 200);
  cursor.style.display = "none";
  chart.appendChild(cursor);
  chart.addEventListener("mousemove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const step = low + ((x - left) / (right - left)) * (high - low);
    if (step < low || step > high) return leave();
    const near = (line) => line.points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
    tip.replaceChildren(
      ...lines.map((line) => {
        const [at, value] = near(line);
        const row = document.createElement("div");
        row.style.color = line.color;
        row.textContent = `${line.name}, step ${at}: ${Number(value.toPrecision(6))}`;
        return row;
      }),
    );
    Object.assign(tip.style, { display: "block", left: `${event.clientX + 14}px`, top: `${event.clientY + 14}px` });
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.display = "";
  });
  const leave = () => {
    tip.style.display = "none";
    cursor.style.display = "none";
  };
  chart.addEventListener("mouseleave", leave);
}
