//! The crate's one public error type, sorted by whose business the failure is.
//!
//! Rooms keep small enums of their own where they need to; at the engine's edge all of them become an [`Error`], whose
//! [`Error::code`] is what crosses to TypeScript.

/// A failure, with a readable sentence that names the thing, what was expected, what came and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device, browser or build cannot do what was asked (no WebGPU adapter, a binding limit too small).
    #[error("{0}")]
    Unsupported(String),
    /// Bytes could not be had: a missing file, a refused request, a short read.
    #[error("{0}")]
    Fetch(String),
    /// Bytes could not be had from a server; says from which address.
    #[error("{}", .0.message)]
    Http(Box<HttpFailure>),
    /// `config.json`, an index or an adapter's config is missing a field, or says something impossible or unknown.
    #[error("{0}")]
    BadConfig(String),
    /// A weights file is malformed, or a tensor is missing or has the wrong shape or type.
    #[error("{0}")]
    BadWeights(String),
    /// The tokenizer or chat template cannot be read, or a template failed to render.
    #[error("{0}")]
    BadTokenizer(String),
    /// Memory for weights, cache or activations could not be had.
    #[error("{0}")]
    OutOfMemory(String),
    /// The GPU device went away; load the model again.
    #[error("{0}")]
    DeviceLost(String),
    /// An option or argument given by the caller is out of range or contradicts another.
    #[error("{0}")]
    InvalidOption(String),
    /// The same, where the option has a name.
    #[error("{}", .0.message)]
    BadOption(Box<OptionFailure>),
    /// A generation is running already on this model.
    #[error("{0}")]
    Busy(String),
    /// The caller's signal stopped the work.
    #[error("{0}")]
    Aborted(String),
    /// An invariant of this crate does not hold: a bug of ours, reported instead of panicking.
    #[error("internal error: {0}")]
    Internal(String),
}

/// An option that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionFailure {
    /// Its name, as the crate's field is called: `max_tokens`, `prompt`.
    pub option: &'static str,
    /// The readable sentence.
    pub message: String,
}

/// What is known of a request that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpFailure {
    /// The readable sentence.
    pub message: String,
    /// The file, as the checkpoint names it.
    pub file: String,
    /// Its address.
    pub url: String,
    /// The HTTP status, where there was an answer.
    pub status: Option<u16>,
    /// Whether there is no such file.
    pub missing: bool,
    /// Whether the server gave other bytes than it had promised, so that nothing made of them may be kept.
    pub changed: bool,
}

impl Error {
    /// An [`Error::BadOption`].
    pub(crate) fn option(option: &'static str, message: impl Into<String>) -> Self {
        Self::BadOption(Box::new(OptionFailure { option, message: message.into() }))
    }

    /// The stable name of the failure's kind, as TypeScript sees it in `ForecallError.code`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unsupported(_) => "Unsupported",
            Self::Fetch(_) | Self::Http(_) => "Fetch",
            Self::BadConfig(_) => "BadConfig",
            Self::BadWeights(_) => "BadWeights",
            Self::BadTokenizer(_) => "BadTokenizer",
            Self::OutOfMemory(_) => "OutOfMemory",
            Self::DeviceLost(_) => "DeviceLost",
            Self::InvalidOption(_) | Self::BadOption(_) => "InvalidOption",
            Self::Busy(_) => "Busy",
            Self::Aborted(_) => "Aborted",
            Self::Internal(_) => "Internal",
        }
    }
}

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;
