// SHA-256 (FIPS 180-4) and HMAC with it. The browser's own is there on https and on localhost alone.

const BLOCK = 64;
const PRIMES = [];
for (let n = 2; PRIMES.length < 64; n++) if (PRIMES.every((p) => n % p)) PRIMES.push(n);

// The first 32 bits behind the point.
const fraction = (x) => ((x - Math.floor(x)) * 2 ** 32) | 0;
const START = PRIMES.slice(0, 8).map((p) => fraction(Math.sqrt(p)));
const ROUNDS = PRIMES.map((p) => fraction(Math.cbrt(p)));

const turn = (x, n) => (x >>> n) | (x << (32 - n));

export function sha256(bytes) {
  const padded = new Uint8Array((Math.floor((bytes.length + 8) / BLOCK) + 1) * BLOCK);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(bytes.length / 2 ** 29));
  view.setUint32(padded.length - 4, bytes.length << 3);
  const hash = [...START];
  for (let at = 0; at < padded.length; at += BLOCK) addBlock(hash, view, at);
  const out = new DataView(new ArrayBuffer(32));
  hash.forEach((word, i) => {
    out.setUint32(4 * i, word);
  });
  return new Uint8Array(out.buffer);
}

function addBlock(hash, view, at) {
  const w = Array.from({ length: 16 }, (_, i) => view.getInt32(at + 4 * i));
  for (let i = 16; i < 64; i++) {
    const early = turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ (w[i - 15] >>> 3);
    const late = turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ (w[i - 2] >>> 10);
    w.push((w[i - 16] + early + w[i - 7] + late) | 0);
  }
  let [a, b, c, d, e, f, g, h] = hash;
  for (let i = 0; i < 64; i++) {
    const choice = (e & f) ^ (~e & g);
    const first = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + choice + ROUNDS[i] + w[i];
    const majority = (a & b) ^ (a & c) ^ (b & c);
    const second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + majority;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + first) | 0, c, b, a, (first + second) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((word, i) => {
    hash[i] = (hash[i] + word) | 0;
  });
}

export function hmac(key, bytes) {
  const padded = new Uint8Array(BLOCK);
  padded.set(key.length > BLOCK ? sha256(key) : key);
  const inner = sha256(
    joined(
      padded.map((b) => b ^ 0x36),
      bytes,
    ),
  );
  return sha256(
    joined(
      padded.map((b) => b ^ 0x5c),
      inner,
    ),
  );
}

const joined = (a, b) => new Uint8Array([...a, ...b]);
