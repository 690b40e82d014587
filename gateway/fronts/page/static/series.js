// Numbers over time: what is kept of them, and what counters say about a time. Knows nothing of how they
// are drawn.

/** Keeps samples of the last seconds. A sample is {at, values}; a value that is not known is null. */
export class History {
  #samples = [];

  constructor(seconds) {
    this.seconds = seconds;
  }

  /** Adds a sample, later than all before it, and forgets what is too old. */
  add(at, values) {
    this.#samples.push({ at, values });
    // One more than fits, so that lines begin at the edge.
    const first = this.#samples.findIndex((sample) => sample.at >= at - this.seconds);
    this.#samples.splice(0, Math.max(0, first - 1));
  }

  /** The samples, the oldest first. */
  get samples() {
    return this.#samples;
  }

  /** The last sample, or undefined. */
  get last() {
    return this.#samples.at(-1);
  }
}

/**
 * Gives by how much one total grew for each that another grew; null where that cannot be said: it did not, or one of
 * them is smaller than before, as after a restart.
 *
 * Both are functions of a reading. Of tokens and time it is a rate, of a sum and a count a mean.
 */
export function ratio(before, now, above, below) {
  if (!before || !now) return null;
  const grown = [above(now) - above(before), below(now) - below(before)];
  return grown[0] >= 0 && grown[1] > 0 ? grown[0] / grown[1] : null;
}

/** Gives what a histogram counted between two readings of it, {ends, counts}; null where that cannot be said. */
export function difference(before, now) {
  if (!before || !now || before.counts.length !== now.counts.length) return null;
  const counts = now.counts.map((count, index) => count - before.counts[index]);
  return counts.some((count) => count < 0) ? null : { ends: now.ends, counts };
}

/**
 * Estimates a quantile as Prometheus does: as if values were evenly spread within their bucket.
 *
 * `ends` are the upper ends of the buckets, growing; `counts`, one more, says how many are in each alone. Of those above
 * all ends nothing is known but that.
 */
export function quantile(histogram, share) {
  if (!histogram) return null;
  const { ends, counts } = histogram;
  let rest = share * counts.reduce((sum, count) => sum + count, 0);
  if (!rest) return null;
  for (let index = 0; index < ends.length; index++) {
    if (rest <= counts[index]) {
      const start = index ? ends[index - 1] : 0;
      return start + ((ends[index] - start) * rest) / counts[index];
    }
    rest -= counts[index];
  }
  return ends.at(-1);
}

/** Gives a round number that is not below a value: 1, 2 or 5 times a power of ten. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const factor = [1, 2, 5, 10].find((each) => each * power >= value * (1 - 1e-9));
  return factor * power;
}
