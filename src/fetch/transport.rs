//! What a platform lends to [`super::http_source`]: single requests, and time to wait between them.

use std::time::Duration;

/// Why nothing (more) came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// There was no answer, or the connection broke; why, in the platform's words. Trying again may help.
    Broken(String),
    /// The caller stopped the loading.
    Stopped,
}

/// An answer's head; its body is still to come.
#[derive(Debug)]
pub struct Answer<B> {
    /// As HTTP numbers them; redirects have been followed.
    pub status: u16,
    /// Names in lower case. Browsers hide some of another origin's.
    pub headers: Vec<(String, String)>,
    /// The body. Dropping it ends the transfer.
    pub body: B,
}

impl<B> Answer<B> {
    /// A header by its lower-case name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// A header that is a number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        self.header(name).and_then(|value| value.trim().parse().ok())
    }
}

/// A body that is read piece by piece, no faster than it is asked for.
#[allow(async_fn_in_trait, reason = "futures need not be Send: loading is single-threaded by design")]
pub trait Body: std::fmt::Debug {
    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// [`Failure::Broken`] if the connection broke, or nothing came for long; [`Failure::Stopped`].
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Failure>;
}

/// Makes requests.
#[allow(async_fn_in_trait, reason = "futures need not be Send: loading is single-threaded by design")]
pub trait Transport {
    /// The body of an answer.
    type Body: Body;

    /// One GET, redirects followed. `private` headers go to `url`'s own origin. Natively never to another one; where a browser
    /// follows a redirect to another origin, it drops `Authorization` (Chrome before 119 does not) and no other header.
    ///
    /// # Errors
    /// [`Failure::Broken`] only if no answer came; [`Failure::Stopped`].
    async fn get(
        &self,
        url: &str,
        headers: &[(String, String)],
        private: &[(String, String)],
    ) -> Result<Answer<Self::Body>, Failure>;

    /// Waits.
    ///
    /// # Errors
    /// [`Failure::Stopped`].
    async fn pause(&self, time: Duration) -> Result<(), Failure>;
}
