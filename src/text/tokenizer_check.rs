//! Refuses tokenizer files that would make the `tokenizers` crate panic or read past its buffers.
//!
//! Found by reading version 0.23.2, by fuzzing and by feeding it mutated files. It does not look at the `type` of a
//! post-processor, and takes other parts without one by their fields: here each part must be of a type it knows. Its BPE
//! builder copies the two halves of a merge into a buffer as long as the longest token before it asks whether the merged
//! token exists; its Strip decoder counts back from the end of a token without looking at the length; its template processor
//! indexes a second sequence that a single text does not have; its Precompiled normalizer unwraps; an empty pattern matches
//! everywhere. Each is a sentence here instead.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::Value;

use super::TextError;

/// What the rest of the room wants to know about the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// The decoder joins byte tokens (`<0xE2>`) into characters.
    pub byte_fallback: bool,
}

fn refuse<T>(reason: impl Into<String>) -> Result<T, TextError> {
    Err(TextError::Tokenizer(reason.into()))
}

/// The parts of the file that are looked at. The vocabulary, nearly all of its bytes, is not copied into a JSON tree.
#[derive(serde::Deserialize)]
struct File<'a> {
    #[serde(borrow)]
    model: Model<'a>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
}

#[derive(serde::Deserialize)]
struct Model<'a> {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(borrow, default)]
    vocab: Option<Vocab<'a>>,
    #[serde(borrow, default)]
    merges: Option<Vec<Merge<'a>>>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
}

/// Token to id, or a Unigram model's list of pieces, which needs no check here.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Vocab<'a> {
    Ids(#[serde(borrow)] HashMap<Cow<'a, str>, u32>),
    Pieces(serde::de::IgnoredAny),
}

/// A merge in either of its two spellings: `"a b"` or `["a", "b"]`.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Merge<'a> {
    Pair(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] Cow<'a, str>),
    Line(#[serde(borrow)] Cow<'a, str>),
}

/// Checks the file.
///
/// # Errors
/// [`TextError::Tokenizer`] with what is wrong.
pub(super) fn check(bytes: &[u8]) -> Result<Facts, TextError> {
    let file: File = serde_json::from_slice(bytes)
        .map_err(|e| TextError::Tokenizer(format!("expected the JSON of a tokenizer with a `model`: {e}")))?;
    check_merges(&file.model)?;
    let mut byte_fallback = false;
    for (place, part) in [
        (&NORMALIZER, &file.normalizer),
        (&PRE_TOKENIZER, &file.pre_tokenizer),
        (&POST_PROCESSOR, &file.post_processor),
        (&DECODER, &file.decoder),
    ] {
        let (mut parts, mut growth) = (0, 1_usize);
        each_part(place, part, &mut |kind, part| {
            byte_fallback |= kind == "ByteFallback";
            (parts, growth) = (parts + 1, growth.saturating_mul(grows(kind, part)));
            if parts > MAX_PARTS {
                return refuse(format!("the {} has more than {MAX_PARTS} parts", place.name));
            }
            if growth > MAX_GROWTH {
                return refuse(format!("the {} could make a text more than {MAX_GROWTH} times as long", place.name));
            }
            check_part(kind, part)
        })?;
    }
    Ok(Facts { byte_fallback })
}

/// Parts in one place; published tokenizers have less than ten. Each of them walks over all of a text.
const MAX_PARTS: usize = 64;
/// How much longer a text may become in one place: twelve parts that each make twenty characters of one make 10^15.
const MAX_GROWTH: usize = 1024;

/// How many times as long a text a part can make, at most.
fn grows(kind: &str, part: &Value) -> usize {
    let pattern = |kind: &str| part.get("pattern").and_then(|pattern| pattern.get(kind)).and_then(Value::as_str);
    let content = part.get("content").and_then(Value::as_str).map_or(0, str::len);
    match (kind, pattern("String")) {
        // A byte becomes a character of two.
        ("ByteLevel", _) => 2,
        (_, Some(text)) => content.div_ceil(text.len().max(1)).max(1),
        // An expression may match between any two bytes.
        _ => content + 1,
    }
}

fn check_merges(model: &Model) -> Result<(), TextError> {
    let Some(merges) = &model.merges else { return Ok(()) };
    let Some(Vocab::Ids(vocab)) = &model.vocab else {
        return refuse("`model.merges` needs `model.vocab`, an object of tokens and ids");
    };
    let prefix = model.continuing_subword_prefix.as_deref().unwrap_or("");
    let mut merged = String::new();
    for (index, merge) in merges.iter().enumerate() {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_ref(), right.as_ref()),
            // The line that names the format's version, which the library skips.
            Merge::Line(line) if line.starts_with("#version") => continue,
            Merge::Line(line) => match line.split_once(' ') {
                Some(pair) => pair,
                None => return refuse(format!("merge {index} is `{line}`; expected two tokens with a space between")),
            },
        };
        let Some(tail) = right.strip_prefix(prefix) else {
            return refuse(format!(
                "merge {index} joins `{left}` and `{right}`, but the second does not begin with the \
                 `continuing_subword_prefix` `{prefix}`"
            ));
        };
        merged.clear();
        merged.push_str(left);
        merged.push_str(tail);
        for token in [left, right, merged.as_str()] {
            if !vocab.contains_key(token) {
                let kind = model.kind.as_deref().unwrap_or("BPE");
                return refuse(format!(
                    "merge {index} of the {kind} model needs the token `{token}`, which is not in its vocabulary"
                ));
            }
        }
    }
    Ok(())
}

/// A place in the file where a part stands, and what may stand there.
struct Place {
    name: &'static str,
    kinds: &'static [&'static str],
    /// Field of a `Sequence` that lists further parts.
    list: &'static str,
}

const NORMALIZER: Place = Place {
    name: "normalizer",
    kinds: &[
        "BertNormalizer",
        "ByteLevel",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Replace",
        "Sequence",
        "Strip",
        "StripAccents",
    ],
    list: "normalizers",
};
const PRE_TOKENIZER: Place = Place {
    name: "pre_tokenizer",
    kinds: &[
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "FixedLength",
        "Metaspace",
        "Punctuation",
        "Sequence",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    ],
    list: "pretokenizers",
};
const POST_PROCESSOR: Place = Place {
    name: "post_processor",
    kinds: &["BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"],
    list: "processors",
};
const DECODER: Place = Place {
    name: "decoder",
    kinds: &["BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece"],
    list: "decoders",
};

/// Calls `look(type, object)` for a part and for those that it lists.
fn each_part(place: &Place, part: &Value, look: &mut dyn FnMut(&str, &Value) -> Result<(), TextError>) -> Result<(), TextError> {
    if part.is_null() {
        return Ok(());
    }
    let kind = part.get("type").and_then(Value::as_str).filter(|kind| place.kinds.contains(kind));
    let Some(kind) = kind else {
        return refuse(format!("a `{}` has no `type` that is known; expected one of {}", place.name, place.kinds.join(", ")));
    };
    look(kind, part)?;
    let parts = part.get(place.list);
    match parts.map(Value::as_array) {
        None if kind != "Sequence" => Ok(()),
        Some(Some(parts)) => parts.iter().try_for_each(|part| match part {
            Value::Null => refuse(format!("`{}` lists a null", place.list)),
            part => each_part(place, part, look),
        }),
        _ => refuse(format!("a Sequence needs `{}`, a list", place.list)),
    }
}

/// Looks at all fields whatever the type says, since the library does.
fn check_part(kind: &str, part: &Value) -> Result<(), TextError> {
    let number = |field: &str| part.get(field).and_then(Value::as_u64);
    let text = |field: &str| part.get(field).and_then(Value::as_str);
    if number("stop").is_some_and(|n| n > 0) {
        return refuse("a Strip decoder with `stop` above 0 is not supported");
    }
    if text("prepend") == Some("") {
        return refuse("a Prepend normalizer needs something to prepend");
    }
    if number("length") == Some(0) {
        return refuse("a FixedLength pre-tokenizer needs a `length` above 0");
    }
    let pattern = part.get("pattern");
    if pattern.is_some_and(|p| ["String", "Regex"].iter().any(|kind| p.get(kind).and_then(Value::as_str) == Some(""))) {
        return refuse(format!("the pattern of a {kind} is empty"));
    }
    if kind == "Precompiled" || part.get("precompiled_charsmap").is_some() {
        return refuse(
            "the Precompiled normalizer (SentencePiece Unigram models) is not supported; the model families here use BPE",
        );
    }
    check_template_processing(part)
}

fn check_template_processing(part: &Value) -> Result<(), TextError> {
    let pieces = |field: &str| part.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
    for piece in pieces("single") {
        if piece.get("Sequence").and_then(|s| s.get("id")).and_then(Value::as_str) == Some("B") {
            return refuse("the post-processor's template for a single text asks for a second text (`B`)");
        }
    }
    for piece in pieces("single").iter().chain(&pieces("pair")) {
        if let Some(id) = piece.get("SpecialToken").and_then(|s| s.get("id")).and_then(Value::as_str)
            && part.get("special_tokens").and_then(|known| known.get(id)).is_none()
        {
            return refuse(format!("the post-processor's template uses `{id}`, which its `special_tokens` do not define"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::*;
    use serde_json::json;

    fn tiny() -> Value {
        json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": null, "truncation": null, "padding": null,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}})
    }

    fn load(json: &Value) -> Result<Tokenizer, TextError> {
        Tokenizer::from_json(json.to_string().as_bytes())
    }

    fn refused(change: impl FnOnce(&mut Value)) -> String {
        let mut json = tiny();
        change(&mut json);
        match check(json.to_string().as_bytes()) {
            Err(TextError::Tokenizer(reason)) => reason,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    #[test]
    fn a_small_good_file_loads() {
        assert_eq!(load(&tiny()).unwrap().encode("abab", false).unwrap(), [2, 2]);
        let mut old = tiny();
        old["model"]["merges"] = json!(["#version: 0.2", "a b"]);
        assert_eq!(load(&old).unwrap().encode("ab", false).unwrap(), [2]);
    }

    #[test]
    fn texts_do_not_grow_without_bounds() {
        let replace = |content: &str| json!({"type": "Replace", "pattern": {"String": "e"}, "content": content});
        let sequence = |parts: Vec<Value>| json!({"type": "Sequence", "normalizers": parts});
        let growing = |count| sequence(vec![replace(&"e".repeat(20)); count]);
        assert!(refused(|j| j["normalizer"] = growing(12)).contains("1024 times as long"));
        let by_expression = json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "e".repeat(2000)});
        assert!(refused(|j| j["normalizer"] = by_expression).contains("1024 times as long"));
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        assert!(
            refused(|j| j["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": vec![bytes; 11]})).contains("as long")
        );
        assert!(refused(|j| j["normalizer"] = sequence(vec![replace("e"); 64])).contains("64 parts"));
        // Controls: what published tokenizers do.
        let mut good = tiny();
        good["normalizer"] = growing(2);
        load(&good).unwrap();
        good["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
        load(&good).unwrap();
    }

    #[test]
    fn what_would_panic_is_refused_with_a_sentence() {
        let missing = refused(|j| j["model"]["vocab"] = json!({"a": 0, "b": 1}));
        assert!(missing.contains("merge 0") && missing.contains("`ab`"), "{missing}");
        assert!(refused(|j| j["model"]["continuing_subword_prefix"] = json!("##")).contains("continuing_subword_prefix"));
        assert!(refused(|j| j["model"]["merges"] = json!(["ab"])).contains("two tokens"));
        assert!(
            refused(|j| j["decoder"] =
                json!({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 0, "stop": 1}]}))
            .contains("Strip")
        );
        assert!(
            refused(|j| j["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})).contains("Precompiled")
        );
        assert!(refused(|j| j["normalizer"] = json!({"type": "Prepend", "prepend": ""})).contains("Prepend"));
        let empty = json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"});
        assert!(refused(|j| j["normalizer"] = empty).contains("the pattern of a Replace is empty"));
        assert!(refused(|j| j["post_processor"] = json!({"type": "Guess", "single": []})).contains("no `type` that is known"));
        assert!(refused(|j| j["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0})).contains("FixedLength"));
        let template = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [], "special_tokens": {}});
        assert!(refused(|j| j["post_processor"] = template).contains("second text"));
        let template = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": [], "special_tokens": {}});
        assert!(refused(|j| j["post_processor"] = template).contains("<s>"));
    }

    #[test]
    fn rubbish_is_an_error() {
        for bytes in [&b""[..], b"{", b"[]", b"null", b"{}", b"{\"model\": 3}", b"<html>", &[0xff, 0xfe]] {
            assert!(matches!(Tokenizer::from_json(bytes), Err(TextError::Tokenizer(_))), "{bytes:?}");
        }
    }

    /// Every value of the small file replaced by every one of a list of odd ones: an error or a tokenizer that works, and
    /// never the guard against panics, which the browser does not have.
    #[test]
    fn mutated_files_never_reach_a_panic() {
        let mut rich = tiny();
        rich["added_tokens"] = json!([{"id": 3, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}]);
        rich["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace",
            "pattern": {"String": " "}, "content": "_"}, {"type": "Prepend", "prepend": "_"}]});
        rich["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
            {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]});
        rich["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}}});
        rich["decoder"] = json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert_eq!(load(&rich).unwrap().encode("ab", true).unwrap().first(), Some(&3));
        let odd = [
            json!(null),
            json!(true),
            json!(-1),
            json!(0),
            json!(1),
            json!(u64::MAX),
            json!(1e300),
            json!(""),
            json!("a"),
            json!("é"),
            json!("(?=("),
            json!("Sequence"),
            json!("Unigram"),
            json!("WordPiece"),
            json!("Metaspace"),
            json!("CTC"),
            json!([]),
            json!([[]]),
            json!(["a", "b", "c"]),
            json!({}),
            json!({"type": "Strip"}),
        ];
        let mut paths = Vec::new();
        collect(&rich, &mut Vec::new(), &mut paths);
        assert!(paths.len() > 60);
        let (mut loaded, mut panics) = (0, Vec::new());
        for path in &paths {
            for value in &odd {
                let mut json = rich.clone();
                *path.iter().fold(&mut json, |at, step| match step {
                    Step::Field(name) => &mut at[name.as_str()],
                    Step::Item(index) => &mut at[*index],
                }) = value.clone();
                let results = [load(&json).map(|tokenizer| {
                    loaded += 1;
                    [
                        tokenizer.encode("ab é <s> 12", true).err().map(|e| e.to_string()),
                        tokenizer.encode("", true).err().map(|e| e.to_string()),
                        tokenizer.decode(&[0, 3, 2, 9, u32::MAX], false).err().map(|e| e.to_string()),
                    ]
                })];
                for said in results.into_iter().flat_map(|r| match r {
                    Ok(errors) => errors.into_iter().flatten().collect::<Vec<_>>(),
                    Err(error) => vec![error.to_string()],
                }) {
                    if said.contains("library failed") {
                        panics.push(format!("{said}\n{json}"));
                    }
                }
            }
        }
        assert!(panics.is_empty(), "{} panics:\n{}", panics.len(), panics.join("\n"));
        assert!(loaded > 100, "control: some mutants load, so encode and decode were tried ({loaded})");
    }

    enum Step {
        Field(String),
        Item(usize),
    }

    impl Clone for Step {
        fn clone(&self) -> Self {
            match self {
                Self::Field(name) => Self::Field(name.clone()),
                Self::Item(index) => Self::Item(*index),
            }
        }
    }

    fn collect(at: &Value, path: &mut Vec<Step>, found: &mut Vec<Vec<Step>>) {
        let steps: Vec<(Step, &Value)> = match at {
            Value::Object(fields) => fields.iter().map(|(k, v)| (Step::Field(k.clone()), v)).collect(),
            Value::Array(items) => items.iter().enumerate().map(|(i, v)| (Step::Item(i), v)).collect(),
            _ => Vec::new(),
        };
        for (step, below) in steps {
            path.push(step);
            found.push(path.clone());
            collect(below, path, found);
            path.pop();
        }
    }
}
