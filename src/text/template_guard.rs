//! Chat templates compiled so that they cannot take memory or time without bound.
//!
//! The engine compiles a template to a list of instructions. Its operators cannot be replaced from outside, so the list
//! is rewritten: in front of each operator that makes or walks values a call is put to a function of ours, which looks at
//! the operands, draws on the render's [`Budget`] and hands them back. The functions' names are no identifiers, so no
//! template can define or call them. Raw text is printed like every other value, since the formatter counts.
//!
//! Before any of that the source's tokens are looked at: the engine's parser and compiler recurse along chains of
//! operators and brackets, and compute constants while they compile.

use minijinja::machinery::{CompiledTemplate, Instruction, Instructions, Token, Tokenizer};
use minijinja::value::{Enumerator, Object, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::python_format;
use super::template_budget::{Budget, is_container};

/// Longest template, in bytes; the longest published ones have some tens of thousands.
const MAX_SOURCE: usize = 1 << 20;
/// Operators, subscripts and filters that hang on each other in one expression.
const MAX_CHAIN: usize = 200;
/// Brackets inside each other in one expression.
const MAX_BRACKETS: usize = 40;
/// Blocks inside each other; each `elif` is one inside the branch before.
const MAX_BLOCKS: usize = 60;
/// Bytes that all constant expressions together may come to.
const MAX_CONSTANTS: u64 = 16 << 20;
/// Items of a list or call written out in the template.
const MAX_ITEMS: usize = 10_000;

fn syntax(reason: String) -> Error {
    Error::new(ErrorKind::SyntaxError, reason)
}

fn invalid(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Whitespace as transformers sets it up.
fn whitespace() -> minijinja::machinery::WhitespaceConfig {
    minijinja::machinery::WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true }
}

/// Compiles a template for [`evaluate`].
pub(super) fn compile<'s>(name: &'s str, source: &'s str) -> Result<CompiledTemplate<'s>, Error> {
    check_nesting(name, source)?;
    let config = minijinja::machinery::TemplateConfig {
        syntax_config: minijinja::syntax::SyntaxConfig,
        ws_config: whitespace(),
        default_auto_escape: Arc::new(|_| minijinja::AutoEscape::None),
    };
    let mut template = CompiledTemplate::new(name, source, &config)?;
    template.instructions = guard(&template.instructions)?;
    for block in template.blocks.values_mut() {
        *block = guard(block)?;
    }
    Ok(template)
}

/// Renders a template that [`compile`] made.
pub(super) fn evaluate<'s>(
    environment: &'s Environment<'s>,
    template: &'s CompiledTemplate<'s>,
    context: Value,
) -> Result<String, Error> {
    let mut text = String::new();
    {
        let mut out = minijinja::machinery::make_string_output(&mut text);
        let vm = minijinja::machinery::Vm::new(environment);
        vm.eval(&template.instructions, context, &template.blocks, &mut out, template.initial_auto_escape)?;
    }
    Ok(text)
}

/// Refuses what would make the parser or the compiler recurse deeply, or compute constants without bound.
fn check_nesting(name: &str, source: &str) -> Result<(), Error> {
    if source.len() > MAX_SOURCE {
        return Err(syntax(format!("the template has {} bytes; expected at most {MAX_SOURCE}", source.len())));
    }
    let mut tokens = Tokenizer::new(source, name, false, minijinja::syntax::SyntaxConfig, whitespace());
    let mut tag = Tag::default();
    let (mut open, mut constants, mut starts) = (Vec::<usize>::new(), 0_u64, false);
    while let Some((token, _)) = tokens.next_token()? {
        match &token {
            Token::BlockStart | Token::VariableStart => {
                tag = Tag::default();
                starts = matches!(token, Token::BlockStart);
                continue;
            }
            Token::BlockEnd | Token::VariableEnd => constants = constants.saturating_add(tag.constant_bytes()),
            Token::Ident(word) if starts => match *word {
                "if" | "for" | "with" | "macro" | "call" | "filter" | "block" | "autoescape" | "set" => open.push(1),
                "elif" => open.iter_mut().rev().take(1).for_each(|branches| *branches += 1),
                word if word.starts_with("end") => drop(open.pop()),
                _ => {}
            },
            // A `set` with a value is no block.
            Token::Assign if tag.is_set && tag.levels.len() <= 1 => drop(open.pop()),
            _ => {}
        }
        tag.take(&token, starts);
        starts = false;
        if tag.chain() > MAX_CHAIN || tag.levels.len() > MAX_BRACKETS || open.iter().sum::<usize>() > MAX_BLOCKS {
            return Err(syntax("the template is nested too deeply, or an expression in it is too long".to_owned()));
        }
        if constants > MAX_CONSTANTS {
            return Err(syntax("the template's constant expressions are too large".to_owned()));
        }
    }
    Ok(())
}

/// What is inside the braces of one tag.
#[derive(Default)]
struct Tag {
    /// Per open bracket: operators, and subscripts and filters since the last operator.
    levels: Vec<(usize, usize)>,
    is_set: bool,
    literal_bytes: u64,
    product: u64,
    multiplies: bool,
}

impl Tag {
    fn take(&mut self, token: &Token, first: bool) {
        if self.levels.is_empty() {
            self.levels.push((0, 0));
        }
        let Some(top) = self.levels.last_mut() else { return };
        match token {
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => {
                top.1 += 1;
                self.levels.push((0, 0));
                self.literal_bytes = self.literal_bytes.saturating_add(32);
            }
            Token::BracketClose | Token::ParenClose | Token::BraceClose => self.levels.truncate(self.levels.len().max(2) - 1),
            Token::Comma | Token::Colon => *top = (0, 0),
            Token::Assign => {
                *top = (0, 0);
                self.is_set &= self.levels.len() > 1;
            }
            Token::Dot | Token::Pipe | Token::Ident("is") => top.1 += 1,
            Token::Ident("set") if first => self.is_set = true,
            Token::Mul | Token::Pow => {
                *top = (top.0 + 1, 0);
                self.multiplies = true;
                if matches!(token, Token::Pow) {
                    self.product = u64::MAX;
                }
            }
            Token::Plus
            | Token::Minus
            | Token::Div
            | Token::FloorDiv
            | Token::Mod
            | Token::Tilde
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
            | Token::Ident("and" | "or" | "not" | "in" | "if" | "else") => *top = (top.0 + 1, 0),
            Token::Str(text) => self.literal_bytes = self.literal_bytes.saturating_add(text.len() as u64),
            Token::String(text) => self.literal_bytes = self.literal_bytes.saturating_add(text.len() as u64),
            Token::Int(n) => self.product = self.product.max(1).saturating_mul((*n).max(1)),
            Token::Int128(_) | Token::Float(_) => self.product = u64::MAX,
            _ => {}
        }
    }

    fn chain(&self) -> usize {
        self.levels.iter().map(|(operators, postfix)| operators + postfix).sum()
    }

    /// A bound on what the tag's constants can be multiplied to.
    fn constant_bytes(&self) -> u64 {
        if self.multiplies { self.literal_bytes.saturating_mul(self.product.max(1)) } else { self.literal_bytes }
    }
}

/// The instructions with calls to our functions in front of operators.
fn guard<'s>(from: &Instructions<'s>) -> Result<Instructions<'s>, Error> {
    let too_many = || syntax(format!("a list or call in the template has more than {MAX_ITEMS} items"));
    let count = |n: usize| u16::try_from(n).ok().filter(|_| n <= MAX_ITEMS).ok_or_else(too_many);
    let (mut out, mut starts, mut last) = (Vec::new(), Vec::new(), 0);
    for at in 0..from.len() as u32 {
        let Some(instruction) = from.get(at) else { break };
        let line = from.get_line(at).and_then(|line| u16::try_from(line).ok()).unwrap_or(last);
        last = line;
        starts.push(out.len() as u32);
        let mut push = |instruction: Instruction<'s>| out.push((instruction, line));
        let pair = |name: &'static str| [Instruction::CallFunction(name, Some(2)), Instruction::UnpackList(2)];
        match instruction {
            Instruction::EmitRaw(text) => {
                push(Instruction::LoadConst(Value::from_safe_string((*text).to_owned())));
                push(Instruction::Emit);
            }
            Instruction::Add => pair(ADD).into_iter().chain([instruction.clone()]).for_each(push),
            Instruction::Mul => {
                pair(MUL).into_iter().chain([instruction.clone()]).for_each(&mut push);
                push(Instruction::CallFunction(SETTLE, Some(1)));
            }
            Instruction::StringConcat => pair(CONCAT).into_iter().chain([instruction.clone()]).for_each(push),
            Instruction::Eq
            | Instruction::Ne
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::Lt
            | Instruction::Lte
            | Instruction::In
            | Instruction::CompareAndPreserve(_) => pair(COMPARE).into_iter().chain([instruction.clone()]).for_each(push),
            Instruction::GetItem => pair(ITEM).into_iter().chain([instruction.clone()]).for_each(push),
            Instruction::Slice => push(Instruction::CallFunction(SLICE, Some(4))),
            Instruction::BuildList(Some(n)) => push(Instruction::CallFunction(LIST, Some(count(*n)?))),
            Instruction::BuildMap(n) => push(Instruction::CallFunction(MAP, Some(count(n.saturating_mul(2))?))),
            Instruction::BuildKwargs(n) => {
                count(*n)?;
                push(instruction.clone());
            }
            Instruction::SetAttr(name) => {
                push(Instruction::LoadConst(Value::from(*name)));
                push(Instruction::CallFunction(SET, Some(3)));
                push(Instruction::DiscardTop);
            }
            // The items that a filtered loop goes through.
            Instruction::BuildList(None) => {
                push(instruction.clone());
                push(Instruction::CallFunction(BUILT, Some(1)));
            }
            Instruction::UnpackLists(_) | Instruction::MergeKwargs(_) => {
                return Err(syntax("arguments unpacked with `*` or `**` are not supported in chat templates".to_owned()));
            }
            Instruction::Include(_) | Instruction::LoadBlocks => {
                return Err(syntax("chat templates cannot include, import or extend other templates".to_owned()));
            }
            other => push(other.clone()),
        }
    }
    starts.push(out.len() as u32);
    let mut to = Instructions::new(from.name(), from.source());
    for (mut instruction, line) in out {
        if let Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) = &mut instruction
        {
            let moved = starts.get(*target as usize).copied();
            *target = moved.ok_or_else(|| syntax("the compiled template jumps out of itself".to_owned()))?;
        }
        to.add_with_line(instruction, line);
    }
    Ok(to)
}

const ADD: &str = "+";
const MUL: &str = "*";
const CONCAT: &str = "~";
const COMPARE: &str = "==";
const ITEM: &str = "[]";
const SLICE: &str = "[:]";
const LIST: &str = "[,]";
const MAP: &str = "{,}";
const SET: &str = ".=";
const BUILT: &str = "[if]";
const SETTLE: &str = "()";

/// Adds the functions that [`compile`] calls, and those of Jinja that make values.
pub(super) fn add_functions(environment: &mut Environment<'static>) {
    // What `UnpackList` pushes so that the second operand is on top.
    fn operands(a: Value, b: Value) -> Value {
        Value::from(vec![b, a])
    }
    environment.add_function(ADD, |state: &State, a: Value, b: Value| -> Result<Value, Error> {
        let budget = Budget::of(state);
        match (a.as_str(), b.as_str()) {
            (Some(a), Some(b)) => budget.make((a.len() + b.len()) as u64)?,
            _ if is_container(&a) || is_container(&b) => {
                budget.make_entries(budget.size(&a)?.saturating_add(budget.size(&b)?))?;
            }
            _ => {}
        }
        Ok(operands(a, b))
    });
    environment.add_function(MUL, |state: &State, a: Value, b: Value| -> Result<Value, Error> {
        let budget = Budget::of(state);
        let (unit, times) = match (a.as_str().is_some() || is_container(&a), b.as_str().is_some() || is_container(&b)) {
            (true, _) => (&a, &b),
            (_, true) => (&b, &a),
            _ => return Ok(operands(a, b)),
        };
        let total = budget.size(unit)?.saturating_mul(times.as_usize().unwrap_or(0) as u64);
        if unit.as_str().is_some() {
            budget.make(total)?
        } else {
            budget.make_entries(total)?
        }
        Ok(operands(a, b))
    });
    environment.add_function(CONCAT, |state: &State, a: Value, b: Value| -> Result<Value, Error> {
        let (a, b) = (python_format::to_str(state, &a)?, python_format::to_str(state, &b)?);
        Budget::of(state).make((a.len() + b.len()) as u64)?;
        Ok(operands(a.into(), b.into()))
    });
    environment.add_function(COMPARE, |state: &State, a: Value, b: Value| -> Result<Value, Error> {
        compare(&Budget::of(state), &a, &b)?;
        Ok(operands(a, b))
    });
    environment.add_function(ITEM, |state: &State, of: Value, key: Value| -> Result<Value, Error> {
        match key.as_str() {
            Some(text) => Budget::of(state).walk(text.len() as u64)?,
            None if is_container(&key) => Budget::of(state).weigh(&key).map(drop)?,
            None => {}
        }
        Ok(operands(of, key))
    });
    environment.add_function(SLICE, slice);
    environment.add_function(LIST, |state: &State, items: Rest<Value>| -> Result<Value, Error> {
        built(state, items.len(), Value::from(items.0))
    });
    environment.add_function(BUILT, |state: &State, list: Value| built(state, list.len().unwrap_or(0), list));
    environment.add_function(MAP, |state: &State, items: Rest<Value>| -> Result<Value, Error> {
        let pairs = items.chunks_exact(2).filter_map(|pair| Some((pair.first()?.clone(), pair.get(1)?.clone())));
        built(state, 4 * items.len(), pairs.collect())
    });
    environment.add_function(SETTLE, |state: &State, value: Value| Budget::of(state).settle(value));
    environment.add_function(SET, |state: &State, value: Value, namespace: Value, name: &str| -> Result<Value, Error> {
        let Some(space) = namespace.downcast_object_ref::<Namespace>() else {
            return Err(invalid(format!("can only assign to namespaces, not {}", namespace.kind())));
        };
        space.set(&Budget::of(state), name, value)?;
        Ok(Value::UNDEFINED)
    });
    environment.add_function("namespace", |state: &State, values: Option<Value>| -> Result<Value, Error> {
        let (space, budget) = (Namespace::default(), Budget::of(state));
        if let Some(values) = values {
            if values.kind() != ValueKind::Map {
                return Err(invalid(format!("namespace: expected names and values, got {}", values.kind())));
            }
            for key in values.try_iter()? {
                if let Some(name) = key.as_str() {
                    space.set(&budget, name, values.get_item(&key)?)?;
                }
            }
        }
        Ok(Value::from_object(space))
    });
    environment.add_function("dict", |state: &State, value: Option<Value>, more: minijinja::value::Kwargs| {
        let made = minijinja::functions::dict(value, more)?;
        built(state, 4 * made.len().unwrap_or(0), made)
    });
    environment.remove_global("debug");
}

/// Pays for a list or map just built.
fn built(state: &State, entries: usize, value: Value) -> Result<Value, Error> {
    let budget = Budget::of(state);
    budget.make_entries(entries as u64 + 1)?;
    budget.check_depth(&value)?;
    Ok(value)
}

/// Pays for a comparison or a search for `a` in `b` or `b` in `a`.
pub(super) fn compare(budget: &Budget, a: &Value, b: &Value) -> Result<(), Error> {
    for value in [a, b] {
        match value.as_str() {
            Some(text) => budget.walk(text.len() as u64)?,
            None if is_container(value) => {
                budget.weigh(value)?;
            }
            None => {}
        }
    }
    Ok(())
}

/// What `namespace()` gives: the one kind of value a template can change.
#[derive(Debug, Default)]
struct Namespace {
    values: Mutex<BTreeMap<Arc<str>, Value>>,
}

impl Namespace {
    fn values(&self) -> std::sync::MutexGuard<'_, BTreeMap<Arc<str>, Value>> {
        self.values.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Refuses namespaces inside namespaces, which could hold themselves.
    fn set(&self, budget: &Budget, name: &str, value: Value) -> Result<(), Error> {
        if holds_namespace(budget, &value)? {
            return Err(invalid(format!("the template puts a namespace into `{name}` of a namespace; that is not supported")));
        }
        budget.make_entries(1)?;
        // Dropped only once the lock is free.
        let _old = self.values().insert(name.into(), value);
        Ok(())
    }
}

fn holds_namespace(budget: &Budget, value: &Value) -> Result<bool, Error> {
    if !is_container(value) {
        return Ok(false);
    }
    budget.check_depth(value)?;
    holds_namespace_in(budget, value)
}

/// [`holds_namespace`] below a value whose depth is known.
fn holds_namespace_in(budget: &Budget, value: &Value) -> Result<bool, Error> {
    budget.step()?;
    if value.downcast_object_ref::<Namespace>().is_some() {
        return Ok(true);
    }
    for item in value.try_iter()? {
        let inner = if value.kind() == ValueKind::Map { value.get_item(&item)? } else { item };
        if is_container(&inner) && holds_namespace_in(budget, &inner)? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Object for Namespace {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.values().get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.values().keys().cloned().map(Value::from).collect())
    }
}

/// Python's `value[start:stop:step]`.
fn slice(state: &State, value: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let number = |value: Value| if value.is_none() { Ok(None) } else { i64::try_from(value).map(Some) };
    let (start, stop, step) = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    if step == 0 {
        return Err(invalid("cannot slice by step size of 0"));
    }
    let budget = Budget::of(state);
    if let Some(text) = value.as_str() {
        let length = text.chars().count();
        let mut picked = picks(length, start, stop, step);
        if step == 1 {
            budget.make(text.len() as u64)?;
            let Some(from) = picked.next() else { return Ok(Value::from("")) };
            return Ok(text.chars().skip(from).take(picked.count() + 1).collect::<String>().into());
        }
        budget.make(8 * text.len() as u64)?;
        let chars: Vec<char> = text.chars().collect();
        return Ok(picked.filter_map(|i| chars.get(i)).collect::<String>().into());
    }
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = budget.items(&value)?;
            let picked = picks(items.len(), start, stop, step);
            Ok(picked.filter_map(|i| items.get(i).cloned()).collect::<Vec<_>>().into())
        }
        kind => Err(invalid(format!("value of type {kind} cannot be sliced"))),
    }
}

/// The indices that a slice of `length` items takes, in order.
fn picks(length: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamp = |bound: Option<i64>, default: i64| match bound {
        None => default,
        Some(at) if at < 0 => at.saturating_add(length).clamp(low, high),
        Some(at) => at.clamp(low, high),
    };
    let (first, end) = match step > 0 {
        true => (clamp(start, low), clamp(stop, high)),
        false => (clamp(start, high), clamp(stop, low)),
    };
    std::iter::successors(Some(first), move |at| at.checked_add(step))
        .take_while(move |at| if step > 0 { *at < end } else { *at > end })
        .filter_map(|at| usize::try_from(at).ok())
}
