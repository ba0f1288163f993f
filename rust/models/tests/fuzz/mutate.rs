//! Damages valid files: their bytes, or the values that the bytes represent.

use serde_json::{Map, Value, json};

/// The generator SplitMix64 (Steele, Lea and Flood 2014). A case depends only on the seed and on its number, so it can
/// be repeated alone.
pub struct Rng(u64);

impl Rng {
    /// The random numbers of case `case` in a run with this seed.
    pub fn new(seed: u64, case: u64) -> Self {
        let mut rng = Self(seed ^ case.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        rng.next();
        rng
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// One of `choices`.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

/// Numbers at which computations of sizes, offsets and products tend to fail.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "255",
    "65536",
    "2147483647",
    "4294967296",
    "4611686018427387904",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "-0.0",
    "0.5",
    "123456789012345678901234567890",
];

/// Texts that a reader may take for a path, a key or a number.
const TEXTS: [&str; 12] = [
    "",
    "F32",
    "BF16",
    "I8",
    "F8_E4M3",
    "../../etc/passwd",
    "/dev/zero",
    "a/b",
    "\u{0}",
    "é\u{202e}\u{10ffff}",
    "nan",
    "__metadata__",
];

/// Makes one to eight changes. Each flips a bit, replaces a byte by another byte or by a number's digits, removes
/// bytes, copies bytes to another place, or cuts off the end. Empty input gets a random byte instead.
pub fn bytes(rng: &mut Rng, valid: &[u8]) -> Vec<u8> {
    let mut damaged = valid.to_vec();
    for _ in 0..=rng.below(8) {
        let at = rng.below(damaged.len());
        let longest = rng.below(damaged.len() - at).min(64);
        let length = 1 + rng.below(longest);
        match rng.below(6) {
            _ if damaged.is_empty() => damaged.push(rng.next() as u8),
            0 => damaged[at] ^= 1 << rng.below(8),
            1 => damaged[at] = *rng.pick(&[0, 1, 0x7f, 0x80, 0xff, b'{', b'"', b'[', b'\\', b'\n']),
            2 => drop(damaged.drain(at..(at + length).min(damaged.len()))),
            3 => {
                let copied = damaged[at..(at + length).min(damaged.len())].to_vec();
                let target = rng.below(damaged.len());
                damaged.splice(target..target, copied);
            }
            4 => damaged.truncate(at),
            _ => {
                let number = *rng.pick(&NUMBERS);
                damaged.splice(at..(at + 1).min(damaged.len()), number.bytes());
            }
        }
    }
    damaged
}

/// Changes values or, in a third of the cases, bytes of a JSON document. If `valid` is not JSON, changes its bytes.
pub fn json(rng: &mut Rng, valid: &[u8]) -> Vec<u8> {
    if rng.below(3) == 0 {
        return bytes(rng, valid);
    }
    match serde_json::from_slice(valid) {
        Ok(value) => changed_text(rng, value),
        Err(_) => bytes(rng, valid),
    }
}

/// Changes a safetensors file. In a quarter of the cases, changes any of its bytes. In the others, changes the header
/// (its bytes or its JSON values), the data, or both, and writes the new header's length before it, or once in 50 cases
/// a wrong length.
pub fn safetensors(rng: &mut Rng, valid: &[u8]) -> Vec<u8> {
    let length = u64::from_le_bytes(valid[..8].try_into().unwrap()) as usize;
    let (header, data) = valid[8..].split_at(length);
    let (header, data) = match rng.below(8) {
        0 | 1 => return bytes(rng, valid),
        2 => (bytes(rng, header), data.to_vec()),
        3 => (header.to_vec(), bytes(rng, data)),
        4 => (json(rng, header), bytes(rng, data)),
        _ => (json(rng, header), data.to_vec()),
    };
    // Wrong lengths: zero, too short, longer than the file, and two that overflow when 8, the number of bytes of the
    // length itself, is added.
    let length =
        if rng.below(50) == 0 { *rng.pick(&[0, 7, 1 << 40, u64::MAX, u64::MAX - 7]) } else { header.len() as u64 };
    [&length.to_le_bytes()[..], &header, &data].concat()
}

/// Makes one to four changes to `value`, and in one of 500 cases nests it deeply. Returns its text.
fn changed_text(rng: &mut Rng, mut value: Value) -> Vec<u8> {
    for _ in 0..=rng.below(4) {
        change(rng, &mut value);
    }
    if rng.below(500) == 0 {
        // Nests the value up to 100000 levels deep, with or without the closing brackets. A recursive reader must not
        // overflow its stack.
        let depth = 1 + rng.below(100_000);
        let (open, close) = *rng.pick(&[("[", "]"), ("{\"a\":", "}")]);
        return [open.repeat(depth), value.to_string(), close.repeat(rng.below(2) * depth)].concat().into_bytes();
    }
    value.to_string().into_bytes()
}

/// Changes, removes, renames or copies one value within `value`, or replaces `value` itself.
fn change(rng: &mut Rng, value: &mut Value) {
    let descend = rng.below(5) > 0;
    match value {
        Value::Object(map) if descend && !map.is_empty() => {
            let key = map.keys().nth(rng.below(map.len())).cloned().unwrap_or_default();
            match rng.below(8) {
                0 => drop(map.remove(&key)),
                1 => {
                    let renamed = map.remove(&key).unwrap_or_default();
                    map.insert(new_name(rng, &key), renamed);
                }
                2 => {
                    let copied = map[&key].clone();
                    map.insert(new_name(rng, &key), copied);
                }
                _ => change(rng, &mut map[&key]),
            }
        }
        Value::Array(items) if descend && !items.is_empty() => {
            let at = rng.below(items.len());
            match rng.below(6) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                _ => change(rng, &mut items[at]),
            }
        }
        // Strings in headers often contain JSON.
        Value::String(text) if rng.below(2) == 0 => *text = String::from_utf8_lossy(&json(rng, text.as_bytes())).into(),
        other => *other = random_value(rng),
    }
}

/// Another name for the value that `key` names.
fn new_name(rng: &mut Rng, key: &str) -> String {
    match rng.below(3) {
        0 => (*rng.pick(&TEXTS)).to_owned(),
        1 => format!("{key}.weight"),
        _ => String::from_utf8_lossy(&bytes(rng, key.as_bytes())).into_owned(),
    }
}

fn random_value(rng: &mut Rng) -> Value {
    match rng.below(8) {
        0 => Value::Null,
        1 => json!(rng.below(2) == 0),
        2 => json!(rng.pick(&TEXTS)),
        3 => json!([rng.below(9), rng.below(9)]),
        4 => Value::Object(Map::new()),
        _ => serde_json::from_str::<Value>(rng.pick::<&str>(&NUMBERS)).unwrap_or_default(),
    }
}
