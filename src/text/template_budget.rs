//! What a chat template may use up: memory it makes, work it causes, depth of what it builds.
//!
//! A template is a program from outside. The engine bounds its steps and its recursion, but one step may double a text,
//! search through it or wrap a list once more. So each render has a [`Budget`] that everything draws on which makes or
//! walks values: operators and output (hooked in by [`super::template_guard`]), filters, tests and methods
//! ([`super::template_filters`]). Values nest no deeper than [`MAX_DEPTH`], since printing, comparing and dropping them
//! recurse.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::value::{Object, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Bytes that one render may make, all intermediate texts and lists together. The longest prompts take a few megabytes.
const MADE: u64 = 32 << 20;
/// Bytes that one render may walk over.
const WORK: u64 = 1 << 30;
/// What a step to another value counts for.
const STEP: u64 = 256;
/// Deepest nesting of a value; templates and messages are a few levels deep.
pub(super) const MAX_DEPTH: usize = 100;
/// A namespace may grow after it was put into a list, so a value can be deeper than what was checked when it was built.
const MAX_WALK: usize = 2 * MAX_DEPTH + 10;
/// What an entry of a list takes, in bytes.
const ENTRY: u64 = 32;

/// What is left to one render.
#[derive(Debug)]
pub(super) struct Budget {
    made: AtomicU64,
    work: AtomicU64,
}

impl Object for Budget {}

fn error(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn draw(from: &AtomicU64, n: u64, what: &str) -> Result<(), Error> {
    let taken = from.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(n));
    taken.map(drop).map_err(|_| error(format!("the template {what}")))
}

impl Budget {
    /// The budget of the render that `state` belongs to, macros and blocks included.
    pub fn of(state: &State) -> Arc<Self> {
        state.get_or_set_temp_object("budget", || Self { made: AtomicU64::new(MADE), work: AtomicU64::new(WORK) })
    }

    /// Takes `bytes` of the memory.
    pub fn make(&self, bytes: u64) -> Result<(), Error> {
        draw(&self.made, bytes, &format!("makes more than {} MB of text and lists", MADE >> 20))
    }

    /// Takes room for `entries` of a list.
    pub fn make_entries(&self, entries: u64) -> Result<(), Error> {
        self.make(entries.saturating_mul(ENTRY))
    }

    /// Takes a step to another value.
    pub fn step(&self) -> Result<(), Error> {
        self.walk(STEP)
    }

    /// Takes `n` bytes of the work.
    pub fn walk(&self, n: u64) -> Result<(), Error> {
        draw(&self.work, n, "takes too long")
    }

    /// Bytes that may still be made.
    pub fn left(&self) -> usize {
        usize::try_from(self.made.load(Ordering::Relaxed)).unwrap_or(usize::MAX)
    }

    /// Bytes and nodes of a value, all that is in it included; as much is taken of the work.
    pub fn weigh(&self, value: &Value) -> Result<u64, Error> {
        self.weigh_at(value, 0, MAX_WALK)
    }

    /// Checks that a value just built nests no deeper than allowed.
    pub fn check_depth(&self, value: &Value) -> Result<(), Error> {
        if is_container(value) { self.weigh_at(value, 0, MAX_DEPTH).map(drop) } else { Ok(()) }
    }

    fn weigh_at(&self, value: &Value, depth: usize, limit: usize) -> Result<u64, Error> {
        if depth > limit {
            return Err(error(format!("the template builds a value nested more than {MAX_DEPTH} levels deep")));
        }
        self.step()?;
        let mut total = 1;
        match value.kind() {
            ValueKind::String | ValueKind::Bytes => total += value.as_bytes().map_or(0, |b| b.len() as u64),
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    total += self.weigh_at(&item, depth + 1, limit)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    total += self.weigh_at(&key, depth + 1, limit)?;
                    total += self.weigh_at(&value.get_item(&key)?, depth + 1, limit)?;
                }
            }
            _ => total += 8,
        }
        Ok(total)
    }

    /// Size of a value without looking into its items: bytes of a text, entries of a list.
    pub fn size(&self, value: &Value) -> Result<u64, Error> {
        Ok(match value.kind() {
            ValueKind::String | ValueKind::Bytes => value.as_bytes().map_or(0, |b| b.len() as u64),
            ValueKind::Seq | ValueKind::Map => value.len().unwrap_or(0) as u64,
            ValueKind::Iterable => match value.len() {
                Some(len) => len as u64,
                None => self.items(value)?.len() as u64,
            },
            _ => 1,
        })
    }

    /// The items of a value, paid for.
    pub fn items(&self, value: &Value) -> Result<Vec<Value>, Error> {
        let mut items = Vec::new();
        for item in value.try_iter()? {
            self.make_entries(1)?;
            items.push(item);
        }
        Ok(items)
    }

    /// A lazy value with its items computed, still of the same kind. Lazy values that rest on lazy values recurse.
    pub fn settle(&self, value: Value) -> Result<Value, Error> {
        if value.kind() != ValueKind::Iterable {
            return Ok(value);
        }
        let items = self.items(&value)?;
        Ok(Value::make_object_iterable(items, |items| Box::new(items.iter().cloned())))
    }
}

/// Whether a value has values in it.
pub(super) fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
}
