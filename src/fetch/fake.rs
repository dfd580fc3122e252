//! A server and a store in memory, for tests.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use super::transport::{Answer, Body, Failure, Transport};

/// A request that came.
#[derive(Debug, Clone)]
pub struct Asked {
    pub url: String,
    /// First byte and end, of a `range` header.
    pub range: Option<(u64, Option<u64>)>,
}

impl Asked {
    /// The bytes asked for of a file of `size` bytes.
    pub fn of(&self, size: usize) -> (usize, usize) {
        let (from, to) = self.range.unwrap_or((0, None));
        let to = to.map_or(size, |to| (to as usize).min(size));
        ((from as usize).min(to), to)
    }
}

/// What is answered; bodies come in pieces, and may break after them.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    pub breaks: bool,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), breaks: false }
    }

    /// The whole of `file`.
    pub fn whole(file: &[u8]) -> Self {
        Self { headers: vec![("content-length", file.len().to_string())], body: file.to_vec(), ..Self::status(200) }
    }

    /// What `asked` asks of `file`, as a server with ranges answers.
    pub fn ranged(asked: &Asked, file: &[u8], etag: &str) -> Self {
        if asked.range.is_none() {
            return Self::whole(file).with("etag", etag);
        }
        let (from, to) = asked.of(file.len());
        if from >= file.len() {
            return Self::status(416).with("content-range", format!("bytes */{}", file.len()));
        }
        let range = format!("bytes {from}-{}/{}", to - 1, file.len());
        let headers = vec![("content-range", range), ("etag", etag.to_owned()), ("content-length", (to - from).to_string())];
        Self { headers, body: file[from..to].to_vec(), ..Self::status(206) }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Only the first `bytes` come; then the connection breaks.
    pub fn cut(mut self, bytes: usize) -> Self {
        self.body.truncate(bytes);
        self.breaks = true;
        self
    }
}

type Answering = dyn FnMut(&Asked) -> Option<Reply>;

/// A server: answers requests (`None`: no answer comes) and notes them.
#[derive(Clone)]
pub struct FakeServer {
    answer: Rc<RefCell<Box<Answering>>>,
    pub asked: Rc<RefCell<Vec<Asked>>>,
    pub pauses: Rc<RefCell<Vec<Duration>>>,
    /// Bytes of a piece.
    pub piece: usize,
}

impl std::fmt::Debug for FakeServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeServer").finish_non_exhaustive()
    }
}

impl FakeServer {
    pub fn new(answer: impl FnMut(&Asked) -> Option<Reply> + 'static) -> Self {
        Self { answer: Rc::new(RefCell::new(Box::new(answer))), asked: Rc::default(), pauses: Rc::default(), piece: 700 }
    }
}

#[derive(Debug)]
pub struct FakeBody(VecDeque<Result<Vec<u8>, Failure>>);

impl Body for FakeBody {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        self.0.pop_front().transpose()
    }
}

impl Transport for FakeServer {
    type Body = FakeBody;

    async fn get(
        &self,
        url: &str,
        headers: &[(String, String)],
        _private: &[(String, String)],
    ) -> Result<Answer<FakeBody>, Failure> {
        let range = headers.iter().find(|(name, _)| name == "range").map(|(_, value)| {
            let (from, to) = value.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            (from.parse().unwrap(), if to.is_empty() { None } else { Some(to.parse::<u64>().unwrap() + 1) })
        });
        let asked = Asked { url: url.to_owned(), range };
        self.asked.borrow_mut().push(asked.clone());
        let reply = (self.answer.borrow_mut())(&asked).ok_or_else(|| Failure::Broken("no answer".into()))?;
        let mut pieces: VecDeque<_> = reply.body.chunks(self.piece).map(|piece| Ok(piece.to_vec())).collect();
        if reply.breaks {
            pieces.push_back(Err(Failure::Broken("reset".into())));
        }
        let headers = reply.headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(Answer { status: reply.status, headers, body: FakeBody(pieces) })
    }

    async fn pause(&self, time: Duration) -> Result<(), Failure> {
        self.pauses.borrow_mut().push(time);
        Ok(())
    }
}
