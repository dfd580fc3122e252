//! HTTP for native programs.

use std::io::Read;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use super::transport::{Answer, Body, Failure, Transport};

/// Bytes of a piece of a body.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces read ahead of whoever waits for them.
const PIECES_AHEAD: usize = 8;
/// Redirects followed.
const MAX_REDIRECTS: usize = 8;

/// Requests by ureq. Bodies are read on a thread of their own, a little ahead.
#[derive(Debug, Clone)]
pub struct UreqTransport {
    agent: ureq::Agent,
}

impl UreqTransport {
    /// A connection counts as broken when nothing came for `patience`.
    #[must_use]
    pub fn new(patience: Duration) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // Followed here, because what is sent to a host depends on which one it is.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(patience))
            .timeout_recv_response(Some(patience))
            .timeout_per_read(Some(patience))
            .user_agent(concat!("forecall/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.new_agent() }
    }
}

impl Default for UreqTransport {
    fn default() -> Self {
        Self::new(Duration::from_secs(30))
    }
}

impl Transport for UreqTransport {
    type Body = ReadAhead;

    async fn get(
        &self,
        url: &str,
        headers: &[(String, String)],
        private: &[(String, String)],
    ) -> Result<Answer<ReadAhead>, Failure> {
        let broken = |error: ureq::Error| Failure::Broken(error.to_string());
        let own = origin(url);
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&url);
            let trusted = if origin(&url) == own { private } else { &[] };
            for (name, value) in headers.iter().chain(trusted) {
                request = request.header(name, value);
            }
            if headers.iter().any(|(name, _)| name == "range") {
                request = request.header("accept-encoding", "identity");
            }
            let response = request.call().map_err(broken)?;
            let status = response.status().as_u16();
            let location = response.headers().get("location").and_then(|location| location.to_str().ok());
            if let (301 | 302 | 303 | 307 | 308, Some(location)) = (status, location) {
                url = join(&url, location);
                continue;
            }
            let headers = response
                .headers()
                .iter()
                .filter_map(|(name, value)| Some((name.as_str().to_ascii_lowercase(), value.to_str().ok()?.to_owned())))
                .collect();
            return Ok(Answer { status, headers, body: ReadAhead::start(response.into_body().into_reader()) });
        }
        Err(Failure::Broken(format!("more than {MAX_REDIRECTS} redirects followed one another")))
    }

    async fn pause(&self, time: Duration) -> Result<(), Failure> {
        std::thread::sleep(time);
        Ok(())
    }
}

/// Scheme and host with port, in lower case.
fn origin(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // What stands before an @ is no part of the host.
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{scheme}://{host}").to_ascii_lowercase()
}

/// The address that `location` means on the page `url`.
fn join(url: &str, location: &str) -> String {
    let location = location.split('#').next().unwrap_or_default();
    if location.contains("://") {
        return location.to_owned();
    }
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    if let Some(host) = location.strip_prefix("//") {
        return format!("{scheme}://{host}");
    }
    let host = rest.split('/').next().unwrap_or_default();
    if location.starts_with('/') {
        return format!("{scheme}://{host}{location}");
    }
    let path = rest.split(['?', '#']).next().unwrap_or_default();
    let folder = path.rsplit_once('/').map_or(path, |(folder, _)| folder);
    format!("{scheme}://{folder}/{location}")
}

/// A body that a thread reads ahead of whoever asks for it, a few pieces at most.
#[derive(Debug)]
pub struct ReadAhead {
    pieces: Receiver<Result<Vec<u8>, Failure>>,
    /// Whether the next poll is the one after a turn was given to others.
    turned: bool,
}

impl ReadAhead {
    fn start(mut reader: impl Read + Send + 'static) -> Self {
        let (send, pieces) = sync_channel(PIECES_AHEAD);
        std::thread::spawn(move || pump(&mut reader, &send));
        Self { pieces, turned: false }
    }
}

fn pump(reader: &mut impl Read, send: &SyncSender<Result<Vec<u8>, Failure>>) {
    let mut piece = vec![0; PIECE_BYTES];
    let mut filled = 0;
    loop {
        let read = piece.get_mut(filled..).map_or(Ok(0), |free| reader.read(free));
        let (ended, failed) = match read {
            Ok(0) => (true, None),
            Ok(count) => {
                filled += count;
                (false, None)
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => (false, None),
            Err(error) => (true, Some(Failure::Broken(error.to_string()))),
        };
        // Small pieces are sent at once when they are all there is for now; a full one always.
        if filled > 0 {
            let bytes = piece.get(..filled).unwrap_or_default().to_vec();
            filled = 0;
            if send.send(Ok(bytes)).is_err() {
                return;
            }
        }
        if let Some(broken) = failed {
            // Nobody listens any more if this fails.
            let _ = send.send(Err(broken));
        }
        if ended {
            return;
        }
    }
}

impl Body for ReadAhead {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        // Whoever drives this future looks at what came, and may stop, between two pieces.
        std::future::poll_fn(|context| {
            self.turned = !self.turned;
            if self.turned {
                context.waker().wake_by_ref();
                return std::task::Poll::Pending;
            }
            std::task::Poll::Ready(())
        })
        .await;
        // The reading thread is gone at the end.
        self.pieces.recv().ok().transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_where_they_say() {
        let at = "https://a.org:8/x/y?z";
        assert_eq!(join(at, "https://b.org/c"), "https://b.org/c");
        assert_eq!(join(at, "//b.org/c"), "https://b.org/c");
        assert_eq!(join(at, "/c?d#e"), "https://a.org:8/c?d");
        assert_eq!(join(at, "c"), "https://a.org:8/x/c");
        assert_eq!(join("https://a.org", "c"), "https://a.org/c");
    }

    #[test]
    fn origins() {
        assert_eq!(origin("HTTPS://A.org/x"), origin("https://a.org?y"));
        for other in ["http://a.org", "https://a.org:444", "https://b.org", "https://a.org@b.org/", "https://a.org.b.org"] {
            assert_ne!(origin(other), origin("https://a.org/"), "{other}");
        }
    }
}
