//! Text: tokenizer, chat template, and the detokenizer that streams.
//!
//! The room turns messages into a prompt ([`ChatTemplate`]), a prompt into ids ([`Tokenizer`]) and ids back into text as
//! they are committed ([`Detokenizer`]). It holds no model, no device and no schedule; all it is given is bytes of the
//! checkpoint's own `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Those come from outside, so
//! whatever stands in them ends in a [`TextError`], never in a panic and never in a prompt other than the one
//! transformers would make.

pub mod chat_template;
pub mod detokenizer;
mod generation_tag;
mod python_format;
mod template_budget;
mod template_filters;
mod template_guard;
pub mod tokenizer;
mod tokenizer_check;
pub mod written_out;

pub use chat_template::{ChatRequest, ChatTemplate, TokenizerConfig};
pub use detokenizer::{Detokenizer, DetokenizerOptions, Piece};
pub use tokenizer::Tokenizer;

/// What can be wrong with text, tokenizer files and templates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// `tokenizer.json` is not one, or asks for something that cannot be done safely.
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    /// `tokenizer_config.json` is malformed.
    #[error("tokenizer_config.json: {0}")]
    TokenizerConfig(String),
    /// The chat template does not parse.
    #[error("chat template `{name}`: {reason}")]
    Template {
        /// Which template, `default` where the checkpoint has only one.
        name: String,
        /// The engine's words, with the line.
        reason: String,
    },
    /// The chat template failed while rendering these messages.
    #[error("chat template `{name}` failed on these messages: {reason}")]
    Render {
        /// Which template.
        name: String,
        /// The engine's words, with the line.
        reason: String,
    },
    /// The template refused the messages by calling `raise_exception`.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// A template was asked for by a name that the checkpoint does not have, or it has several and none is the default.
    #[error("no chat template named `{asked}`; the checkpoint has {known}")]
    UnknownTemplate {
        /// The name asked for.
        asked: String,
        /// The names there are.
        known: String,
    },
    /// A message is not an object with a role.
    #[error("message {index}: {reason}")]
    Message {
        /// Index of the message.
        index: usize,
        /// What was expected and what came.
        reason: String,
    },
    /// A variable for the template is nested too deep, or none that a template could read.
    #[error("the template variable `{name}`: {reason}")]
    Variable {
        /// Its name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A text could not be turned into ids.
    #[error("the text could not be tokenized: {0}")]
    Encode(String),
    /// Ids could not be turned into text.
    #[error("the tokens could not be turned into text: {0}")]
    Decode(String),
    /// A stop string that can never be met, or is met at once.
    #[error("stop string {index} is empty; leave it out")]
    EmptyStop {
        /// Index of the stop string.
        index: usize,
    },
}

impl From<TextError> for crate::Error {
    fn from(error: TextError) -> Self {
        match error {
            TextError::EmptyStop { .. } => Self::option("stop", error.to_string()),
            TextError::Variable { .. } => Self::option("template_variables", error.to_string()),
            TextError::Message { .. } | TextError::UnknownTemplate { .. } | TextError::Refused(_) => {
                Self::option("prompt", error.to_string())
            }
            _ => Self::BadTokenizer(error.to_string()),
        }
    }
}
