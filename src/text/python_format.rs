//! Values printed as Python prints them.
//!
//! Chat templates are written for Jinja2 on Python: `{{ true }}` is `True`, a list prints as its `repr`, and `tojson` is
//! `json.dumps` with its own spacing. A prompt that differs by one of these is another prompt.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};

use super::template_budget::{Budget, MAX_DEPTH};

/// The template engine's formatter: what `{{ value }}` prints.
pub(super) fn print(out: &mut Output, state: &State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            let text = to_str(state, value)?;
            Budget::of(state).make(text.len() as u64)?;
            out.write_str(&text).map_err(|e| Error::new(ErrorKind::WriteFailure, e.to_string()))
        }
        _ => {
            let budget = Budget::of(state);
            budget.make(budget.weigh(value)?)?;
            minijinja::escape_formatter(out, state, value)
        }
    }
}

/// Python's `str(value)`. What is printed is a small multiple of what the value weighs.
pub(super) fn to_str(state: &State, value: &Value) -> Result<String, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => {
            Budget::of(state).walk(text.len() as u64)?;
            Ok(text.to_owned())
        }
        (ValueKind::Undefined, _) => Ok(String::new()),
        _ => {
            let budget = Budget::of(state);
            budget.make(budget.weigh(value)?)?;
            let mut out = String::new();
            repr(&mut out, value, 0)?;
            Ok(out)
        }
    }
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value nested more than {MAX_DEPTH} levels deep cannot be printed"))
}

fn repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value, "nan", "inf")),
        ValueKind::String => repr_str(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, &key, depth + 1)?;
                out.push_str(": ");
                repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Python's `repr` of a string: single quotes unless only they occur in it.
fn repr_str(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                // Writing to a String cannot fail.
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable` for the characters that occur: no controls, no separators but the space, no invisible
/// formatting, no private use.
fn printable(c: char) -> bool {
    !(c.is_control()
        || (c.is_whitespace() && c != ' ')
        || matches!(c, '\u{AD}' | '\u{600}'..='\u{605}' | '\u{61C}' | '\u{6DD}' | '\u{70F}' | '\u{180E}'
            | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{206F}' | '\u{E000}'..='\u{F8FF}'
            | '\u{FEFF}' | '\u{FFF0}'..='\u{FFFB}' | '\u{FFFE}' | '\u{FFFF}' | '\u{E0000}'..='\u{E007F}'
            | '\u{F0000}'..='\u{10FFFF}'))
}

fn number(value: &Value, nan: &str, infinite: &str) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) if x.is_nan() => nan.to_owned(),
        Ok(x) if x.is_infinite() => format!("{}{infinite}", if x < 0.0 { "-" } else { "" }),
        Ok(x) => float(x),
        Err(_) => value.to_string(),
    }
}

/// Python's `repr` of a finite float: the shortest digits that read back, positional between 1e-4 and 1e16.
fn float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let text = format!("{x}");
        if text.contains('.') { text } else { text + ".0" }
    } else {
        format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
    }
}

/// transformers' `tojson`: `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(state: &State, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent {
        None => None,
        Some(v) if v.is_none() => None,
        Some(v) => match v.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(v.as_usize().unwrap_or(0).min(64))),
        },
    };
    let separators: Option<Value> = options.get("separators")?;
    let (between, colon) = match separators {
        Some(pair) if !pair.is_none() => {
            let text = |i: usize| -> Result<String, Error> {
                pair.get_item_by_index(i)?
                    .as_str()
                    .map(str::to_owned)
                    .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "tojson: `separators` must be two strings"))
            };
            (text(0)?, text(1)?)
        }
        _ if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        _ => (", ".to_owned(), ": ".to_owned()),
    };
    let json = Json {
        indent,
        between,
        colon,
        limit: Budget::of(state).left(),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let budget = Budget::of(state);
    budget.make(budget.weigh(value)?)?;
    let mut out = String::new();
    json.write(&mut out, value, 0)?;
    budget.make(out.len() as u64)?;
    Ok(Value::from(out))
}

struct Json {
    indent: Option<String>,
    between: String,
    colon: String,
    /// Bytes at which writing stops: separators and indentation can be long.
    limit: usize,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Json {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        if out.len() > self.limit {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the template makes too much text"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value, "NaN", "Infinity")),
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.group(out, ('[', ']'), items, depth)?;
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    let text = match key.kind() {
                        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                        ValueKind::None => "null".to_owned(),
                        ValueKind::Bool => (if key.is_true() { "true" } else { "false" }).to_owned(),
                        ValueKind::Number => number(&key, "NaN", "Infinity"),
                        kind => return Err(unserializable(kind)),
                    };
                    items.push((Some(text), value.get_item(&key)?));
                }
                if self.sort_keys {
                    items.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.group(out, ('{', '}'), items, depth)?;
            }
            kind => return Err(unserializable(kind)),
        }
        Ok(())
    }

    fn group(
        &self,
        out: &mut String,
        (open, close): (char, char),
        items: Vec<(Option<String>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), depth));
            }
        };
        out.push(open);
        let any = !items.is_empty();
        for (i, (key, item)) in items.into_iter().enumerate() {
            out.push_str(if i > 0 { &self.between } else { "" });
            line(out, depth + 1);
            if let Some(key) = key {
                self.string(out, &key);
                out.push_str(&self.colon);
            }
            self.write(out, &item, depth + 1)?;
        }
        if any {
            line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a String cannot fail.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn unserializable(kind: ValueKind) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: a value of type {kind} is not JSON"))
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_spelled_as_python_spells_them() {
        for (x, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (123_456_789.125, "123456789.125"),
            (9.999e15, "9999000000000000.0"),
            (1e16, "1e+16"),
            (1.2345e300, "1.2345e+300"),
        ] {
            assert_eq!(float(x), text);
        }
    }
}
