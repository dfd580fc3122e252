//! Chat templates: the checkpoint's own Jinja, rendered to the prompt that transformers' `apply_chat_template` makes.
//!
//! minijinja runs the template. What transformers adds to Jinja is added here: trimmed blocks, loop controls, the
//! `generation` tag, `raise_exception`, `strftime_now`, its `tojson`, Python's methods and Python's way of printing
//! values, `tools` and `documents` defined even when there are none, messages without their null fields and reasoning
//! under all of its names.
//!
//! Templates come from outside: parsing and rendering are bounded (recursion, steps), and every failure is a
//! [`TextError`]. Python methods that the engine lacks (`zfill`) are errors. Known differences, met by no template we
//! know of: `a ~ b` spells `true`, `none` and fractions as the engine does, not as Python does, and a tuple prints as a list.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Value as Json;
use time::OffsetDateTime;

use super::{TextError, generation_tag, python_format};

/// Steps of the template engine after which a template is taken to run forever; a long chat with tools takes thousands.
const FUEL: u64 = 20_000_000;

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
}

/// A checkpoint's chat templates, parsed.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    names: Vec<String>,
    special_tokens: Vec<(String, String)>,
}

impl ChatTemplate {
    /// Parses the templates of a checkpoint: the text of `chat_template.jinja` if it has that file, which goes before
    /// what stands in `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`] if there is none, [`TextError::Template`] if one does not parse.
    pub fn new(jinja: Option<&str>, config: &TokenizerConfig) -> Result<Self, TextError> {
        let mut sources = config.chat_templates.clone();
        if let Some(source) = jinja {
            sources.retain(|(name, _)| name != DEFAULT);
            sources.push((DEFAULT.to_owned(), source.to_owned()));
        }
        if sources.is_empty() {
            return Err(TextError::NoTemplate);
        }
        let mut environment = environment();
        let mut names = Vec::new();
        for (name, source) in sources {
            let source = generation_tag::respell(&source);
            if let Err(error) = environment.add_template_owned(name.clone(), source) {
                return Err(TextError::Template { name, reason: error.to_string() });
            }
            names.push(name);
        }
        Ok(Self { environment, names, special_tokens: config.special_tokens.clone() })
    }

    /// The prompt for a conversation. Encode it with `add_special_tokens` off.
    ///
    /// # Errors
    /// [`TextError::Message`] if a message is malformed, [`TextError::UnknownTemplate`] for a name that is not there,
    /// [`TextError::Refused`] if the template raises an exception, [`TextError::Render`] if it fails otherwise.
    pub fn render(&self, request: &ChatRequest) -> Result<String, TextError> {
        let messages = request
            .messages
            .iter()
            .enumerate()
            .map(|(index, message)| normalized(index, message))
            .collect::<Result<Vec<_>, _>>()?;
        let name = self.choose(request)?;
        let mut context: serde_json::Map<String, Json> = [("tools", Json::Null), ("documents", Json::Null)]
            .map(|(name, value)| (name.to_owned(), value))
            .into_iter()
            .collect();
        context.extend(self.special_tokens.iter().map(|(name, text)| (name.clone(), Json::String(text.clone()))));
        context.extend(request.variables.clone());
        context.insert("messages".to_owned(), Json::Array(messages));
        context.insert("add_generation_prompt".to_owned(), Json::Bool(request.add_generation_prompt));
        if let Some((name, _)) = context.iter().find(|(_, value)| depth(value) > MAX_DEPTH) {
            return Err(TextError::Render {
                name: name.clone(),
                reason: format!("the variable is nested more than {MAX_DEPTH} levels deep"),
            });
        }
        let now = request.now;
        let context = minijinja::context! {
            strftime_now => Value::from_function(move |format: &str| strftime(format, now)),
            ..Value::from_serialize(&context)
        };
        self.environment.get_template(name).and_then(|template| template.render(context)).map_err(|error| failure(name, &error))
    }

    fn choose(&self, request: &ChatRequest) -> Result<&str, TextError> {
        let find = |asked: &str| self.names.iter().find(|name| *name == asked).map(String::as_str);
        let unknown = |asked: &str| TextError::UnknownTemplate { asked: asked.to_owned(), known: self.names.join(", ") };
        if let Some(asked) = &request.template {
            return find(asked).ok_or_else(|| unknown(asked));
        }
        let tools = request.variables.get("tools").is_some_and(|tools| !tools.is_null());
        let tool_use = if tools { find("tool_use") } else { None };
        tool_use.or_else(|| find(DEFAULT)).ok_or_else(|| unknown(DEFAULT))
    }
}

/// Deepest nesting of a variable; the engine and the JSON reader recurse.
const MAX_DEPTH: usize = 100;

fn depth(value: &Json) -> usize {
    match value {
        Json::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Json::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
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
    let invalid = |why: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now(`{format}`): {why}"));
    let now = now.or_else(|| OffsetDateTime::now_local().ok()).unwrap_or_else(OffsetDateTime::now_utc);
    let items = time::format_description::parse_strftime_owned(format).map_err(|e| invalid(e.to_string()))?;
    now.format(&items).map_err(|e| invalid(e.to_string()))
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(python_format::print);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let message = python_format::to_str(&message)?;
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment.add_filter("tojson", |value: &Value, options: Kwargs| python_format::tojson(value, options));
    environment.add_filter("string", |value: &Value| python_format::to_str(value));
    environment.add_filter("join", |items: &Value, between: Option<&str>| -> Result<String, Error> {
        let texts = items.try_iter()?.map(|item| python_format::to_str(&item)).collect::<Result<Vec<_>, _>>()?;
        Ok(texts.join(between.unwrap_or("")))
    });
    environment.add_filter("int", to_int);
    environment.add_filter("float", to_float);
    environment.add_filter("replace", |text: &Value, old: &str, new: &str, count: Option<usize>, options: Kwargs| {
        let count = count.or(options.get("count")?);
        options.assert_all_used()?;
        let text = python_format::to_str(text)?;
        Ok::<_, Error>(text.replacen(old, new, count.unwrap_or(usize::MAX)))
    });
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
        ChatTemplate::new(Some(source), &TokenizerConfig::default())?.render(request)
    }

    #[test]
    fn the_demo_models_prompts_are_the_reference_prompts() {
        let config = TokenizerConfig::from_json(include_bytes!("../../tools/demo-model/tokenizer_config.json")).unwrap();
        let template = ChatTemplate::new(Some(include_str!("../../tools/demo-model/chat_template.jinja")), &config).unwrap();
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
            let made = ChatTemplate::new(None, &config).and_then(|template| template.render(&request));
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
        let file_first = ChatTemplate::new(Some("from the file"), &config).unwrap();
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
        assert!(render("{{ deep }}", &request).is_err());
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
        assert_eq!(ChatTemplate::new(None, &none).unwrap_err(), TextError::NoTemplate);
    }
}
