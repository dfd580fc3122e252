// Numbers as people read them.

const UNITS = ['bytes', 'kB', 'MB', 'GB'];

/** 113246208 -> "113 MB". Decimal units, as download sizes are given. */
export function bytes(count) {
  let [value, unit] = [count, 0];
  while (value >= 999.5 && unit < UNITS.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${value >= 99.5 || unit === 0 ? Math.round(value) : value.toPrecision(2)} ${UNITS[unit]}`;
}

/** Milliseconds -> "840 ms", "3.2 s", "2 min". */
export function duration(ms) {
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 5_400_000) return `${Math.round(ms / 60_000)} min`;
  return `${Math.round(ms / 3_600_000)} h`;
}

/** 12.345 -> "12.3"; above a hundred without decimals. */
export function decimal(value, digits = 1) {
  if (!Number.isFinite(value)) return '–';
  return value >= 100 ? String(Math.round(value)) : value.toFixed(digits);
}

/** 0.6213 -> "62 %". */
export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : '–';
}
