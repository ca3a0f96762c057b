// Prometheus's text to numbers, and two readings to what happened between them.

const LINE = /^([a-zA-Z_][\w]*:)?([a-zA-Z_]\w*)(?:\{([^}]*)\})? (\S+)$/;
const BOUND = /(?:^|,)le="([^"]*)"/;

/** Names without their prefix, whichever the server was given; histograms as bounds and counts. */
export function parse(text) {
  const values = {};
  const histograms = {};
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : LINE.exec(line);
    if (!found) continue;
    const [, , name, labels = "", told] = found;
    const value = Number(told);
    const bound = BOUND.exec(labels);
    if (bound) {
      const histogram = (histograms[name.replace(/_bucket$/, "")] ??= { bounds: [], counts: [] });
      histogram.bounds.push(bound[1] === "+Inf" ? Infinity : Number(bound[1]));
      histogram.counts.push(value);
    } else values[name] = (values[name] ?? 0) + value; // over finish reasons and the like
  }
  return { at: performance.now(), values, histograms };
}

/** How fast a counter grew. One that shrank belongs to a server that was restarted. */
export function rate(before, now, name) {
  const grown = (now.values[name] ?? 0) - (before.values[name] ?? 0);
  return grown < 0 ? null : (grown * 1000) / (now.at - before.at);
}

export function mean(before, now, name) {
  const count = (now.values[`${name}_count`] ?? 0) - (before.values[`${name}_count`] ?? 0);
  const sum = (now.values[`${name}_sum`] ?? 0) - (before.values[`${name}_sum`] ?? 0);
  return count > 0 ? sum / count : null;
}

/** The value below which `part` of what came between the readings lies, as nearly as the buckets tell. */
export function quantile(before, now, name, part) {
  const histogram = now.histograms[name];
  if (!histogram) return null;
  const counts = histogram.counts.map((count, i) => count - (before.histograms[name]?.counts[i] ?? 0));
  const total = counts.at(-1);
  if (!(total > 0)) return null;
  const wanted = part * total;
  const at = counts.findIndex((count) => count >= wanted);
  const low = at > 0 ? histogram.bounds[at - 1] : 0;
  const high = histogram.bounds[at];
  const below = at > 0 ? counts[at - 1] : 0;
  return high === Infinity ? low : low + ((high - low) * (wanted - below)) / (counts[at] - below);
}
