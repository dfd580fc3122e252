//! The checkpoint's tokenizer, read from the bytes of its `tokenizer.json`.
//!
//! The `tokenizers` crate does the work. What this file adds: files that would make that crate panic are refused first
//! ([`super::tokenizer_check`]), truncation and padding of the file are ignored (they are for training; a prompt is never
//! cut silently), and natively a panic that gets through all the same is caught and becomes an error. On wasm a panic
//! cannot be caught, which is why the check comes first.

use tokenizers::{Model as _, OffsetType, PreTokenizer as _};

use super::{TextError, tokenizer_check};

/// Text to ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special: Vec<(u32, String)>,
    byte_fallback: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the bytes are not a tokenizer, or one whose parts contradict each other.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TextError> {
        let facts = tokenizer_check::check(bytes)?;
        let mut inner =
            guarded(|| tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string())).map_err(TextError::Tokenizer)?;
        inner.with_truncation(None).map_err(|e| TextError::Tokenizer(e.to_string()))?;
        inner.with_padding(None);
        let mut special: Vec<(u32, String)> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| (id, token.content))
            .collect();
        special.sort_unstable();
        Ok(Self { inner, special, byte_fallback: facts.byte_fallback })
    }

    /// The ids of `text`. Special tokens written out in the text (`<|im_start|>`) become their ids. With
    /// `add_special_tokens` the file's post-processor adds what it adds (BOS, mostly); rendered chat prompts want it
    /// off, since their template has written these tokens already.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer cannot split the text, for instance because it has no token for a
    /// character and no unknown token.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.encode_parts(text, None, add_special_tokens)
    }

    /// The ids of a text in which `mark`s stand inside special tokens that are none ([`super::written_out`]): the marks hide
    /// them while special tokens are looked for, and are gone when the text between these is split. Nothing is added.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_marked(&self, text: &str, mark: char) -> Result<Vec<u32>, TextError> {
        self.encode_parts(text, Some(mark), false)
    }

    /// What the library's `encode_fast` does, with a step between finding special tokens and splitting the rest.
    fn encode_parts(&self, text: &str, mark: Option<char>, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let work = || -> tokenizers::Result<Vec<u32>> {
            let mut parts = self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text);
            if let Some(mark) = mark {
                // Parts that are empty without their marks are dropped.
                parts.split(|_, mut part| part.replace(mark, "").map(|()| [part]))?;
            }
            if let Some(split) = self.inner.get_pre_tokenizer() {
                split.pre_tokenize(&mut parts)?;
            }
            self.inner.get_model().tokenize_in_pretokenized(&mut parts, None)?;
            let encoding = parts.into_encoding(None, 0, OffsetType::None)?;
            Ok(self.inner.post_process(encoding, None, add_special_tokens)?.get_ids().to_vec())
        };
        guarded(|| work().map_err(|e| e.to_string())).map_err(TextError::Encode)
    }

    /// The text of `ids`, all at once. Ids that the tokenizer does not know (the padding rows of a model's vocabulary)
    /// have no text. Bytes that are no UTF-8 come out as U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Decode`] if the file's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        guarded(|| self.inner.decode(ids, skip_special_tokens).map_err(|e| e.to_string())).map_err(TextError::Decode)
    }

    /// The id of a token as the vocabulary spells it (`Ġthe`, `<|im_end|>`).
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The vocabulary's spelling of an id.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// How many tokens there are, added ones included. A model's vocabulary may be padded beyond it.
    #[cfg(test)]
    pub(crate) fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The added tokens marked special, by id: `(id, text)`.
    #[must_use]
    pub fn special_tokens(&self) -> &[(u32, String)] {
        &self.special
    }

    /// Whether an id is an added token marked special.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search_by_key(&id, |(known, _)| *known).is_ok()
    }

    /// What an id means to a run of byte tokens (`<0xE2>`), whose text is only known once the run has ended: a
    /// byte-fallback decoder turns a run that is not UTF-8 into one U+FFFD per token, also where its beginning was good.
    pub(crate) fn byte_run(&self, id: u32, skip_special_tokens: bool) -> ByteRun {
        if !self.byte_fallback {
            return ByteRun::Ends;
        }
        match self.inner.id_to_token(id) {
            None => ByteRun::Unchanged,
            Some(_) if skip_special_tokens && self.is_special(id) => ByteRun::Unchanged,
            Some(t) if t.len() == 6 && t.starts_with("<0x") && t.ends_with('>') => ByteRun::GoesOn,
            Some(_) => ByteRun::Ends,
        }
    }
}

/// See [`Tokenizer::byte_run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByteRun {
    /// A byte token.
    GoesOn,
    /// A token with text of its own.
    Ends,
    /// A token without text, which the decoder never sees.
    Unchanged,
}

/// Runs `work`, and makes an error of a panic where panics unwind.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // Nothing of ours is left half-written behind a panic: the tokenizer's only interior state is its cache of merges.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => result,
        Err(panic) => {
            let said = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err(format!("the tokenizer library failed on it ({said})"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMOLLM2: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/demo-model/tokenizer.json");
    const GREEDY: &str = include_str!("../../tests/data/smollm2/greedy.json");

    fn smollm2() -> Tokenizer {
        Tokenizer::from_json(&std::fs::read(SMOLLM2).unwrap()).unwrap()
    }

    #[test]
    fn prompts_of_the_demo_model_become_the_reference_ids() {
        let tokenizer = smollm2();
        let cases: serde_json::Value = serde_json::from_str(GREEDY).unwrap();
        let cases = cases.as_array().unwrap();
        assert!(cases.len() >= 4);
        for case in cases {
            let rendered = case["rendered"].as_str().unwrap();
            let expected: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(rendered, false).unwrap(), expected, "{rendered}");
            assert_eq!(tokenizer.encode(rendered, true).unwrap(), expected, "the file adds no BOS");
            assert_eq!(tokenizer.decode(&expected, false).unwrap(), rendered);
        }
    }

    #[test]
    fn odd_texts_become_the_ids_that_python_gives_them() {
        let tokenizer = smollm2();
        let cases: serde_json::Value = serde_json::from_str(include_str!("../../tests/data/smollm2/encodings.json")).unwrap();
        for case in cases.as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{text:?}");
            assert_eq!(tokenizer.decode(&expected, false).unwrap(), text);
        }
    }

    #[test]
    fn every_digit_is_a_token_of_its_own() {
        let tokenizer = smollm2();
        let ids = tokenizer.encode("2026", false).unwrap();
        let texts: Vec<_> = ids.iter().map(|id| tokenizer.decode(&[*id], false).unwrap()).collect();
        assert_eq!(texts, ["2", "0", "2", "6"]);
        // Control: letters do share tokens, so the assertion above is about digits.
        assert!(tokenizer.encode("word", false).unwrap().len() < 4);
    }

    #[test]
    fn emoji_and_accents_survive_the_round_trip() {
        let tokenizer = smollm2();
        for text in ["👩‍👩‍👧‍👦 naïve café — 東京 🇩🇪", "e\u{301}", " \n\n  x", ""] {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }
    }

    #[test]
    fn long_runs_neither_stall_nor_defeat_the_regex() {
        let tokenizer = smollm2();
        for unit in [" ", "a", "7", "\n ", "'", "é"] {
            let text = unit.repeat(50_000) + "x";
            let started = std::time::Instant::now();
            let ids = tokenizer.encode(&text, false).unwrap();
            assert!(started.elapsed().as_secs() < 20, "{unit:?} took {:?}", started.elapsed());
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text, "{unit:?}");
        }
    }

    #[test]
    fn the_vocabulary_answers_in_both_directions() {
        let tokenizer = smollm2();
        assert_eq!(tokenizer.vocab_size(), 49152);
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        assert_eq!(end, 2);
        assert_eq!(tokenizer.id_to_token(end).as_deref(), Some("<|im_end|>"));
        assert_eq!(tokenizer.id_to_token(u32::MAX), None);
        assert!(tokenizer.is_special(end));
        assert!(!tokenizer.is_special(tokenizer.token_to_id("a").unwrap()));
        assert!(tokenizer.special_tokens().contains(&(end, "<|im_end|>".to_owned())));
    }

    #[test]
    fn special_tokens_can_be_left_out_and_unknown_ids_have_no_text() {
        let tokenizer = smollm2();
        let mut ids = tokenizer.encode("<|im_start|>hello<|im_end|>", false).unwrap();
        assert_eq!(ids.first(), Some(&1));
        ids.push(4_000_000_000);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "hello");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<|im_start|>hello<|im_end|>");
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_ignored() {
        let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(SMOLLM2).unwrap()).unwrap();
        json["truncation"] = serde_json::json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"});
        let text = "one two three four";
        let cut = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        assert_eq!(cut.encode(text, false).unwrap().len(), 64, "control: the library would cut and pad");
        let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), smollm2().encode(text, false).unwrap());
    }
}
