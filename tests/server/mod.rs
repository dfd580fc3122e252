//! A real HTTP server on this machine that answers as it is told to, well or badly.

// Each test program uses what it needs of this.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A request.
#[derive(Debug, Clone)]
pub struct Request {
    /// Path and query.
    pub path: String,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    /// First byte and end of the bytes asked for.
    pub range: Option<(u64, Option<u64>)>,
}

/// Bytes of a body.
#[derive(Clone)]
pub enum Content {
    /// These.
    Bytes(Arc<Vec<u8>>),
    /// These, then zeros up to this size.
    Padded(Arc<Vec<u8>>, u64),
}

impl Content {
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Padded(_, size) => *size,
        }
    }

    fn write(&self, from: u64, to: u64, stream: &mut TcpStream, sent: &AtomicU64) -> std::io::Result<()> {
        const ZEROS: [u8; 1 << 18] = [0; 1 << 18];
        let head = match self {
            Self::Bytes(bytes) | Self::Padded(bytes, _) => bytes,
        };
        let mut at = from;
        while at < to {
            let piece = match head.get(at as usize..(to as usize).min(head.len())).filter(|piece| !piece.is_empty()) {
                Some(piece) => &piece[..piece.len().min(ZEROS.len())],
                None => &ZEROS[..((to - at) as usize).min(ZEROS.len())],
            };
            stream.write_all(piece)?;
            sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
            at += piece.len() as u64;
        }
        Ok(())
    }
}

impl From<&[u8]> for Content {
    fn from(bytes: &[u8]) -> Self {
        Self::Bytes(Arc::new(bytes.to_vec()))
    }
}

/// An answer.
#[derive(Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub content: Content,
    pub from: u64,
    pub to: u64,
    /// Bytes after which the connection is cut.
    pub cut: Option<u64>,
    /// Bytes after which nothing comes any more.
    pub stall: Option<u64>,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        let content = Content::from(b"".as_slice());
        Self { status, headers: Vec::new(), content, from: 0, to: 0, cut: None, stall: None }.with("content-length", "0")
    }

    /// All of `content`, whatever range was asked for.
    pub fn whole(content: &Content) -> Self {
        let size = content.len();
        let reply = Self { content: content.clone(), to: size, ..Self::status(200) };
        reply.with("content-length", &size.to_string())
    }

    /// What was asked for, as a server with ranges answers.
    pub fn ranged(request: &Request, content: &Content, etag: &str) -> Self {
        let Some((from, to)) = request.range else { return Self::whole(content).with("etag", etag) };
        let size = content.len();
        let to = to.unwrap_or(size).min(size);
        if from >= size {
            return Self::status(416).with("content-range", &format!("bytes */{size}"));
        }
        Self { content: content.clone(), from, to, ..Self::status(206) }
            .with("content-length", &(to - from).to_string())
            .with("content-range", &format!("bytes {from}-{}/{size}", to - 1))
            .with("etag", etag)
    }

    /// Sets a header.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self
    }

    /// Cuts the connection after `bytes` of the body.
    pub fn cut(self, bytes: u64) -> Self {
        Self { cut: Some(bytes), ..self }
    }

    /// Sends nothing any more after `bytes` of the body.
    pub fn stall(self, bytes: u64) -> Self {
        Self { stall: Some(bytes), ..self }
    }
}

type Handler = dyn Fn(&Request) -> Reply + Send + Sync;

/// A server, stopped with the value.
pub struct Server {
    pub address: String,
    log: Arc<Mutex<Vec<Request>>>,
    sent: Arc<AtomicU64>,
    busy: Arc<AtomicU64>,
    stopped: Arc<AtomicBool>,
}

impl Server {
    pub fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let log = Arc::<Mutex<Vec<Request>>>::default();
        let (sent, busy, stopped) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let handler: Arc<Handler> = Arc::new(handler);
        {
            let (log, sent, busy, stopped) = (Arc::clone(&log), Arc::clone(&sent), Arc::clone(&busy), Arc::clone(&stopped));
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    if stopped.load(Ordering::SeqCst) {
                        return;
                    }
                    let (log, sent, busy, handler) =
                        (Arc::clone(&log), Arc::clone(&sent), Arc::clone(&busy), Arc::clone(&handler));
                    std::thread::spawn(move || {
                        // A client that goes away is no failure of the server.
                        let _ = answer(stream, &log, &sent, &busy, handler.as_ref());
                    });
                }
            });
        }
        Self { address, log, sent, busy, stopped }
    }

    /// Requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }

    /// Requests so far for paths that end with `name`.
    pub fn asked_for(&self, name: &str) -> Vec<Request> {
        self.requests().into_iter().filter(|request| request.path.ends_with(name)).collect()
    }

    /// Forgets what has been asked for and sent, once what a client went away from has ended.
    pub fn forget(&self) {
        for _ in 0..1000 {
            if self.busy.load(Ordering::SeqCst) == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.log.lock().unwrap().clear();
        self.sent.store(0, Ordering::SeqCst);
    }

    /// Bytes of bodies that went out.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }

    /// Answers nobody any more.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        // Wakes whoever waits for connections.
        let _ = TcpStream::connect(self.address.trim_start_matches("http://"));
        // The port is closed once the listening thread has gone.
        while TcpStream::connect(self.address.trim_start_matches("http://")).is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.stopped.load(Ordering::SeqCst) {
            self.stop();
        }
    }
}

/// Counts an answer while it is given.
struct Busy<'a>(&'a AtomicU64);

impl<'a> Busy<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn answer(
    mut stream: TcpStream,
    log: &Mutex<Vec<Request>>,
    sent: &AtomicU64,
    busy: &AtomicU64,
    handler: &Handler,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            match line.trim_end().split_once(':') {
                Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.trim().to_owned()),
                None => break,
            };
        }
        let range = headers.get("range").and_then(|range: &String| {
            let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((from.parse().ok()?, to.parse::<u64>().ok().map(|to| to + 1)))
        });
        let request = Request { path, headers, range };
        let _busy = Busy::new(busy);
        log.lock().unwrap().push(request.clone());
        let reply = handler(&request);
        let head: String = reply.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        stream.write_all(format!("HTTP/1.1 {} X\r\n{head}\r\n", reply.status).as_bytes())?;
        let to = reply.to.min(reply.from + reply.cut.or(reply.stall).unwrap_or(u64::MAX - reply.from));
        reply.content.write(reply.from, to, &mut stream, sent)?;
        if reply.stall.is_some() {
            // Until the client has had enough.
            let _ = reader.read(&mut [0]);
        }
        if reply.cut.is_some() || reply.stall.is_some() {
            return stream.shutdown(std::net::Shutdown::Both);
        }
    }
}
