//! Chat templates: the checkpoint's own Jinja, rendered to the prompt that transformers' `apply_chat_template` makes.
//!
//! minijinja runs the template. What transformers adds to Jinja is added here: trimmed blocks, loop controls, the
//! `generation` tag, `raise_exception`, `strftime_now`, its `tojson`, Python's methods and Python's way of printing
//! values, `tools` and `documents` defined even when there are none, messages without their null fields and reasoning
//! under all of its names.
//!
//! Templates come from outside: parsing and rendering are bounded (recursion, steps, work, and the memory that they make:
//! [`super::template_guard`], [`super::template_budget`]), and every failure is a [`TextError`]. Python methods that the
//! engine lacks (`zfill`) are errors, and so are `include`, `extends` and arguments unpacked with `*`. A known difference,
//! met by no template we know of: a tuple prints as a list.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use serde_json::Value as Json;
use time::OffsetDateTime;

use super::{TextError, generation_tag, python_format, template_filters, template_guard};

/// Steps of the template engine after which a template is taken to run forever; a long chat with tools takes thousands.
const FUEL: u64 = 10_000_000;
/// Macros, loops and blocks inside each other while rendering; a macro counts four times.
const MAX_RECURSION: usize = 200;
/// Longest format that `strftime_now` takes, in bytes.
const MAX_TIME_FORMAT: usize = 1000;

/// What this room needs of `tokenizer_config.json`: special tokens by name, and the chat templates if they stand there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// `("bos_token", "<s>")` and so on, in the file's order: every `*_token` with a text.
    pub special_tokens: Vec<(String, String)>,
    /// Name and source of each template; the only one is named `default`.
    pub chat_templates: Vec<(String, String)>,
}

impl TokenizerConfig {
    /// Reads a `tokenizer_config.json`. Tokens may be strings or objects with `content`, `chat_template` a string or a
    /// list of `{"name", "template"}`.
    ///
    /// # Errors
    /// [`TextError::TokenizerConfig`] if the bytes are not JSON or a field has another form.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TextError> {
        let config: serde_json::Map<String, Json> =
            serde_json::from_slice(bytes).map_err(|e| TextError::TokenizerConfig(format!("expected a JSON object: {e}")))?;
        let mut special_tokens = Vec::new();
        for name in SPECIAL_TOKENS {
            let text = match config.get(name) {
                None | Some(Json::Null) => continue,
                Some(Json::String(text)) => Some(text.as_str()),
                Some(other) => other.get("content").and_then(Json::as_str),
            };
            match text {
                Some(text) => special_tokens.push((name.to_owned(), text.to_owned())),
                None => {
                    return Err(TextError::TokenizerConfig(format!(
                        "`{name}` must be a string or an object with a string `content`"
                    )));
                }
            }
        }
        let chat_templates = match config.get("chat_template") {
            None | Some(Json::Null) => Vec::new(),
            Some(Json::String(source)) => vec![(DEFAULT.to_owned(), source.clone())],
            Some(Json::Array(list)) => list
                .iter()
                .map(|entry| {
                    let field = |name| entry.get(name).and_then(Json::as_str).map(str::to_owned);
                    field("name").zip(field("template")).ok_or_else(|| {
                        TextError::TokenizerConfig(
                            "`chat_template` is a list; each entry must have a string `name` and a string `template`".to_owned(),
                        )
                    })
                })
                .collect::<Result<_, _>>()?,
            Some(_) => {
                return Err(TextError::TokenizerConfig(
                    "`chat_template` must be a string or a list of named templates".to_owned(),
                ));
            }
        };
        Ok(Self { special_tokens, chat_templates })
    }
}

/// The names under which transformers hands special tokens to a template.
const SPECIAL_TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Name of the template that is used when none is asked for.
const DEFAULT: &str = "default";

/// A conversation to render.
#[derive(Debug, Clone, Default)]
pub struct ChatRequest {
    /// Objects with a string `role`, mostly a `content`, and whatever else the template reads (`tool_calls`,
    /// `reasoning_content`).
    pub messages: Vec<Json>,
    /// Whether the prompt ends with the opening of an answer.
    pub add_generation_prompt: bool,
    /// Further variables: `tools`, `documents`, `enable_thinking`, and any the template knows.
    pub variables: serde_json::Map<String, Json>,
    /// Which of several templates; otherwise `tool_use` where there is one and tools are given, else the default.
    pub template: Option<String>,
    /// The time that `strftime_now` tells; the system's local time if none is given.
    pub now: Option<OffsetDateTime>,
}

impl ChatRequest {
    /// One user's message, answered next.
    #[must_use]
    pub fn user(content: &str) -> Self {
        Self::new(vec![serde_json::json!({"role": "user", "content": content})])
    }

    /// A conversation that is answered next.
    #[must_use]
    pub fn new(messages: Vec<Json>) -> Self {
        Self { messages, add_generation_prompt: true, ..Self::default() }
    }

    /// What is wrong with the request whatever the template.
    ///
    /// # Errors
    /// [`TextError::Message`] and [`TextError::Variable`] for what is nested too deep, and for a variable that no template
    /// could read: one under a name that is no identifier, or that the request itself sets.
    pub fn check(&self) -> Result<(), TextError> {
        let too_deep = || format!("nested more than {MAX_DEPTH} levels deep");
        if let Some(index) = self.messages.iter().position(|message| is_deeper(message, MAX_DEPTH)) {
            return Err(TextError::Message { index, reason: too_deep() });
        }
        for (name, value) in &self.variables {
            let reason = match name.as_str() {
                "messages" | "add_generation_prompt" => "the request itself sets it; leave it out".to_owned(),
                // Such a name would stand in front of the functions that guard a template's operators.
                name if !is_identifier(name) => {
                    "the name is no identifier, so no template could read it; expected letters (a to z), digits and _".to_owned()
                }
                _ if is_deeper(value, MAX_DEPTH) => too_deep(),
                _ => continue,
            };
            return Err(TextError::Variable { name: name.clone(), reason });
        }
        Ok(())
    }
}

fn is_identifier(name: &str) -> bool {
    name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_') && name.bytes().next().is_some_and(|c| !c.is_ascii_digit())
}

/// A checkpoint's chat templates. One that cannot be used is an error where it is needed, and only there: texts and tokens
/// need none.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Name, and the source where it compiles. Compiled anew for each prompt, since what is compiled borrows the source.
    sources: Vec<(String, Result<String, TextError>)>,
    special_tokens: Vec<(String, String)>,
}

impl ChatTemplate {
    /// Parses the templates of a checkpoint: the bytes of `chat_template.jinja` if it has that file, which goes before
    /// what stands in `tokenizer_config.json`. `None` if there is no template at all.
    #[must_use]
    pub fn new(jinja: Option<&[u8]>, config: &TokenizerConfig) -> Option<Self> {
        let parse = |name: &str, source: &[u8]| {
            let fail = |reason: String| TextError::Template { name: name.to_owned(), reason };
            let source = std::str::from_utf8(source).map_err(|e| fail(format!("chat_template.jinja is not UTF-8: {e}")))?;
            let source = generation_tag::respell(source);
            template_guard::compile(name, &source).map_err(|e| fail(e.to_string()))?;
            Ok(source)
        };
        let listed = config.chat_templates.iter().filter(|(name, _)| jinja.is_none() || name != DEFAULT);
        let listed = listed.map(|(name, source)| (name.as_str(), source.as_bytes()));
        let all = listed.chain(jinja.map(|source| (DEFAULT, source)));
        let sources: Vec<_> = all.map(|(name, source)| (name.to_owned(), parse(name, source))).collect();
        let special_tokens = config.special_tokens.clone();
        (!sources.is_empty()).then(|| Self { environment: environment(), sources, special_tokens })
    }

    /// Whether there is a template for plain messages, and it compiles.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.choose(&ChatRequest::default()).is_ok()
    }

    /// What is wrong with the template for plain messages, else with the first other one that cannot be used.
    #[must_use]
    pub fn problem(&self) -> Option<TextError> {
        let others = || self.sources.iter().find_map(|(_, source)| source.as_ref().err().cloned());
        self.choose(&ChatRequest::default()).err().or_else(others)
    }

    /// The prompt for a conversation. Encode it with `add_special_tokens` off.
    ///
    /// # Errors
    /// [`ChatRequest::check`]'s, [`TextError::Message`] if a message is malformed, [`TextError::UnknownTemplate`] for a name
    /// that is not there, [`TextError::Template`] if the template does not parse, [`TextError::Refused`] if it raises an
    /// exception, [`TextError::Render`] if it fails otherwise.
    pub fn render(&self, request: &ChatRequest) -> Result<String, TextError> {
        request.check()?;
        let messages = request
            .messages
            .iter()
            .enumerate()
            .map(|(index, message)| normalized(index, message))
            .collect::<Result<Vec<_>, _>>()?;
        let (name, source) = self.choose(request)?;
        let mut context: serde_json::Map<String, Json> = [("tools", Json::Null), ("documents", Json::Null)]
            .map(|(name, value)| (name.to_owned(), value))
            .into_iter()
            .collect();
        context.extend(self.special_tokens.iter().map(|(name, text)| (name.clone(), Json::String(text.clone()))));
        context.extend(request.variables.clone());
        context.insert("messages".to_owned(), Json::Array(messages));
        context.insert("add_generation_prompt".to_owned(), Json::Bool(request.add_generation_prompt));
        let now = request.now;
        let context = minijinja::context! {
            strftime_now => Value::from_function(move |format: &str| strftime(format, now)),
            ..Value::from_serialize(&context)
        };
        template_guard::compile(name, source)
            .and_then(|template| template_guard::evaluate(&self.environment, &template, context))
            .map_err(|error| failure(name, &error))
    }

    fn choose(&self, request: &ChatRequest) -> Result<(&str, &str), TextError> {
        let find = |asked: &str| self.sources.iter().find(|(name, _)| name == asked);
        let unknown = |asked: &str| {
            let known: Vec<_> = self.sources.iter().map(|(name, _)| name.as_str()).collect();
            TextError::UnknownTemplate { asked: asked.to_owned(), known: known.join(", ") }
        };
        let (name, source) = match &request.template {
            Some(asked) => find(asked).ok_or_else(|| unknown(asked))?,
            None => {
                let tools = request.variables.get("tools").is_some_and(|tools| !tools.is_null());
                let tool_use = if tools { find("tool_use") } else { None };
                tool_use.or_else(|| find(DEFAULT)).ok_or_else(|| unknown(DEFAULT))?
            }
        };
        Ok((name, source.as_ref().map_err(TextError::clone)?))
    }
}

/// Deepest nesting of a variable or message; the engine and the JSON reader recurse.
const MAX_DEPTH: usize = 64;

/// Whether a value nests deeper than `limit`; looks no deeper than that.
fn is_deeper(value: &Json, limit: usize) -> bool {
    match value {
        Json::Array(_) | Json::Object(_) if limit == 0 => true,
        Json::Array(items) => items.iter().any(|item| is_deeper(item, limit - 1)),
        Json::Object(fields) => fields.values().any(|field| is_deeper(field, limit - 1)),
        _ => false,
    }
}

/// The fields under which a message's reasoning is passed; the first is the one that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message as transformers hands it to the template: null fields dropped, reasoning under its two names.
fn normalized(index: usize, message: &Json) -> Result<Json, TextError> {
    let error = |reason: String| TextError::Message { index, reason };
    let Json::Object(fields) = message else {
        return Err(error(format!("expected an object with `role` and `content`, got {}", kind(message))));
    };
    match fields.get("role") {
        Some(Json::String(_)) => {}
        Some(other) => return Err(error(format!("`role` must be a string, got {}", kind(other)))),
        None => return Err(error("the field `role` is missing; expected `system`, `user`, `assistant` or `tool`".to_owned())),
    }
    let mut fields: serde_json::Map<String, Json> =
        fields.iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| (name.clone(), value.clone())).collect();
    if let Some(reasoning) = REASONING.iter().find_map(|name| fields.get(*name)).cloned() {
        if !fields.contains_key("thinking") {
            let rest = std::mem::take(&mut fields);
            fields.insert("thinking".to_owned(), reasoning.clone());
            fields.extend(rest);
        }
        fields.insert("reasoning_content".to_owned(), reasoning);
    }
    Ok(Json::Object(fields))
}

fn kind(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

/// What a template raised, carried through the engine as the source of its error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn failure(name: &str, error: &Error) -> TextError {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TextError::Refused(message.clone());
        }
        source = cause.source();
    }
    TextError::Render { name: name.to_owned(), reason: error.to_string() }
}

fn strftime(format: &str, now: Option<OffsetDateTime>) -> Result<String, Error> {
    if format.len() > MAX_TIME_FORMAT {
        return Err(Error::new(ErrorKind::InvalidOperation, "strftime_now: the format is too long"));
    }
    let invalid = |why: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now(`{format}`): {why}"));
    let now = now.or_else(|| OffsetDateTime::now_local().ok()).unwrap_or_else(OffsetDateTime::now_utc);
    let items = time::format_description::parse_strftime_owned(format).map_err(|e| invalid(e.to_string()))?;
    now.format(&items).map_err(|e| invalid(e.to_string()))
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_formatter(python_format::print);
    template_filters::add(&mut environment);
    template_guard::add_functions(&mut environment);
    environment.add_function("raise_exception", |state: &State, message: Value| -> Result<Value, Error> {
        let message = python_format::to_str(state, &message)?;
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment.add_filter("int", to_int);
    environment.add_filter("float", to_float);
    // Jinja2's tests ask Python: a string is a sequence, and everything that can be looped over is iterable.
    let walkable = |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map);
    environment.add_test("sequence", walkable);
    environment.add_test("iterable", move |value: &Value| {
        walkable(value) || matches!(value.kind(), ValueKind::Iterable | ValueKind::Undefined)
    });
    environment
}

/// Jinja2's `int`: the whole part of a number or of a text that is one, otherwise the default, 0.
fn to_int(value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default.or(options.get("default")?).unwrap_or_else(|| Value::from(0));
    options.assert_all_used()?;
    if value.is_integer() {
        return Ok(value.clone());
    }
    if let Some(whole) = value.as_str().and_then(|text| text.trim().parse::<i64>().ok()) {
        return Ok(Value::from(whole));
    }
    // Beyond the whole numbers that an f64 holds exactly there is nothing sensible to return.
    Ok(match as_float(value).map(f64::trunc) {
        Some(x) if x.abs() < 9_007_199_254_740_992.0 => i64::try_from(Value::from(x)).map(Value::from)?,
        _ => default,
    })
}

/// Jinja2's `float`: a number or a text that is one, otherwise the default, 0.0.
fn to_float(value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default.or(options.get("default")?).unwrap_or_else(|| Value::from(0.0));
    options.assert_all_used()?;
    Ok(as_float(value).map_or(default, Value::from))
}

fn as_float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => value.as_str().and_then(|text| text.trim().parse().ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, request: &ChatRequest) -> Result<String, TextError> {
        ChatTemplate::new(Some(source.as_bytes()), &TokenizerConfig::default()).unwrap().render(request)
    }

    #[test]
    fn the_demo_models_prompts_are_the_reference_prompts() {
        let config = TokenizerConfig::from_json(include_bytes!("../../tools/demo-model/tokenizer_config.json")).unwrap();
        let template = ChatTemplate::new(Some(include_bytes!("../../tools/demo-model/chat_template.jinja")), &config).unwrap();
        let cases: Json = serde_json::from_str(include_str!("../../tests/data/smollm2/greedy.json")).unwrap();
        for case in cases.as_array().unwrap() {
            let request = ChatRequest::user(case["message"].as_str().unwrap());
            assert_eq!(template.render(&request).unwrap(), case["rendered"].as_str().unwrap());
            let closed = ChatRequest { add_generation_prompt: false, ..request };
            assert_ne!(template.render(&closed).unwrap(), case["rendered"].as_str().unwrap(), "control");
        }
    }

    /// The file that `tools/text_golden.py` writes: templates, requests, and what transformers made of them.
    #[derive(serde::Deserialize)]
    struct Golden {
        now: i64,
        cases: Vec<Case>,
    }

    #[derive(serde::Deserialize)]
    struct Case {
        name: String,
        template: Json,
        special_tokens: Json,
        messages: Vec<Json>,
        add_generation_prompt: bool,
        variables: serde_json::Map<String, Json>,
        /// Absent where transformers raises an error.
        expected: Option<String>,
    }

    #[test]
    fn templates_render_as_transformers_renders_them() {
        let golden: Golden = serde_json::from_str(include_str!("../../tests/data/chat/golden.json")).unwrap();
        let now = OffsetDateTime::from_unix_timestamp(golden.now).unwrap();
        let mut errors = 0;
        let mut wrong = Vec::new();
        for case in &golden.cases {
            let mut config = case.special_tokens.clone();
            config["chat_template"] = case.template.clone();
            let config = TokenizerConfig::from_json(config.to_string().as_bytes()).unwrap();
            let request = ChatRequest {
                messages: case.messages.clone(),
                add_generation_prompt: case.add_generation_prompt,
                variables: case.variables.clone(),
                template: None,
                now: Some(now),
            };
            let made = ChatTemplate::new(None, &config).unwrap().render(&request);
            errors += usize::from(case.expected.is_none());
            if made.as_ref().ok() != case.expected.as_ref() {
                wrong.push(format!("{}\n  expected {:?}\n  made     {made:?}", case.name, case.expected));
            }
        }
        assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), golden.cases.len(), wrong.join("\n"));
        assert!(golden.cases.len() > 60 && errors > 5, "control: enough cases, some of them errors");
    }

    #[test]
    fn a_refusal_is_told_from_a_failure() {
        let refused = render("{{ raise_exception('roles must alternate') }}", &ChatRequest::user("x"));
        assert_eq!(refused, Err(TextError::Refused("roles must alternate".to_owned())));
        let inside = render("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}", &ChatRequest::user("x"));
        assert_eq!(inside, Err(TextError::Refused("deep".to_owned())));
        let failed = render("{{ nothing.at.all }}", &ChatRequest::user("x"));
        assert!(matches!(failed, Err(TextError::Render { .. })), "{failed:?}");
        let unparsed = render("{% if %}", &ChatRequest::user("x"));
        assert!(matches!(unparsed, Err(TextError::Template { .. })), "{unparsed:?}");
    }

    #[test]
    fn messages_are_checked_before_the_template_sees_them() {
        for (message, said) in [
            (json!("hi"), "an object"),
            (json!({"content": "x"}), "`role` is missing"),
            (json!({"role": 3, "content": "x"}), "a number"),
        ] {
            let request = ChatRequest::new(vec![json!({"role": "user", "content": "a"}), message]);
            match render("x", &request) {
                Err(TextError::Message { index: 1, reason }) => assert!(reason.contains(said), "{reason}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn named_templates_are_chosen_as_transformers_chooses() {
        let config = TokenizerConfig::from_json(
            json!({"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]})
                .to_string()
                .as_bytes(),
        )
        .unwrap();
        let template = ChatTemplate::new(None, &config).unwrap();
        let mut request = ChatRequest::user("x");
        assert_eq!(template.render(&request).unwrap(), "plain");
        request.variables.insert("tools".to_owned(), json!([]));
        assert_eq!(template.render(&request).unwrap(), "tools");
        request.template = Some("default".to_owned());
        assert_eq!(template.render(&request).unwrap(), "plain");
        request.template = Some("rag".to_owned());
        assert!(matches!(template.render(&request), Err(TextError::UnknownTemplate { .. })));
        let file_first = ChatTemplate::new(Some(b"from the file"), &config).unwrap();
        assert_eq!(file_first.render(&ChatRequest::user("x")).unwrap(), "from the file");
    }

    #[test]
    fn hostile_templates_end_in_errors() {
        let nested =
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
        let recursion = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
        let parentheses = format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000));
        for source in [
            nested,
            recursion,
            &parentheses,
            "{% include 'x' %}",
            "{% extends 'default' %}",
            "{{ 1 // 0 }}",
            "{{ 1 % 0 }}",
            "{{ 'a'[9223372036854775807:] }}{{ messages[-9223372036854775808].x }}",
        ] {
            let result = render(source, &ChatRequest::user("x"));
            assert!(result.is_err(), "{source:.40}: {result:?}");
        }
        let mut deep = json!(1);
        for _ in 0..120 {
            deep = json!([deep]);
        }
        let mut request = ChatRequest::user("x");
        request.variables.insert("deep".to_owned(), deep);
        let error = render("{{ deep }}", &request).unwrap_err();
        assert!(matches!(&error, TextError::Variable { name, .. } if name == "deep"), "{error}");
        assert_eq!(crate::Error::from(error).code(), "InvalidOption", "the caller's, not the template's");
    }

    #[test]
    fn variables_that_no_template_could_read_are_refused() {
        let with = |name: &str| {
            let mut request = ChatRequest::user("x");
            request.variables.insert(name.to_owned(), json!(1));
            render("{{ messages | length }}{{ enable_thinking }}{{ _size2 }}", &request)
        };
        for name in ["messages", "add_generation_prompt", "enable-thinking", "", "2nd", "a b", "//", "a.b", "größe"] {
            let error = with(name).unwrap_err();
            assert!(matches!(&error, TextError::Variable { name: named, .. } if named == name), "{error}");
            assert_eq!(crate::Error::from(error).code(), "InvalidOption", "{name}");
        }
        assert_eq!(with("enable_thinking").unwrap(), "11", "control");
        assert_eq!(with("_size2").unwrap(), "11", "control");
    }

    #[test]
    fn a_template_that_cannot_be_used_fails_only_where_it_is_needed() {
        let of = |jinja: Option<&[u8]>, templates: Json| {
            let config = TokenizerConfig::from_json(json!({ "chat_template": templates }).to_string().as_bytes()).unwrap();
            ChatTemplate::new(jinja, &config).unwrap()
        };
        let broken = |error: &TextError| matches!(error, TextError::Template { .. });
        let (plain, mut tools) = (ChatRequest::user("x"), ChatRequest::user("x"));
        tools.variables.insert("tools".to_owned(), json!([]));
        let two = |a: &str, b: &str| json!([{"name": "default", "template": a}, {"name": "tool_use", "template": b}]);

        let template = of(None, two("plain", "{% if %}"));
        assert_eq!((template.render(&plain).unwrap().as_str(), template.is_usable()), ("plain", true));
        assert!(broken(&template.render(&tools).unwrap_err()) && template.problem().is_some_and(|e| broken(&e)));
        let template = of(None, two("{% if %}", "tools"));
        assert_eq!((template.render(&tools).unwrap().as_str(), template.is_usable()), ("tools", false));
        assert!(broken(&template.render(&plain).unwrap_err()) && template.problem().is_some_and(|e| broken(&e)));
        // The file goes before, be it good or bad.
        assert_eq!(of(Some(b"file"), json!("{% if %}")).render(&plain).as_deref(), Ok("file"));
        let damaged = of(Some(b"\xff"), json!("plain")).render(&plain).unwrap_err();
        assert!(broken(&damaged) && damaged.to_string().contains("UTF-8"), "{damaged}");
        let unnamed = of(None, json!([{"name": "rag", "template": "x"}]));
        assert!(matches!(unnamed.problem(), Some(TextError::UnknownTemplate { .. })) && !unnamed.is_usable());
        let good = of(None, two("plain", "tools"));
        assert!(good.is_usable() && good.problem().is_none(), "control");
    }

    /// Each makes gigabytes, or runs for hours, or overflows the stack, with few steps.
    #[test]
    fn templates_that_multiply_end_in_errors() {
        let doubled = "{% set ns = namespace(a='0123456789') %}{% for i in range(60) %}{% set ns.a = ns.a OP ns.a %}{% endfor %}";
        let doubled_lists = doubled.replace("'0123456789'", "[1]").replace("OP", "+");
        let chain = |unit: &str, n: usize| format!("{{{{ {}1 }}}}", unit.repeat(n));
        let deepened = |step: &str| {
            format!("{{% set ns = namespace(x=1) %}}{{% for i in range(90000) %}}{{% set ns.x = {step} %}}{{% endfor %}}")
        };
        let megabyte = "{% set m = 'x' * 1000000 %}";
        let hostile = [
            doubled.replace("OP", "+"),
            doubled.replace("OP", "~"),
            doubled_lists,
            format!("{}{{{{ a }}}}", "{% set a = (a or 'xxxxxxxx') + (a or 'xxxxxxxx') %}".repeat(60)),
            "{% macro m(a) %}{{ m(a + a) }}{% endmacro %}{{ m('xxxxxxxx') }}".to_owned(),
            "{% for x in ['xxxxxxxx'] recursive %}{{ loop([x + x]) }}{% endfor %}".to_owned(),
            "{{ 'x' * 99999999 }}".to_owned(),
            "{% set n = 99999999 %}{{ 'x' * n }}{{ n * 'x' }}".to_owned(),
            "{% set n = 99999999 %}{{ ([0] * n) | list | length }}".to_owned(),
            "{{ ['x' * 99999999, 'y' * 99999999, 'z' * 99999999] | length }}".to_owned(),
            "{{ [1, 2] | batch(1000000000) | list }}".to_owned(),
            "{{ [1, 2] | batch(1000000000, 'x') | list }}".to_owned(),
            "{{ [1, 2] | slice(1000000000) | list }}".to_owned(),
            "{{ 'a\nb' | indent(1000000000) }}".to_owned(),
            "{{ 'a\nb' | indent(width=1000000000) }}".to_owned(),
            "{{ '%1000000000d' | format(1) }}".to_owned(),
            "{{ '%*d' | format(1000000000, 1) }}".to_owned(),
            "{{ '%.1000000000f' | format(1.0) }}".to_owned(),
            "{{ '{:1000000000}'.format(1) }}".to_owned(),
            format!("{megabyte}{{{{ m | replace('x', m) | length }}}}"),
            format!("{megabyte}{{{{ m.replace('x', m) | length }}}}"),
            format!("{megabyte}{{{{ (m | list) | join(m) | length }}}}"),
            format!("{megabyte}{{{{ m.join(m) | length }}}}"),
            format!("{megabyte}{{% for i in range(99999) %}}{{{{ m }}}}{{% endfor %}}"),
            format!("{megabyte}{{% set x %}}{{% for i in range(99999) %}}{{{{ m }}}}{{% endfor %}}{{% endset %}}"),
            format!("{{% set x %}}{{% for i in range(99999) %}}{}{{% endfor %}}{{% endset %}}", "raw text ".repeat(1000)),
            format!(
                "{megabyte}{{% set n = namespace(l=[]) %}}{{% for i in range(9999) %}}{{% set n.l = n.l + [m[1:]] %}}{{% endfor %}}"
            ),
            format!(
                "{megabyte}{{% for i in range(9999) %}}{{% for j in range(9999) %}}{{{{ 'y' in m }}}}{{% endfor %}}{{% endfor %}}"
            ),
            format!("{megabyte}{{% for i in range(9999) %}}{{% if m == m[0:] + '' %}}{{% endif %}}{{% endfor %}}"),
            format!("{megabyte}{{% for i in range(99999) %}}{{% if m is upper %}}{{% endif %}}{{% endfor %}}"),
            format!("{megabyte}{{% for i in range(99999) %}}{{{{ {{}}[m] }}}}{{% endfor %}}"),
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
                .to_owned(),
            deepened("[ns.x]"),
            deepened("{'a': ns.x}"),
            deepened("dict(a=ns.x)"),
            deepened("namespace(a=ns.x)"),
            deepened("[ns.x] | batch(1) | list"),
            deepened("[ns.x] | map('list') | list"),
            "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns ~ '' }}".to_owned(),
            "{% set ns = namespace(x=1) %}{% set ns.x = [ns] %}{{ ns | string }}".to_owned(),
            "{{ messages | tojson(separators=['x' * 9999999, ':' * 9999999]) }}".to_owned(),
            format!("{{{{ strftime_now('{}') }}}}", "%c".repeat(100_000)),
            chain("-", 50_000),
            chain("not ", 50_000),
            chain("1 + ", 50_000),
            chain("1 if ", 50_000),
            chain("(", 50_000),
            chain("[", 50_000),
            chain("{1:", 50_000),
            format!("{{{{ a{} }}}}", ".b".repeat(50_000)),
            format!("{{{{ a{} }}}}", "[0]".repeat(50_000)),
            format!("{{{{ a{} }}}}", "()".repeat(50_000)),
            format!("{{{{ a{} }}}}", "|e".repeat(50_000)),
            format!("{{{{ a{} }}}}", " is true".repeat(50_000)),
            "{% if 1 %}".repeat(50_000),
            format!("{{% if 1 %}}{}{{% endif %}}", "{% elif 1 %}".repeat(50_000)),
            format!("{{% raw %}}{}", "{% endraw ".repeat(90_000)),
            " ".repeat(2_000_000),
            "{{ f(*range(99999)) }}".to_owned(),
        ];
        let started = std::time::Instant::now();
        for source in &hostile {
            let before = started.elapsed();
            let result = render(source, &ChatRequest::user("x"));
            let took = started.elapsed() - before;
            assert!(result.is_err(), "{source:.90}: {:.40}", result.unwrap_or_default());
            assert!(took.as_secs() < 20, "{source:.90}: {took:?}");
        }
        // Controls: the same constructs in the sizes that templates have.
        for (source, expected) in [
            (
                "{% set ns = namespace(a='ab') %}{% for i in range(3) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
                "ab".repeat(8),
            ),
            ("{{ '=' * 40 }}{{ 2 * 'x' }}{{ 2 * 3 + 1 }}{{ 7 - 2 }}", format!("{}xx75", "=".repeat(40))),
            ("{{ [1, 2, 3] | batch(2) | list }}{{ ([0] * 2) | list }}", "[[1, 2], [3]][0, 0]".to_owned()),
            ("{{ 'a\nb' | indent(2) }}{{ '%5d' | format(3) }}{{ '{:>3}'.format(1) }}", "a\n  b    3  1".to_owned()),
            ("{{ 'a' ~ true ~ none ~ 1.5 ~ [1] }}", "aTrueNone1.5[1]".to_owned()),
            (
                "{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 'b' in 'abc' }}{{ 2 in [1] }}{{ 'a' not in 'abc' }}",
                "TrueFalseTrueFalseFalse".to_owned(),
            ),
            ("{{ {'a': [1, {'b': none}]} }}{{ [3, 1] | sort }}{{ [1, 2][-1] }}", "{'a': [1, {'b': None}]}[1, 3]2".to_owned()),
            (
                "{% raw %}{{ x }}{% generation %}{% endraw %}{% if 0 %}a{% elif 1 %}b{% else %}c{% endif %}",
                "{{ x }}{% generation %}b".to_owned(),
            ),
            ("{{ 'abab'.count('') }} {{ 'abab'.count('ab') }}", "5 2".to_owned()),
            ("{{ 1 + (2 if true else 3) }}{{ (none or 'a') + 'b' }}", "3ab".to_owned()),
        ] {
            assert_eq!(render(source, &ChatRequest::user("x")).as_deref(), Ok(expected.as_str()), "{source}");
        }
    }

    #[test]
    fn slices_are_pythons() {
        let ends = ["", "0", "1", "2", "9", "-1", "-2", "-9"];
        for length in 0..4_i64 {
            let text: String = "abcdef".chars().take(length as usize).collect();
            for (start, stop) in ends.iter().flat_map(|a| ends.iter().map(move |b| (a, b))) {
                for step in ["", "1", "2", "-1", "-2", "-9"] {
                    let source = format!(
                        "{{{{ '{text}'[{start}:{stop}:{step}] }}}}|{{{{ ('{text}' | list)[{start}:{stop}:{step}] | join }}}}"
                    );
                    let by: i64 = step.parse().unwrap_or(1);
                    // By the definition: every index is asked.
                    let bound = |end: &str, default: i64| match end.parse::<i64>() {
                        Ok(at) if at < 0 => (at + length).max(if by < 0 { -1 } else { 0 }),
                        Ok(at) => at.min(if by < 0 { length - 1 } else { length }),
                        Err(_) => default,
                    };
                    let (from, to) =
                        if by < 0 { (bound(start, length - 1), bound(stop, -1)) } else { (bound(start, 0), bound(stop, length)) };
                    let mut expected = String::new();
                    let mut at = from;
                    while (by > 0 && at < to) || (by < 0 && at > to) {
                        expected.extend(text.chars().nth(at as usize));
                        at += by;
                    }
                    assert_eq!(
                        render(&source, &ChatRequest::user("x")).as_deref(),
                        Ok(format!("{expected}|{expected}").as_str()),
                        "{source}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_malformed_config_is_an_error() {
        for bytes in
            [&b""[..], b"[]", b"{\"bos_token\": 3}", b"{\"chat_template\": 3}", b"{\"chat_template\": [{\"name\": \"x\"}]}"]
        {
            assert!(matches!(TokenizerConfig::from_json(bytes), Err(TextError::TokenizerConfig(_))));
        }
        let none = TokenizerConfig::from_json(b"{\"bos_token\": null, \"eos_token\": {\"content\": \"</s>\"}}").unwrap();
        assert_eq!(none.special_tokens, [("eos_token".to_owned(), "</s>".to_owned())]);
        assert!(ChatTemplate::new(None, &none).is_none());
    }
}
