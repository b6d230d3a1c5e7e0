"use strict";
// Scales of charts: ticks, axis limits, number formats, smoothing. scale.py computes the same.

/** Linear map from [low, high] to [start, stop]; logarithmic if `log`. */
function makeScale(low, high, start, stop, log) {
  const map = log ? Math.log10 : (value) => value;
  const span = map(high) - map(low);
  return (value) => start + (stop - start) * (span ? (map(value) - map(low)) / span : 0.5);
}

/** Round numbers that cover [low, high]. Their distance is 1, 2 or 5 times a power of ten. */
function computeTicks(low, high, targetCount) {
  if (high <= low) {
    const margin = Math.abs(low) / 2 || 0.5;
    [low, high] = [low - margin, high + margin];
  }
  const minStep = (high - low) / targetCount;
  const power = 10 ** Math.floor(Math.log10(minStep));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= minStep * (1 - 1e-9));
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toFixed(12)));
}

/** Ticks inside [low, high] of a logarithmic axis: powers of ten, else also 2 and 5 times those, else round numbers. */
function computeLogTicks(low, high) {
  for (const factors of [[1], [1, 2, 5]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      ticks.push(...factors.map((factor) => Number((factor * 10 ** power).toPrecision(3))));
    }
    const inside = ticks.filter((tick) => tick >= low && tick <= high);
    if (inside.length >= 3) return inside;
  }
  return computeTicks(low, high, 5).filter((tick) => tick >= low && tick <= high);
}

/** The value at which an axis ends so that a few outliers do not flatten all other values; null without outliers. */
function computeClipLimit(values, minLimit) {
  if (values.length < 8) return null;
  const ordered = [...values].sort((a, b) => a - b);
  const percentile = ordered[Math.floor(0.95 * (ordered.length - 1))];
  const limit = Math.max(1.5 * percentile, minLimit);
  return percentile > 0 && ordered[ordered.length - 1] > Math.max(2.5 * percentile, limit) ? limit : null;
}

/** Exponential moving average of the values, weighted so that the first values count in full. */
function smooth(points, weight) {
  let sum = 0;
  let total = 0;
  return points.map(([x, value]) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [x, sum / total];
  });
}

/** The value at `x` of a line through `rows`, which are sorted by their first column, in column `column`. */
function interpolate(rows, x, column) {
  let [low, high] = [0, rows.length - 1];
  if (x <= rows[low][0]) return rows[low][column];
  if (x >= rows[high][0]) return rows[high][column];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= x) low = middle;
    else high = middle;
  }
  const share = (x - rows[low][0]) / (rows[high][0] - rows[low][0]);
  return rows[low][column] + share * (rows[high][column] - rows[low][column]);
}

/** A number with at most 4 significant digits and a unit suffix: 12.5M, 0.003, 2e-06. */
function formatNumber(value) {
  for (const [limit, unit, suffix] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
    if (Math.abs(value) >= limit) return `${Number((value / unit).toPrecision(4))}${suffix}`;
  }
  const rounded = Number(value.toPrecision(4));
  if (rounded !== 0 && Math.abs(rounded) < 1e-4) {
    return rounded.toExponential().replace(/e-(\d)$/, "e-0$1");
  }
  return String(rounded);
}

/** The unit in which a time axis of `seconds` has readable numbers: its name and its seconds. */
function chooseTimeUnit(seconds) {
  if (seconds < 120) return ["s", 1];
  if (seconds < 2 * 3600) return ["min", 60];
  return seconds < 48 * 3600 ? ["h", 3600] : ["d", 86400];
}
