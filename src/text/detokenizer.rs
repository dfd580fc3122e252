//! Text from tokens as they are committed, in whole characters, with stop strings held back.
//!
//! Two things make streaming harder than decoding each token: one character may be spread over several tokens, and the
//! text of a token may depend on its neighbours (a leading space that only the first token loses). So the last few
//! tokens are always decoded together, and of what comes out only the part that later tokens cannot change is given away:
//!
//! - not a trailing U+FFFD, which may be the first bytes of a character to come;
//! - not a trailing emoji, flag or joiner, which the next token may extend to one picture (👩 + joiner + 👧);
//! - not a run of byte tokens of a byte-fallback decoder, which is decided as a whole;
//! - not an ending that could be the beginning of a stop string.
//!
//! A special token that has no text here is met as a stop string when its whole text is one.
//!
//! Promise: the parts, joined, are the full decode of all tokens up to the stop string, however the tokens were grouped.
//! Downside accepted: an emoji appears one token late.

use std::sync::Arc;

use unicode_segmentation::UnicodeSegmentation;

use super::tokenizer::ByteRun;
use super::{TextError, Tokenizer};

/// Tokens decoded together at most, before the window is moved on.
const WINDOW: usize = 32;
/// Tokens kept as context when the window is moved on.
const CONTEXT: usize = 8;

/// How tokens become text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DetokenizerOptions {
    /// Whether special tokens have no text (what one wants to show), or are written out.
    pub skip_special_tokens: bool,
    /// Text that ends the answer; it is not part of the answer. The text of a special token is met by that token, whether
    /// or not special tokens have text here.
    pub stop: Vec<String>,
}

/// What became text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    /// New text, whole characters, possibly none.
    pub text: String,
    /// Set once a stop string was met: how many tokens, of all that were pushed, it took to complete it. Later tokens are
    /// ignored.
    pub stop: Option<usize>,
}

/// Turns one answer's tokens into text, part by part.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    options: DetokenizerOptions,
    /// The last tokens: context whose text is known already, then what is new.
    window: Vec<u32>,
    /// How much of the window's text, in bytes, has been passed on to `held`.
    taken: usize,
    /// Whether the last token that has text is a byte token of a byte-fallback decoder.
    in_byte_run: bool,
    /// Text that is final but not yet given away, because it may begin a stop string or a longer emoji.
    held: String,
    tokens: usize,
    /// See [`Piece::stop`].
    stop: Option<usize>,
    /// Special tokens without text whose text is a stop string.
    stop_ids: Vec<u32>,
}

impl Detokenizer {
    /// A detokenizer for one answer.
    ///
    /// # Errors
    /// [`TextError::EmptyStop`] if a stop string is empty.
    pub fn new(tokenizer: Arc<Tokenizer>, options: DetokenizerOptions) -> Result<Self, TextError> {
        if let Some(index) = options.stop.iter().position(String::is_empty) {
            return Err(TextError::EmptyStop { index });
        }
        let ids = options.stop.iter().filter_map(|text| tokenizer.token_to_id(text));
        let stop_ids = ids.filter(|id| options.skip_special_tokens && tokenizer.is_special(*id)).collect();
        Ok(Self {
            tokenizer,
            options,
            window: Vec::new(),
            taken: 0,
            in_byte_run: false,
            held: String::new(),
            tokens: 0,
            stop: None,
            stop_ids,
        })
    }

    /// Adds committed tokens; returns the text that is certain now.
    ///
    /// # Errors
    /// [`TextError::Decode`] if the tokenizer's decoder fails, or takes back text that it gave for the same tokens.
    pub fn push(&mut self, ids: &[u32]) -> Result<Piece, TextError> {
        let mut text = String::new();
        for id in ids {
            if self.stop.is_some() {
                break;
            }
            self.tokens += 1;
            if self.stop_ids.contains(id) {
                text.push_str(&self.finish()?.text);
                self.stop = Some(self.tokens);
                break;
            }
            self.window.push(*id);
            match self.tokenizer.byte_run(*id, self.options.skip_special_tokens) {
                ByteRun::GoesOn => self.in_byte_run = true,
                ByteRun::Ends => self.in_byte_run = false,
                ByteRun::Unchanged => {}
            }
            if !self.in_byte_run {
                let decoded = self.decode_window()?;
                self.take(decoded.strip_suffix('\u{FFFD}').unwrap_or(&decoded))?;
                self.move_window(&decoded)?;
            }
            text.push_str(&self.release(false));
        }
        Ok(Piece { text, stop: self.stop })
    }

    /// Ends the answer; returns what was held back. More tokens may not follow.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<Piece, TextError> {
        if self.stop.is_none() {
            let decoded = self.decode_window()?;
            self.take(&decoded)?;
        }
        let text = self.release(true);
        self.window.clear();
        self.taken = 0;
        Ok(Piece { text, stop: self.stop })
    }

    fn decode_window(&self) -> Result<String, TextError> {
        self.tokenizer.decode(&self.window, self.options.skip_special_tokens)
    }

    /// Moves what is new in the window's text to `held`.
    fn take(&mut self, decoded: &str) -> Result<(), TextError> {
        if decoded.len() < self.taken {
            // Only a trailing U+FFFD shortens the text, and that was never taken.
            return Err(TextError::Decode("the decoder took text back when a token was added".to_owned()));
        }
        match decoded.get(self.taken..) {
            Some(new) => self.held.push_str(new),
            None => return Err(TextError::Decode("the decoder changed text when a token was added".to_owned())),
        }
        self.taken = decoded.len();
        Ok(())
    }

    /// Forgets tokens that no longer matter. Only where the text is settled, and only if the tokens kept decode to the
    /// end of it, so that the decoder will go on as if nothing had been forgotten.
    fn move_window(&mut self, decoded: &str) -> Result<(), TextError> {
        if self.window.len() < WINDOW || decoded.len() != self.taken {
            return Ok(());
        }
        for keep in CONTEXT..WINDOW {
            let Some(context) = self.window.len().checked_sub(keep).and_then(|from| self.window.get(from..)) else { break };
            let text = self.tokenizer.decode(context, self.options.skip_special_tokens)?;
            if !text.is_empty() && decoded.ends_with(&text) {
                self.window = context.to_vec();
                self.taken = text.len();
                break;
            }
        }
        Ok(())
    }

    /// Takes from `held` what may be given away; at the end of the answer, all of it.
    fn release(&mut self, end: bool) -> String {
        let mut until = self.held.len();
        if let Some(at) = first_stop(&self.held, &self.options.stop) {
            self.stop = self.stop.or(Some(self.tokens));
            until = at;
        } else if self.stop.is_none() && !end {
            until = until.min(beginning_of_stop(&self.held, &self.options.stop)).min(growing_picture(&self.held));
        }
        let text = self.held.get(..until).unwrap_or_default().to_owned();
        if self.stop.is_some() {
            self.held.clear();
        } else {
            self.held.drain(..text.len());
        }
        text
    }
}

/// Where the first stop string begins: the one that is complete first, the longest of those. So the answer does not depend
/// on how the text was cut into parts.
fn first_stop(text: &str, stop: &[String]) -> Option<usize> {
    stop.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at))).min().map(|(_, at)| at)
}

/// Where an ending begins that could become a stop string; the length of the text if there is none.
fn beginning_of_stop(text: &str, stop: &[String]) -> usize {
    let longest = stop.iter().map(String::len).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest.saturating_sub(1));
    text.char_indices()
        .map(|(at, _)| at)
        .filter(|at| *at >= from)
        .find(|at| text.get(*at..).is_some_and(|ending| stop.iter().any(|s| s.starts_with(ending))))
        .unwrap_or(text.len())
}

/// Where a last emoji, flag or joined sequence begins that more tokens could extend; the length of the text if there is
/// none.
fn growing_picture(text: &str) -> usize {
    let grows = |c: char| {
        matches!(c,
            '\u{200D}' | '\u{FE0F}' | '\u{20E3}'
            | '\u{203C}' | '\u{2049}' | '\u{2122}' | '\u{2139}' | '\u{2190}'..='\u{2BFF}'
            | '\u{3030}' | '\u{303D}' | '\u{3297}' | '\u{3299}'
            | '\u{1F000}'..='\u{1FAFF}' | '\u{E0020}'..='\u{E007F}')
    };
    match (text.chars().next_back(), text.grapheme_indices(true).next_back()) {
        (Some(last), Some((at, _))) if grows(last) => at,
        _ => text.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn smollm2() -> Arc<Tokenizer> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/demo-model/tokenizer.json");
        Arc::new(Tokenizer::from_json(&std::fs::read(path).unwrap()).unwrap())
    }

    /// A byte-fallback tokenizer as SentencePiece models are published: ids 0..256 are bytes, then some pieces.
    fn byte_fallback() -> Arc<Tokenizer> {
        let mut vocab = serde_json::Map::new();
        for byte in 0..256 {
            vocab.insert(format!("<0x{byte:02X}>"), json!(byte));
        }
        for (i, piece) in ["▁", "▁the", "a", "é", "▁cat", "s"].iter().enumerate() {
            vocab.insert((*piece).to_owned(), json!(256 + i));
        }
        let json = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "truncation": null, "padding": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocab, "merges": []}});
        Arc::new(Tokenizer::from_json(json.to_string().as_bytes()).unwrap())
    }

    /// A small generator of numbers below a bound, so that the tests need no library and repeat exactly.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            usize::try_from(self.0 % bound as u64).unwrap()
        }
    }

    fn stream(
        tokenizer: &Arc<Tokenizer>,
        options: &DetokenizerOptions,
        ids: &[u32],
        group: &mut dyn FnMut() -> usize,
    ) -> (Vec<String>, Option<usize>) {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), options.clone()).unwrap();
        let (mut parts, mut rest) = (Vec::new(), ids);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(group().clamp(1, rest.len()));
            parts.push(detokenizer.push(now).unwrap().text);
            rest = later;
        }
        let last = detokenizer.finish().unwrap();
        parts.push(last.text);
        (parts, last.stop)
    }

    fn random_ids(random: &mut Random, tokenizer: &Tokenizer, count: usize) -> Vec<u32> {
        let pictures = tokenizer.encode("👩‍👩‍👧‍👦 café 🇩🇪🇫🇷 👍🏽 ❤️ 日本 <|im_end|>", false).unwrap_or_default();
        (0..count)
            .map(|_| match random.below(3) {
                0 if !pictures.is_empty() => pictures[random.below(pictures.len())],
                1 => u32::try_from(random.below(260)).unwrap(),
                _ => u32::try_from(random.below(tokenizer.vocab_size() + 3)).unwrap(),
            })
            .collect()
    }

    #[test]
    fn parts_of_random_ids_join_to_the_full_decode() {
        for (tokenizer, seed) in [(smollm2(), 1), (byte_fallback(), 2)] {
            let mut random = Random(0x9E37_79B9_7F4A_7C15 + seed);
            let mut naive_differs = 0;
            for round in 0..300 {
                let count = 1 + random.below(90);
                let ids = random_ids(&mut random, &tokenizer, count);
                let options = DetokenizerOptions { skip_special_tokens: round % 2 == 0, stop: vec![] };
                let full = tokenizer.decode(&ids, options.skip_special_tokens).unwrap();
                let mut sizes = Random(seed + round + 7);
                let (parts, stop) = stream(&tokenizer, &options, &ids, &mut || 1 + sizes.below(5));
                assert_eq!(parts.concat(), full, "{ids:?}");
                assert_eq!(stop, None);
                let naive: String = ids.iter().map(|id| tokenizer.decode(&[*id], options.skip_special_tokens).unwrap()).collect();
                naive_differs += usize::from(naive != full);
            }
            assert!(naive_differs > 100, "control: token by token must go wrong often ({naive_differs})");
        }
    }

    #[test]
    fn a_character_of_several_tokens_comes_whole() {
        let tokenizer = smollm2();
        for text in ["👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "東", "é", "🫠"] {
            let ids = tokenizer.encode(&format!("x {text} y"), false).unwrap();
            let options = DetokenizerOptions::default();
            let (parts, _) = stream(&tokenizer, &options, &ids, &mut || 1);
            assert!(parts.iter().any(|part| part.contains(text)), "{text} was split: {parts:?}");
            assert!(parts.iter().all(|part| !part.contains('\u{FFFD}')), "{parts:?}");
        }
        let family = tokenizer.encode("👩‍👩‍👧‍👦", false).unwrap();
        assert!(family.len() > 4, "control: the family really is many tokens");
        assert!(tokenizer.decode(&family[..1], false).unwrap().contains('\u{FFFD}'), "control: its first is no character");
    }

    #[test]
    fn plain_words_are_not_delayed() {
        let tokenizer = smollm2();
        let ids = tokenizer.encode("The quick brown fox", false).unwrap();
        let mut detokenizer = Detokenizer::new(tokenizer, DetokenizerOptions::default()).unwrap();
        let parts: Vec<_> = ids.iter().map(|id| detokenizer.push(&[*id]).unwrap().text).collect();
        assert!(parts.iter().all(|part| !part.is_empty()), "{parts:?}");
    }

    #[test]
    fn unfinished_bytes_come_out_at_the_end() {
        let tokenizer = smollm2();
        let ids = tokenizer.encode("a👩", false).unwrap();
        let cut = &ids[..ids.len() - 1];
        let (parts, _) = stream(&tokenizer, &DetokenizerOptions::default(), cut, &mut || 1);
        assert_eq!(parts.concat(), tokenizer.decode(cut, false).unwrap());
        assert!(parts.last().unwrap().contains('\u{FFFD}'));
    }

    /// The rule itself, on the whole text: the stop string that is complete first, the longest of those.
    fn cut(full: &str, stop: &[String]) -> (String, bool) {
        for end in full.char_indices().map(|(at, c)| at + c.len_utf8()) {
            let met = stop.iter().filter(|s| full[..end].ends_with(s.as_str())).max_by_key(|s| s.len());
            if let Some(s) = met {
                return (full[..end - s.len()].to_owned(), true);
            }
        }
        (full.to_owned(), false)
    }

    #[test]
    fn stop_strings_cut_where_the_whole_text_would_be_cut() {
        let tokenizer = smollm2();
        let mut random = Random(42);
        let words = ["User", ":", "\n", "\n\n", "ab", "abc", "bcd", " a", "b", "c", "d", "é", "👩", " the", "Us"];
        let stop: Vec<String> = ["\n\nUser:", "abcd", "bc", "ab\n", "é👩"].iter().map(|s| (*s).to_owned()).collect();
        let (mut stopped, mut ran_out) = (0, 0);
        for round in 0..400 {
            let text: String = (0..random.below(24)).map(|_| words[random.below(words.len())]).collect();
            let ids = tokenizer.encode(&text, false).unwrap();
            let options = DetokenizerOptions { skip_special_tokens: true, stop: stop.clone() };
            let full = tokenizer.decode(&ids, true).unwrap();
            let mut sizes = Random(round + 5);
            let (parts, hit) = stream(&tokenizer, &options, &ids, &mut || 1 + sizes.below(4));
            let expected = cut(&full, &stop);
            assert_eq!((parts.concat(), hit.is_some()), expected, "{full:?}");
            if let Some(count) = hit {
                stopped += 1;
                let before = tokenizer.decode(&ids[..count - 1], true).unwrap();
                let with = tokenizer.decode(&ids[..count], true).unwrap();
                assert!(!cut(&before, &stop).1 && cut(&with, &stop).1, "the token that completed it");
            } else {
                ran_out += 1;
            }
        }
        assert!(stopped > 50 && ran_out > 50, "control: both happen ({stopped}, {ran_out})");
    }

    #[test]
    fn the_beginning_of_a_stop_string_is_held_until_it_is_none() {
        let tokenizer = smollm2();
        let options = DetokenizerOptions { skip_special_tokens: true, stop: vec!["###".to_owned()] };
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), options).unwrap();
        let id = tokenizer.token_to_id("#").unwrap();
        assert_eq!(detokenizer.push(&[id, id]).unwrap().text, "");
        let a = tokenizer.token_to_id("a").unwrap();
        assert_eq!(detokenizer.push(&[a]).unwrap().text, "##a");
        let piece = detokenizer.push(&[a, id, id, id, a]).unwrap();
        assert_eq!(piece, Piece { text: "a".to_owned(), stop: Some(7) });
        assert_eq!(detokenizer.push(&[a]).unwrap().text, "", "nothing comes after a stop");
        assert_eq!(detokenizer.finish().unwrap().text, "");
    }

    #[test]
    fn the_text_of_a_special_token_is_met_by_the_token() {
        let tokenizer = smollm2();
        let ids = tokenizer.encode("a b##<|endoftext|> c", false).unwrap();
        let at = ids.iter().position(|id| tokenizer.is_special(*id)).unwrap();
        for skip_special_tokens in [true, false] {
            let with = |stop: &str| {
                // The first half of another stop string is held back when the token comes.
                let options = DetokenizerOptions { skip_special_tokens, stop: vec!["###".to_owned(), stop.to_owned()] };
                let (parts, hit) = stream(&tokenizer, &options, &ids, &mut || 2);
                (parts.concat(), hit)
            };
            assert_eq!(with("<|endoftext|>"), ("a b##".to_owned(), Some(at + 1)));
            assert_eq!(with("a b"), (String::new(), Some(2)), "what comes first");
            let whole = tokenizer.decode(&ids, skip_special_tokens).unwrap();
            assert_eq!(with("<|im_end|>"), (whole, None), "control: a special token that does not come");
        }
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let options = DetokenizerOptions { skip_special_tokens: true, stop: vec!["x".to_owned(), String::new()] };
        assert_eq!(Detokenizer::new(smollm2(), options).unwrap_err(), TextError::EmptyStop { index: 1 });
    }
}
