//! Links a kernel's WGSL: settings, includes, unrolled loops and the `enable` lines of the target compiler.
//!
//! Files under `shaders/` are ordinary WGSL. Four kinds of comment mean something here:
//!
//! | line | meaning |
//! | --- | --- |
//! | `const R: u32 = 4u; // variant` | the value is replaced by the setting `R` if there is one (`alias T = f32; // variant` alike) |
//! | `// include shared/x.wgsl` | that file's text stands here (once per module) |
//! | `// include shared/x.wgsl as kv` | the same, and the setting `kv` names another file to take instead |
//! | `for (var i = 0u; i < R; i++) { // unroll` | the loop is written out, `i` being a literal in every copy of its body |
//!
//! Loops are written out as text because drivers differ in whether they keep a private array in registers when a loop
//! variable indexes it; a literal index leaves them no choice. Bounds are integer expressions over `const` lines.
//!
//! naga wants no `enable subgroups;` and Tint insists on it, so that line is added per target ([`Header`]). With it goes
//! Tint's check that whole workgroups reach every subgroup operation: in attention whole subgroups do, which is enough.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::error::{Error, Result};

/// The value of a setting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// An unsigned constant.
    U32(u32),
    /// A float constant; finite.
    F32(f32),
    /// A switch.
    Bool(bool),
    /// A type (for an `alias`) or the path of a file under `shaders/` (for an include with a name).
    Text(&'static str),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::U32(v) => write!(f, "{v}u"),
            Self::F32(v) => write!(f, "{v:?}f"),
            Self::Bool(v) => write!(f, "{v}"),
            Self::Text(v) => f.write_str(v),
        }
    }
}

/// A named setting of a kernel.
pub type Setting = (&'static str, Value);

/// Which language extensions a module switches on, as the target's compiler wants it said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Header {
    /// `enable f16;`, both compilers.
    pub f16: bool,
    /// `enable subgroups;` and no check of uniformity, Tint only (naga knows the built-ins without it and refuses the line).
    pub subgroups: bool,
}

/// Finds the text of a file under `shaders/` by its path from there.
pub type Files<'a> = &'a dyn Fn(&str) -> Option<&'static str>;

/// Writes out the module of the kernel in `path`, with `settings` in place of the defaults.
///
/// # Errors
/// [`Error::Internal`] naming file and line: a missing file, a setting that no line takes, a loop that cannot be written out.
pub fn link(path: &str, settings: &[Setting], header: Header, files: Files) -> Result<String> {
    let mut linker = Linker { settings, used: vec![false; settings.len()], files, included: Vec::new(), lines: Vec::new() };
    linker.include(path)?;
    if let Some((name, _)) = settings.iter().zip(&linker.used).find_map(|(setting, used)| (!used).then_some(setting)) {
        return Err(Error::Internal(format!("{path} has no setting `{name}`")));
    }
    let lines = linker.lines;
    let constants = constants(&lines);
    let mut out = String::new();
    if header.f16 {
        out.push_str("enable f16;\n");
    }
    if header.subgroups {
        out.push_str("enable subgroups;\ndiagnostic(off, subgroup_uniformity);\n");
    }
    unroll(path, &lines, &constants, &mut out)?;
    Ok(out)
}

struct Linker<'a> {
    settings: &'a [Setting],
    used: Vec<bool>,
    files: Files<'a>,
    included: Vec<String>,
    lines: Vec<String>,
}

impl Linker<'_> {
    fn setting(&mut self, name: &str) -> Option<Value> {
        let at = self.settings.iter().position(|(n, _)| *n == name)?;
        if let Some(used) = self.used.get_mut(at) {
            *used = true;
        }
        self.settings.get(at).map(|(_, value)| *value)
    }

    fn include(&mut self, path: &str) -> Result<()> {
        if self.included.iter().any(|p| p == path) {
            return Ok(());
        }
        self.included.push(path.to_owned());
        let text = (self.files)(path).ok_or_else(|| Error::Internal(format!("no shader file {path}")))?;
        for (number, line) in text.lines().enumerate() {
            let trimmed = line.trim();
            if let Some(rest) = trimmed.strip_prefix("// include ") {
                let (default, slot) = match rest.split_once(" as ") {
                    Some((file, slot)) => (file.trim(), Some(slot.trim())),
                    None => (rest.trim(), None),
                };
                match slot.and_then(|slot| self.setting(slot)) {
                    Some(Value::Text(file)) => self.include(file)?,
                    Some(other) => return Err(Error::Internal(format!("{path}:{}: `{other}` is no file", number + 1))),
                    None => self.include(default)?,
                }
            } else if let Some((code, _)) = trimmed.split_once("// variant") {
                let bad = || Error::Internal(format!("{path}:{}: a variant line is `const NAME: T = VALUE;`", number + 1));
                let (left, _) = code.split_once('=').ok_or_else(bad)?;
                let declared = left.trim().strip_prefix("const ").or_else(|| left.trim().strip_prefix("alias "));
                let name = declared.and_then(|d| d.split(':').next()).map(str::trim).ok_or_else(bad)?;
                match self.setting(name) {
                    Some(value) => self.lines.push(format!("{} = {value};", left.trim_end())),
                    None => self.lines.push(code.trim_end().to_owned()),
                }
            } else {
                self.lines.push(line.to_owned());
            }
        }
        Ok(())
    }
}

/// All `const NAME = ...;` lines whose value is an integer expression over earlier ones.
fn constants(lines: &[String]) -> BTreeMap<String, i64> {
    let mut known = BTreeMap::new();
    for line in lines {
        let Some((left, right)) = code(line).trim().strip_prefix("const ").and_then(|l| l.split_once('=')) else { continue };
        let name = left.split(':').next().unwrap_or("").trim();
        if let Some(value) = evaluate(right.trim().trim_end_matches(';'), &known) {
            known.insert(name.to_owned(), value);
        }
    }
    known
}

/// A line without its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or("")
}

/// Copies `lines` to `out`, writing out the loops marked `// unroll`.
fn unroll(path: &str, lines: &[String], constants: &BTreeMap<String, i64>, out: &mut String) -> Result<()> {
    let mut rest = lines;
    while let [line, tail @ ..] = rest {
        if !line.trim_end().ends_with("// unroll") {
            // Comments are not needed by any compiler; leaving them out keeps what crosses to the browser small.
            let kept = code(line).trim_end();
            if !kept.is_empty() {
                let _ = writeln!(out, "{kept}");
            }
            rest = tail;
            continue;
        }
        let bad = |why: &str| Error::Internal(format!("{path}: cannot unroll `{}`: {why}", line.trim()));
        let head = Loop::parse(line, constants).ok_or_else(|| bad("expected `for (var i = 0u; i < N; i++) { // unroll`"))?;
        let mut depth = 1i32;
        let length = tail
            .iter()
            .position(|l| {
                for c in code(l).chars() {
                    depth += i32::from(c == '{') - i32::from(c == '}');
                }
                depth <= 0
            })
            .ok_or_else(|| bad("no closing brace"))?;
        let (body, after) = tail.split_at(length);
        match after {
            [end, after @ ..] if code(end).trim() == "}" => rest = after,
            _ => return Err(bad("its closing brace must stand on a line of its own")),
        }
        if body.iter().any(|l| words(code(l)).any(|w| matches!(w, "continue" | "break"))) {
            return Err(bad("its body may not hold `break` or `continue`"));
        }
        for value in head.values {
            let literal = format!("{value}{}", head.suffix);
            let copy: Vec<String> = body.iter().map(|l| replace_word(l, head.name, &literal)).collect();
            out.push_str("{\n");
            unroll(path, &copy, constants, out)?;
            out.push_str("}\n");
        }
    }
    Ok(())
}

struct Loop<'a> {
    name: &'a str,
    suffix: &'static str,
    values: Vec<i64>,
}

impl<'a> Loop<'a> {
    fn parse(line: &'a str, constants: &BTreeMap<String, i64>) -> Option<Self> {
        const MOST: usize = 1024;
        let inner = code(line).trim().strip_prefix("for")?.trim().strip_prefix('(')?;
        let inner = inner.trim_end().strip_suffix('{')?.trim_end().strip_suffix(')')?;
        let mut parts = inner.splitn(3, ';').map(str::trim);
        let (start, condition, step) = (parts.next()?, parts.next()?, parts.next()?);
        let (left, start) = start.strip_prefix("var ")?.split_once('=')?;
        let (name, declared) = match left.split_once(':') {
            Some((name, ty)) => (name.trim(), Some(ty.trim())),
            None => (left.trim(), None),
        };
        let suffix = match declared {
            Some("u32") => "u",
            Some("i32") => "i",
            Some(_) => return None,
            None if start.trim().ends_with('u') => "u",
            None if start.trim().chars().all(|c| c.is_ascii_digit()) => "i",
            None => return None,
        };
        let end = evaluate(condition.strip_prefix(name)?.trim().strip_prefix('<')?, constants)?;
        let step = match step.strip_prefix(name)?.trim() {
            "++" => 1,
            other => evaluate(other.strip_prefix("+=")?, constants)?,
        };
        let start = evaluate(start, constants)?;
        if step < 1 {
            return None;
        }
        let values: Vec<i64> = (start..end).step_by(usize::try_from(step).ok()?).take(MOST + 1).collect();
        (values.len() <= MOST).then_some(Self { name, suffix, values })
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_word(c)).filter(|w| !w.is_empty())
}

/// Replaces the identifier `name` where it stands alone and is not a member (`v.x`).
fn replace_word(text: &str, name: &str, by: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut before = ' ';
    while let Some(c) = rest.chars().next() {
        let length = if is_word(c) { rest.find(|c| !is_word(c)).unwrap_or(rest.len()) } else { c.len_utf8() };
        let (token, tail) = rest.split_at(length);
        out.push_str(if token == name && before != '.' { by } else { token });
        before = token.chars().next_back().unwrap_or(' ');
        rest = tail;
    }
    out
}

/// Integer arithmetic with `+ - * / %`, parentheses, `min`, `max` and names; `None` for anything else.
fn evaluate(text: &str, names: &BTreeMap<String, i64>) -> Option<i64> {
    let mut parser = Parser { rest: text.trim(), names };
    let value = parser.sum()?;
    parser.rest.trim().is_empty().then_some(value)
}

struct Parser<'a> {
    rest: &'a str,
    names: &'a BTreeMap<String, i64>,
}

impl<'a> Parser<'a> {
    fn eat(&mut self, token: char) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(token) {
            Some(tail) => {
                self.rest = tail;
                true
            }
            None => false,
        }
    }

    fn sum(&mut self) -> Option<i64> {
        let mut value = self.product()?;
        loop {
            if self.eat('+') {
                value = value.checked_add(self.product()?)?;
            } else if self.eat('-') {
                value = value.checked_sub(self.product()?)?;
            } else {
                return Some(value);
            }
        }
    }

    fn product(&mut self) -> Option<i64> {
        let mut value = self.atom()?;
        loop {
            if self.eat('*') {
                value = value.checked_mul(self.atom()?)?;
            } else if self.eat('/') {
                value = value.checked_div(self.atom()?)?;
            } else if self.eat('%') {
                value = value.checked_rem(self.atom()?)?;
            } else {
                return Some(value);
            }
        }
    }

    fn atom(&mut self) -> Option<i64> {
        if self.eat('(') {
            let value = self.sum()?;
            return self.eat(')').then_some(value);
        }
        self.rest = self.rest.trim_start();
        let length = self.rest.find(|c| !is_word(c)).unwrap_or(self.rest.len());
        let (word, tail): (&'a str, &'a str) = self.rest.split_at(length);
        self.rest = tail;
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return word.trim_end_matches(['u', 'i']).parse().ok();
        }
        if matches!(word, "min" | "max") && self.eat('(') {
            let a = self.sum()?;
            let b = self.eat(',').then(|| self.sum())??;
            let value = if word == "min" { a.min(b) } else { a.max(b) };
            return self.eat(')').then_some(value);
        }
        self.names.get(word).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(path: &str) -> Option<&'static str> {
        Some(match path {
            "k.wgsl" => {
                "// include shared/a.wgsl as slot\n// include shared/a.wgsl\nconst R: u32 = 4u; // variant\n\
                 const EPS: f32 = 1e-5; // variant\nconst N: u32 = (R + 2u) * 2u - min(R, 3u);\n\
                 fn f() {\n    for (var i = 0u; i < R; i++) { // unroll\n        x[i] = v.i + ix; // comment\n\
                 for (var j = 1; j < N / 3u; j += 2) { // unroll\n y[i][j] = 0;\n }\n    }\n}\n"
            }
            "bad.wgsl" => "const R: u32 = 4u; // variant\nfn f() {\n for (var i = 0u; i < r; i++) { // unroll\n }\n}\n",
            "jump.wgsl" => "fn f() {\n for (var i = 0u; i < 2u; i++) { // unroll\n  if (x) { break; }\n }\n}\n",
            "shared/a.wgsl" => "fn a() {}\n",
            "shared/b.wgsl" => "fn b() {}\n",
            _ => return None,
        })
    }

    fn run(path: &str, settings: &[Setting]) -> Result<String> {
        link(path, settings, Header::default(), &files)
    }

    #[test]
    fn settings_replace_defaults_and_loops_are_written_out() {
        let text = run("k.wgsl", &[("R", Value::U32(2)), ("EPS", Value::F32(1e-6))]).unwrap();
        assert_eq!(
            text,
            "fn a() {}\nconst R: u32 = 2u;\nconst EPS: f32 = 1e-6f;\nconst N: u32 = (R + 2u) * 2u - min(R, 3u);\nfn f() {\n\
             {\n        x[0u] = v.i + ix;\n{\n y[0u][1i] = 0;\n}\n}\n{\n        x[1u] = v.i + ix;\n{\n y[1u][1i] = 0;\n}\n}\n}\n"
        );
        let default = run("k.wgsl", &[]).unwrap();
        assert!(default.contains("const R: u32 = 4u;\n") && default.contains("x[3u]") && default.contains("y[3u][1i]"));
        assert!(!default.contains("y[3u][3i]"), "N / 3 is 3 and excluded");
    }

    #[test]
    fn includes_stand_once_and_can_be_replaced() {
        let text = run("k.wgsl", &[("slot", Value::Text("shared/b.wgsl"))]).unwrap();
        assert!(text.starts_with("fn b() {}\nfn a() {}\n"));
        assert_eq!(run("k.wgsl", &[]).unwrap().matches("fn a").count(), 1);
        let header = Header { f16: true, subgroups: true };
        assert!(
            link("k.wgsl", &[], header, &files)
                .unwrap()
                .starts_with("enable f16;\nenable subgroups;\ndiagnostic(off, subgroup_uniformity);\nfn a")
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (path, settings, said) in [
            ("k.wgsl", vec![("Q", Value::U32(1))], "no setting `Q`"),
            ("none.wgsl", vec![], "no shader file none.wgsl"),
            ("k.wgsl", vec![("slot", Value::U32(1))], "is no file"),
            ("bad.wgsl", vec![], "cannot unroll"),
            ("jump.wgsl", vec![], "break"),
        ] {
            let error = run(path, &settings).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
