//! Reading JSON files that come from outside: every failure names the file, the field, what came and what was expected.

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Longest JSON file read whole (a config, an index or a tokenizer's side file), in bytes.
pub const MAX_JSON_BYTES: u64 = 64 << 20;

/// Parses `bytes` as one JSON object.
///
/// # Errors
/// [`Error::BadConfig`] naming `file`.
pub fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Error::BadConfig(format!("{file}: expected a JSON object, found {}", shown(&other)))),
        Err(e) => Err(Error::BadConfig(format!("{file}: not readable as JSON ({e}); is the file whole?"))),
    }
}

/// An object of a JSON file and where it stands there. `null` counts as absent everywhere.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    file: &'a str,
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The whole file.
    #[must_use]
    pub fn new(file: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, path: String::new(), map }
    }

    /// The value of a field that is there and not null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// Whether the field is in the file, be it null.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Fields in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.map.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// An error about a field: `file: field is CAME; expected EXPECTED`.
    #[must_use]
    pub fn wrong(&self, name: &str, expected: &str) -> Error {
        let came = self.map.get(name).map_or_else(|| "missing".to_owned(), shown);
        Error::BadConfig(format!("{}: `{}{name}` is {came}; expected {expected}", self.file, self.path))
    }

    /// An integer in `1..=max`.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else but an absent field.
    pub fn size(&self, name: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64().and_then(|v| usize::try_from(v).ok()) {
            Some(v) if (1..=max).contains(&v) => Ok(Some(v)),
            _ => Err(self.wrong(name, &format!("an integer from 1 to {max}"))),
        }
    }

    /// As [`Fields::size`], for a field that must be there.
    ///
    /// # Errors
    /// [`Error::BadConfig`].
    pub fn required_size(&self, name: &str, max: usize) -> Result<usize> {
        self.size(name, max)?.ok_or_else(|| self.wrong(name, &format!("an integer from 1 to {max}")))
    }

    /// A finite number.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else but an absent field.
    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(v) if v.is_finite() => Ok(Some(v)),
            _ => Err(self.wrong(name, "a finite number")),
        }
    }

    /// A finite number above zero.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else but an absent field.
    pub fn positive(&self, name: &str) -> Result<Option<f64>> {
        match self.number(name)? {
            Some(v) if v <= 0.0 => Err(self.wrong(name, "a number above 0")),
            v => Ok(v),
        }
    }

    /// As [`Fields::positive`], for a field that must be there.
    ///
    /// # Errors
    /// [`Error::BadConfig`].
    pub fn required_positive(&self, name: &str) -> Result<f64> {
        self.positive(name)?.ok_or_else(|| self.wrong(name, "a number above 0"))
    }

    /// true or false.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else but an absent field.
    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(name, "true or false"))
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else but an absent field.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(name, "a string"))
    }

    /// An object.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else but an absent field.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_object() {
            Some(map) => Ok(Some(Fields { file: self.file, path: format!("{}{name}.", self.path), map })),
            None => Err(self.wrong(name, "an object")),
        }
    }

    /// A list.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else but an absent field.
    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_array().map(|v| Some(v.as_slice())).ok_or_else(|| self.wrong(name, "a list"))
    }

    /// A token id.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else but an absent field.
    pub fn token(&self, name: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        token_id(value).map(Some).ok_or_else(|| self.wrong(name, "a token id"))
    }

    /// A token id or a list of them; empty where absent.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for anything else.
    pub fn tokens(&self, name: &str) -> Result<Vec<u32>> {
        let ids = match self.get(name) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(token_id).collect(),
            Some(value) => token_id(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.wrong(name, "a token id or a list of token ids"))
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|v| u32::try_from(v).ok())
}

/// A value as messages show it: short.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", text.get(..at).unwrap_or_default()),
        None => text,
    }
}
