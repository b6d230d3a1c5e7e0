// Drawing of a chart as SVG, like charts.py, but for any axis, width, smoothing and choice of lines.

const MARGIN = { left: 54, right: 14, top: 26, markLabel: 12, bottom: 40 };
const NUM_COLORS = 8;
const [MIN_LABEL_DISTANCE, MIN_SIGN_DISTANCE, DOT] = [16, 9, 5];
const START_MARGIN = 1.05; // above the first value of a line that is never clipped
const NARROW = 480; // pixels

const escapeText = (text) =>
  String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
const colorClass = (color) =>
  color === null ? "alert" : `c${color % NUM_COLORS}${color >= NUM_COLORS ? " dashed" : ""}`;

/** A function from (run, step) to a position on the x axis, with the axis label and the unit's size. */
function makeAxis(view, runs) {
  if (view.x === "step") return { label: "step", size: 1, of: (run, step) => step };
  const column = view.x === "tokens" ? 1 : 2;
  const longest = Math.max(...runs.map((run) => (run.axis.length ? run.axis[run.axis.length - 1][column] : 0)));
  const [unit, size] = view.x === "tokens" ? ["tokens", 1] : chooseTimeUnit(longest);
  const label = view.x === "tokens" ? "tokens" : `time since the first step (${unit})`;
  return { label, size, of: (run, step) => interpolate(runs[run].axis, step, column) / size };
}

/** The visible lines with points (x, upper edge, lower edge, step, value), and the raw points where smoothing hides them. */
function prepareLines(chart, view, axis) {
  let below = null;
  const lines = [];
  for (const line of chart.lines) {
    if (view.hidden.has(line.name)) continue;
    const isSmoothed = view.smoothing > 0 && !line.sparse && !chart.stacked && !chart.exact;
    const source = isSmoothed ? smooth(line.means || line.points, view.smoothing) : line.points;
    let points = source.map(([step, value]) => ({ x: axis.of(line.run, step), y: value, base: null, step, value }));
    if (chart.stacked) {
      points = points.map((point, i) => ({ ...point, base: below ? below[i].y : 0, y: point.y + (below ? below[i].y : 0) }));
      below = points;
    }
    const raw = isSmoothed ? line.points.map(([step, y]) => ({ x: axis.of(line.run, step), y })) : [];
    const isDrawable = (point) => !isLogarithmic(chart, view) || point.y > 0;
    lines.push({ ...line, points: points.filter(isDrawable), raw: raw.filter(isDrawable) });
  }
  return lines.filter((line) => line.points.length);
}

const isLogarithmic = (chart, view) => view.log && !chart.stacked && !chart.exact;

/** Limits and ticks of the y axis. `limit` is null unless values above it are clipped. */
function computeYAxis(chart, view, lines) {
  const drawn = chart.stacked ? lines.slice(-1) : lines;
  const values = drawn.flatMap((line) => [...line.points, ...line.raw].map((point) => point.y));
  if (isLogarithmic(chart, view)) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const [first, last] = low < high ? [low, high] : [low / 2, high * 2];
    return { low: first, high: last, ticks: computeLogTicks(first, last), limit: null, log: true };
  }
  const start = chart.keepsStart ? START_MARGIN * Math.max(...lines.map((line) => (line.raw[0] || line.points[0]).y)) : 0;
  const limit = view.fullRange ? null : computeClipLimit(values, start);
  const [low, high] = [chart.stacked ? 0 : Math.min(...values), limit === null ? Math.max(...values) : limit];
  const isShown = (tick) => (limit === null || tick <= limit) && (!chart.counted || Number.isInteger(tick));
  const ticks = computeTicks(low, high, 5).filter(isShown);
  return { low: Math.min(low, ticks[0]), high: Math.max(high, ticks[ticks.length - 1]), ticks, limit, log: false };
}

/** Draw a chart `width` pixels wide. Returns its SVG, a note on clipped values, and what the pointer needs. */
function drawChart(chart, runs, view, width) {
  const height = chart.wide ? Math.min(330, Math.max(240, width * 0.6)) : 250;
  const axis = makeAxis(view, runs);
  const lines = prepareLines(chart, view, axis);
  const [left, right, bottom] = [MARGIN.left, width - MARGIN.right, height - MARGIN.bottom];
  const hasLabels = chart.wide && chart.marks.length > 0;
  const top = MARGIN.top + (hasLabels ? MARGIN.markLabel : 0);
  const open = `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="${escapeText(chart.title)}">`;
  if (!lines.length) {
    const text = `<text class="tick" x="${width / 2}" y="${height / 2}" text-anchor="middle">no line is shown</text>`;
    return { svg: `${open}${text}</svg>`, note: "", lines: [], marks: [] };
  }
  const y = computeYAxis(chart, view, lines);
  const xs = lines.flatMap((line) => line.points.map((point) => point.x));
  const [low, high] = [Math.min(...xs), Math.max(Math.max(...xs), Math.min(...xs) + 1e-9)];
  const [toX, toY] = [makeScale(low, high, left, right, false), makeScale(y.low, y.high, bottom, top, y.log)];
  const parts = [open, drawAxes(chart.unit, axis.label, { low, high, toX, y, toY, left, right, top, bottom, width, height })];
  // Only the upper edge clips lines: dots at the other edges are shown in full.
  const [x, boxWidth, boxHeight] = [left - DOT, right - left + 2 * DOT, bottom - top + DOT];
  const box = `x="${x}" y="${top}" width="${boxWidth}" height="${boxHeight}" viewBox="${x} ${top} ${boxWidth} ${boxHeight}"`;
  parts.push(`<svg ${box}>`);
  parts.push(...lines.map((line) => drawLine(line, toX, toY)), "</svg>");
  const marks = chart.marks
    .filter((mark) => !view.hidden.has(runs[mark.run].name))
    .map((mark) => ({ ...mark, x: toX(Math.max(axis.of(mark.run, mark.step), low)) })) // 0: before the first step
    .filter((mark) => mark.x <= right + 0.5)
    .sort((a, b) => a.x - b.x);
  parts.push(drawMarks(marks, top, bottom, hasLabels));
  const drawn = chart.stacked ? lines.slice(-1) : lines;
  const points = drawn.flatMap((line) => (line.raw.length ? line.raw : line.points));
  const above = y.limit === null ? [] : points.filter((point) => point.y > y.limit).sort((a, b) => a.x - b.x);
  parts.push(drawClipSigns(above, toX, top));
  parts.push(`<line class="cursor" y1="${top}" y2="${bottom}" visibility="hidden"/></svg>`);
  return { svg: parts.join(""), note: describeClipped(above.map((point) => point.y), chart.unit), lines, marks, toX, left, right };
}

function drawAxes(unit, xLabel, frame) {
  const { toX, y, toY, left, right, bottom } = frame;
  const parts = [
    `<text class="unit" x="4" y="12">${escapeText(unit)}</text>`,
    `<text class="unit" x="${(left + right) / 2}" y="${frame.height - 5}" text-anchor="middle">${escapeText(xLabel)}</text>`,
  ];
  for (const tick of y.ticks) {
    const at = toY(tick).toFixed(1);
    parts.push(`<line class="grid" x1="${left}" x2="${right}" y1="${at}" y2="${at}"/>`);
    parts.push(`<text class="tick" x="${left - 6}" y="${Number(at) + 4}" text-anchor="end">${formatNumber(tick)}</text>`);
  }
  const count = frame.width < NARROW ? 4 : frame.width < 800 ? 6 : 10;
  for (const tick of computeTicks(frame.low, frame.high, count)) {
    if (tick < frame.low || tick > frame.high) continue;
    const at = `x="${toX(tick).toFixed(1)}" y="${bottom + 16}"`;
    parts.push(`<text class="tick" ${at} text-anchor="middle">${formatNumber(tick)}</text>`);
  }
  return parts.join("");
}

function drawLine(line, toX, toY) {
  const path = (points, edge) => points.map((point) => `${toX(point.x).toFixed(1)},${toY(point[edge]).toFixed(1)}`).join(" ");
  const color = colorClass(line.color);
  if (line.points[0].base !== null) {
    const back = path([...line.points].reverse(), "base");
    return `<polygon class="area ${color}" points="${path(line.points, "y")} ${back}"/>`;
  }
  const sparse = line.sparse ? " sparse" : "";
  let svg = line.raw.length ? `<polyline class="line raw ${color}" points="${path(line.raw, "y")}"/>` : "";
  svg += `<polyline class="line ${color}${sparse}" points="${path(line.points, "y")}"/>`;
  if (line.sparse || line.points.length === 1) {
    const dot = (point) => `<circle class="dot ${color}" cx="${toX(point.x).toFixed(1)}" cy="${toY(point.y).toFixed(1)}" r="3.5"/>`;
    svg += line.points.map(dot).join("");
  }
  return svg;
}

/** The vertical lines of marks sorted by x, and their labels; close ones share a label. */
function drawMarks(marks, top, bottom, hasLabels) {
  const groups = [];
  const parts = marks.map((mark) => {
    const last = groups[groups.length - 1];
    if (last && mark.x - last[0].x < MIN_LABEL_DISTANCE) last.push(mark);
    else groups.push([mark]);
    const x = mark.x.toFixed(1);
    return `<line class="mark ${colorClass(mark.color)}" x1="${x}" x2="${x}" y1="${top}" y2="${bottom}"/>`;
  });
  for (const group of hasLabels ? groups : []) {
    const position = `x="${group[0].x.toFixed(1)}" y="${top - 4}" text-anchor="middle"`;
    parts.push(`<text class="marklabel ${colorClass(group[0].color)}" ${position}>${escapeText(joinLabels(group))}</text>`);
  }
  return parts.join("");
}

/** One label for marks that are close: a range for marks of one run, else a list. */
function joinLabels(marks) {
  if (new Set(marks.map((mark) => mark.run)).size > 1) return marks.map((mark) => mark.label).join(", ");
  return marks.length === 1 ? marks[0].label : `${marks[0].label}–${marks[marks.length - 1].label}`;
}

/** A triangle at the upper end of the axis for each value above it; close ones share a triangle. */
function drawClipSigns(points, toX, top) {
  const parts = [];
  let previous = -Infinity;
  for (const point of points) {
    const x = toX(point.x);
    if (x - previous < MIN_SIGN_DISTANCE) continue;
    previous = x;
    const path = `M${(x - 5).toFixed(1)},${top + 8} L${(x + 5).toFixed(1)},${top + 8} L${x.toFixed(1)},${top} Z`;
    parts.push(`<path class="clipped" d="${path}"><title>${formatNumber(point.y)}</title></path>`);
  }
  return parts.join("");
}

function describeClipped(values, unit) {
  if (!values.length) return "";
  return `▲ above the axis, up to ${formatNumber(Math.max(...values))} ${unit}`;
}
