// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

/** What stands for a number that is not known. */
export const UNKNOWN = "–";

/** A count. */
export function count(value) {
  return value == null ? UNKNOWN : whole.format(value);
}

/** A count with what is counted. */
export function counted(value, one, several = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : several}`;
}

/** A count that may be large, or a rate. */
export function compact(value) {
  return value == null ? UNKNOWN : short.format(value);
}

/** A duration. */
export function duration(seconds) {
  if (seconds == null) return UNKNOWN;
  if (seconds < 0.9995) {
    const milliseconds = 1000 * seconds;
    return `${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`;
  }
  return seconds < 60
    ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`
    : `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

/** A share of one. */
export function percent(share) {
  if (share == null) return UNKNOWN;
  if (share > 0 && share < 0.0005) return "<0.1 %";
  if (share > 0.9995 && share < 1) return ">99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}
