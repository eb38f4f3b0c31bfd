// Numbers, durations and sizes as text.

const missing = (v) => v === null || v === undefined;

export function number(v, digits = 3) {
  return missing(v) ? "–" : Number(v).toLocaleString("en", { maximumSignificantDigits: digits });
}

export const whole = (v) => (missing(v) ? "–" : Math.round(v).toLocaleString("en"));

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export function seconds(s) {
  if (missing(s) || s < 0) return "–";
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

export function bytes(b) {
  if (b === undefined) return "–";
  return b >= 2 ** 30 ? `${(b / 2 ** 30).toFixed(1)} GiB` : `${Math.round(b / 2 ** 20)} MiB`;
}

// For axes and labels of curves: at most three or five digits.
export function short(v) {
  if (missing(v) || Number.isNaN(v)) return "–";
  const a = Math.abs(v);
  if (a !== 0 && (a < 0.001 || a >= 1e7)) return v.toExponential(1);
  if (a >= 10000) return Math.round(v).toLocaleString("en");
  return String(+v.toPrecision(a >= 1000 ? 5 : 3));
}
