//! Every parser of outside data on mutated files: the targets and seeds of `fuzz/`, for a fixed number of rounds, on any
//! compiler. Coverage-guided runs are `cargo fuzz`'s; see `fuzz/README.md`.
//!
//! `FORECALL_FUZZ_ROUNDS` asks for more rounds per target, `FORECALL_FUZZ_TARGET` for one target.

#[path = "../fuzz/targets.rs"]
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use targets::{Counting, TARGETS, Target, run};

#[global_allocator]
static COUNTING: Counting = Counting;

/// Mutated inputs for each target.
const ROUNDS: usize = 20_000;
/// What one small input may take; rounds take some microseconds.
const SLOWEST: Duration = Duration::from_secs(20);

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(path)
}

fn seeds(name: &str) -> Vec<Vec<u8>> {
    let mut paths: Vec<_> = std::fs::read_dir(folder("corpus").join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// The quoted words of a libFuzzer dictionary, `\xNN`, `\"` and `\\` undone.
fn words(name: &str) -> Vec<Vec<u8>> {
    let text = std::fs::read_to_string(folder("dict").join(format!("{name}.dict"))).unwrap();
    let unquoted = text.lines().filter_map(|line| line.strip_prefix('"')?.strip_suffix('"'));
    unquoted
        .map(|line| {
            let (mut word, mut bytes) = (Vec::new(), line.bytes());
            while let Some(byte) = bytes.next() {
                word.push(match (byte, if byte == b'\\' { bytes.next() } else { None }) {
                    (_, Some(b'x')) => {
                        let digits: String = bytes.by_ref().take(2).map(char::from).collect();
                        u8::from_str_radix(&digits, 16).unwrap()
                    }
                    (_, Some(escaped)) => escaped,
                    (byte, None) => byte,
                });
            }
            word
        })
        .collect()
}

/// Numbers that look random and are the same in every run (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound.max(1) as u64) as usize
    }

    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        let longest = 1 << self.below(8);
        start..(start + self.below(longest)).min(length)
    }
}

/// Changes `input` in one to eight places.
fn mutate(random: &mut Random, input: &mut Vec<u8>, words: &[Vec<u8>], other: &[u8]) {
    for _ in 0..=random.below(8) {
        let range = random.range(input.len());
        match random.below(8) {
            0 => input[range].fill(b'0'),
            1 => drop(input.drain(range)),
            2 => {
                let again = input[range.clone()].to_vec();
                input.splice(range.end..range.end, again);
            }
            3 => drop(input.splice(range, words[random.below(words.len())].iter().copied())),
            4 => {
                let word = words[random.below(words.len())].iter().copied();
                drop(input.splice(range.start..range.start, word));
            }
            5 => {
                let from = random.range(other.len());
                input.splice(range, other[from].iter().copied());
            }
            6 if range.start < input.len() => input[range.start] ^= 1 << random.below(8),
            _ if range.start < input.len() => input[range.start] = random.below(256) as u8,
            _ => {}
        }
    }
    input.truncate(1 << 14);
}

fn attempt(target: &Target, input: &[u8]) -> Result<(), String> {
    let started = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| run(target, input)));
    let took = started.elapsed();
    let shown = || String::from_utf8_lossy(input).into_owned();
    match result {
        Err(panic) => {
            let said = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic".to_owned());
            Err(format!("{}: {said}, on\n{}", target.name, shown()))
        }
        Ok(()) if took > SLOWEST => Err(format!("{}: took {took:?} for\n{}", target.name, shown())),
        Ok(()) => Ok(()),
    }
}

/// One test, since what is counted is the whole process's memory.
#[test]
fn mutated_files_end_in_values_or_errors() {
    let rounds = std::env::var("FORECALL_FUZZ_ROUNDS").ok().map_or(ROUNDS, |n| n.parse().unwrap());
    let only = std::env::var("FORECALL_FUZZ_TARGET").ok();
    // Controls: a panic and an allocation beyond the input are seen.
    let panics = Target { name: "control", parse: |_| panic!("on purpose"), memory: (0, 0) };
    assert!(attempt(&panics, b"x").is_err());
    let allocates = Target { name: "control", parse: |n| drop(vec![0_u8; n.len() * 1000]), memory: (10, 10) };
    assert!(attempt(&allocates, b"0123456789").is_err());
    let mut failures = Vec::new();
    for target in TARGETS.iter().filter(|target| only.as_deref().is_none_or(|name| name == target.name)) {
        let (seeds, words, started) = (seeds(target.name), words(target.name), Instant::now());
        failures.extend(seeds.iter().filter_map(|seed| attempt(target, seed).err()));
        let mut random = Random(1);
        for _ in 0..rounds {
            let mut input = seeds[random.below(seeds.len())].clone();
            let other = random.below(seeds.len());
            mutate(&mut random, &mut input, &words, &seeds[other]);
            failures.extend(attempt(target, &input).err());
        }
        println!("{}: {} seeds, {rounds} mutants, {:?}", target.name, seeds.len(), started.elapsed());
    }
    assert!(failures.is_empty(), "{} failures, the first:\n{}", failures.len(), failures[0]);
}
