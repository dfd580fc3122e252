//! Jinja's filters, tests and Python's methods, paid for from the render's [`Budget`].
//!
//! Each of the engine's own is kept under a hidden name and called by one of ours that draws on the budget first. Those
//! that multiply (by a number, or by how often a text occurs) say beforehand what they will make.

use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters, tests};

use super::python_format;
use super::template_budget::{Budget, is_container};
use super::template_guard::compare;

/// Largest width, precision or count in a format, and of an indentation.
const MAX_WIDTH: u64 = 10_000;

fn invalid(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// What a filter's arguments say of what it makes.
#[derive(Clone, Copy)]
enum Cost {
    /// A list as long as its arguments together, at most.
    Entries,
    /// Compares all that is in its arguments, some times over.
    Compares,
    /// A text made of its arguments.
    Text,
    /// As many lists as its arguments' items and numbers say.
    Groups,
    /// Lines with as many spaces in front as its largest number says.
    Indents,
}

fn pay(budget: &Budget, cost: Cost, arguments: &[Value]) -> Result<(), Error> {
    let numbers = || arguments.iter().filter_map(largest).max();
    match cost {
        Cost::Entries | Cost::Groups => {
            let mut total = if matches!(cost, Cost::Groups) { numbers().unwrap_or(0) } else { 0 };
            for value in arguments {
                total = total.saturating_add(budget.size(value)?);
            }
            budget.make_entries(total.saturating_mul(2))
        }
        Cost::Compares => {
            for value in arguments {
                let weight = budget.weigh(value)?;
                budget.walk(weight.saturating_mul(8))?;
                budget.make_entries(2 * budget.size(value)?)?;
            }
            Ok(())
        }
        Cost::Text => arguments.iter().try_for_each(|value| {
            let weight = budget.weigh(value)?;
            budget.make(weight.saturating_mul(3))
        }),
        Cost::Indents => {
            let width = numbers().unwrap_or(4);
            if width > MAX_WIDTH {
                return Err(invalid(format!("indent: a width of {width}; expected at most {MAX_WIDTH}")));
            }
            for value in arguments {
                let lines = value.as_str().map_or(0, |text| text.matches('\n').count() as u64);
                let weight = budget.weigh(value)?;
                budget.make(weight.saturating_add((lines + 1).saturating_mul(width)))?;
            }
            Ok(())
        }
    }
}

/// The largest number that an argument is, or holds by name.
fn largest(value: &Value) -> Option<u64> {
    if value.is_kwargs() {
        let values = value.try_iter().ok()?.filter_map(|key| value.get_item(&key).ok());
        return values.filter_map(|v| v.as_usize()).max().map(|n| n as u64);
    }
    value.as_usize().map(|n| n as u64)
}

fn paid(state: &State, hidden: &str, cost: Cost, arguments: &[Value]) -> Result<Value, Error> {
    let budget = Budget::of(state);
    pay(&budget, cost, arguments)?;
    let made = budget.settle(state.apply_filter(hidden, arguments)?)?;
    budget.check_depth(&made)?;
    Ok(made)
}

macro_rules! paid_filters {
    ($environment:ident: $($name:literal = $filter:ident, $cost:ident;)*) => {$(
        $environment.add_filter(concat!("\0", $name), filters::$filter);
        $environment.add_filter($name, |state: &State, arguments: Rest<Value>| {
            paid(state, concat!("\0", $name), Cost::$cost, &arguments)
        });
    )*};
}

macro_rules! paid_tests {
    ($environment:ident: $($name:literal = $test:ident;)*) => {$(
        $environment.add_test(concat!("\0", $name), tests::$test);
        $environment.add_test($name, |state: &State, arguments: Rest<Value>| -> Result<bool, Error> {
            let budget = Budget::of(state);
            arguments.iter().try_for_each(|value| compare(&budget, value, &Value::UNDEFINED))?;
            state.perform_test(concat!("\0", $name), &arguments)
        });
    )*};
}

/// Puts all filters and tests that make or walk values on the budget. Those not named here cost no more than a step.
pub(super) fn add(environment: &mut Environment<'static>) {
    paid_filters! { environment:
        "safe" = safe, Text; "escape" = escape, Text; "e" = escape, Text;
        "upper" = upper, Text; "lower" = lower, Text; "title" = title, Text; "capitalize" = capitalize, Text;
        "trim" = trim, Text; "split" = split, Text; "lines" = lines, Text;
        "length" = length, Entries; "count" = length, Entries;
        "dictsort" = dictsort, Compares; "items" = items, Entries; "reverse" = reverse, Entries;
        "first" = first, Entries; "last" = last, Entries; "list" = list, Entries;
        "min" = min, Compares; "max" = max, Compares; "sort" = sort, Compares; "unique" = unique, Compares;
        "sum" = sum, Compares; "groupby" = groupby, Compares;
        "batch" = batch, Groups; "slice" = slice, Groups; "indent" = indent, Indents;
        "select" = select, Entries; "reject" = reject, Entries; "selectattr" = selectattr, Entries;
        "rejectattr" = rejectattr, Entries; "map" = map, Entries; "chain" = chain, Entries; "zip" = zip, Entries;
    }
    paid_tests! { environment:
        "eq" = is_eq; "equalto" = is_eq; "==" = is_eq; "ne" = is_ne; "!=" = is_ne;
        "lt" = is_lt; "lessthan" = is_lt; "<" = is_lt; "le" = is_le; "<=" = is_le;
        "gt" = is_gt; "greaterthan" = is_gt; ">" = is_gt; "ge" = is_ge; ">=" = is_ge;
        "in" = is_in; "startingwith" = is_startingwith; "endingwith" = is_endingwith;
        "lower" = is_lower; "upper" = is_upper;
    }
    // For people who debug templates; what it prints is no prompt.
    environment.remove_filter("pprint");
    environment
        .add_filter("tojson", |state: &State, value: &Value, options: Kwargs| python_format::tojson(state, value, options));
    environment.add_filter("string", |state: &State, value: &Value| made(state, python_format::to_str(state, value)?));
    environment
        .add_filter("join", |state: &State, items: &Value, between: Option<&str>| join(state, items, between.unwrap_or("")));
    environment.add_filter("replace", |state: &State, arguments: Rest<Value>| {
        let (text, old, new, count, options): (&Value, &str, &str, Option<usize>, Kwargs) = from_args(&arguments)?;
        let count = count.or(options.get("count")?);
        options.assert_all_used()?;
        replace(state, &python_format::to_str(state, text)?, old, new, count.unwrap_or(usize::MAX))
    });
    environment.add_filter("\0format", filters::format);
    environment.add_filter("format", |state: &State, arguments: Rest<Value>| {
        pay_format(&Budget::of(state), &arguments)?;
        state.apply_filter("\0format", &arguments)
    });
    environment.set_unknown_method_callback(method);
}

fn made(state: &State, text: String) -> Result<Value, Error> {
    Budget::of(state).make(text.len() as u64)?;
    Ok(Value::from(text))
}

fn join(state: &State, items: &Value, between: &str) -> Result<Value, Error> {
    let budget = Budget::of(state);
    let mut text = String::new();
    for (i, item) in items.try_iter()?.enumerate() {
        let item = python_format::to_str(state, &item)?;
        budget.make((item.len() + between.len()) as u64)?;
        text.push_str(if i > 0 { between } else { "" });
        text.push_str(&item);
    }
    Ok(Value::from(text))
}

fn replace(state: &State, text: &str, old: &str, new: &str, count: usize) -> Result<Value, Error> {
    let budget = Budget::of(state);
    budget.walk(2 * text.len() as u64)?;
    let times = text.matches(old).take(count).count() as u64;
    budget.make((text.len() as u64).saturating_add(times.saturating_mul(new.len() as u64)))?;
    Ok(Value::from(text.replacen(old, new, count)))
}

/// Pays for `format % arguments` or `format.format(arguments)`: a format can ask for any width by number.
fn pay_format(budget: &Budget, arguments: &[Value]) -> Result<(), Error> {
    let format = arguments.first().and_then(Value::as_str).unwrap_or_default();
    let mut number = 0_u64;
    for byte in format.bytes() {
        number = if byte.is_ascii_digit() { number.saturating_mul(10).saturating_add(u64::from(byte - b'0')) } else { 0 };
        if number > MAX_WIDTH {
            return Err(invalid(format!("format: a number above {MAX_WIDTH} in the format")));
        }
    }
    let places = format.bytes().filter(|byte| matches!(byte, b'%' | b'{')).count() as u64;
    // `%*d` takes its width from the arguments.
    if format.contains('*') && arguments.iter().filter_map(largest).any(|n| n > MAX_WIDTH) {
        return Err(invalid(format!("format: a width above {MAX_WIDTH}")));
    }
    let widest = if format.bytes().any(|byte| byte.is_ascii_digit() || byte == b'*') { MAX_WIDTH } else { 512 };
    budget.make(places.saturating_mul(widest))?;
    // An argument may be named more than once.
    for value in arguments {
        let weight = budget.weigh(value)?;
        budget.make(weight.saturating_mul(4).saturating_mul(places.max(1)))?;
    }
    Ok(())
}

/// Python's methods of texts, lists and maps.
fn method(state: &State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let budget = Budget::of(state);
    match (value.as_str(), name, arguments) {
        (Some(text), "join", [items]) => return join(state, items, text),
        (Some(text), "replace", [old, new, count @ ..]) if count.len() < 2 => {
            let (Some(old), Some(new)) = (old.as_str(), new.as_str()) else {
                return Err(invalid("replace: expected two texts"));
            };
            let count = count.first().and_then(Value::as_i64).and_then(|n| usize::try_from(n).ok());
            return replace(state, text, old, new, count.unwrap_or(usize::MAX));
        }
        (Some(text), "count", [what]) => {
            let what = what.as_str().ok_or_else(|| invalid("count: expected a text"))?;
            budget.walk(text.len() as u64)?;
            return Ok(Value::from(text.matches(what).count()));
        }
        (Some(_), "format", _) => {
            let all: Vec<Value> = std::iter::once(value).chain(arguments).cloned().collect();
            pay_format(&budget, &all)?;
        }
        (Some(text), _, _) => {
            budget.make(3 * text.len() as u64)?;
            if matches!(name, "split" | "splitlines") {
                budget.make_entries(text.len() as u64 / 2)?;
            }
            for argument in arguments {
                let weight = budget.weigh(argument)?;
                budget.make(weight.saturating_mul(4))?;
            }
        }
        (None, "get", [key, ..]) => {
            budget.weigh(key)?;
        }
        (None, "keys" | "values" | "items", _) => {
            budget.make_entries(budget.size(value)?.saturating_mul(3))?;
        }
        _ => {
            if is_container(value) {
                budget.weigh(value)?;
            }
        }
    }
    let result = minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)?;
    match result.kind() {
        ValueKind::Iterable => budget.settle(result),
        _ => Ok(result),
    }
}
