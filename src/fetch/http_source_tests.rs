use std::cell::Cell;

use super::*;
use crate::fetch::fake::{Asked, FakeServer, Reply};

const BLOCK: u64 = 4096;
const NAME: &str = "model.safetensors";

fn file() -> Vec<u8> {
    (0..50_001_u32).map(|i| (i * 31 + (i >> 8)) as u8).collect()
}

fn options() -> HttpOptions {
    HttpOptions { block_bytes: BLOCK, kept_bytes: 16 * BLOCK, ..HttpOptions::default() }
}

fn source(server: &FakeServer, options: HttpOptions) -> HttpSource<FakeServer> {
    HttpSource::new(server.clone(), Locator::parse("http://models.test/m/", None, None).unwrap(), options)
}

fn ranged() -> FakeServer {
    FakeServer::new(|asked| match asked.url.ends_with("missing.json") {
        true => Some(Reply::status(404)),
        false => Some(Reply::ranged(asked, &file(), "\"1\"")),
    })
}

fn read(source: &mut HttpSource<FakeServer>, range: Range<u64>) -> Result<()> {
    let bytes = pollster::block_on(source.read(NAME, range.clone()))?;
    assert!(bytes == file()[range.start as usize..range.end as usize], "bytes {range:?} are not those of the file");
    Ok(())
}

/// Every byte once, in pieces, in an order in which neighbouring layers are swapped.
fn layers() -> Vec<Range<u64>> {
    let size = file().len() as u64;
    let layer = |i: u64| (i * 10_000..((i + 1) * 10_000)).step_by(700).map(move |at| at..(at + 700).min((i + 1) * 10_000));
    [0, 2, 1, 4, 3].into_iter().flat_map(layer).chain([50_000..size]).collect()
}

fn read_layers(source: &mut HttpSource<FakeServer>) -> Result<()> {
    let reads: Vec<_> = layers().into_iter().map(|range| (NAME.to_owned(), range)).collect();
    pollster::block_on(source.size(NAME))?;
    source.expect(&reads);
    layers().into_iter().try_for_each(|range| read(source, range))
}

fn refused<T: std::fmt::Debug>(result: Result<T>, about: &str) -> HttpFailure {
    match result {
        Err(Error::Http(failure)) if failure.message.contains(about) => *failure,
        other => panic!("expected a failure about \"{about}\": {other:?}"),
    }
}

#[test]
fn bytes_in_any_order_travel_once() {
    let server = ranged();
    let mut source = source(&server, options());
    assert_eq!(pollster::block_on(source.size(NAME)), Ok(Some(50_001)));
    read_layers(&mut source).unwrap();
    assert_eq!(source.traffic().unwrap().bytes(), BLOCK + 50_001);
    assert_eq!(server.asked.borrow().len(), 2, "the head, and one stream");
    assert_eq!(source.kept.bytes, 0, "nothing is kept that was handed out");
    assert_eq!(pollster::block_on(source.size("missing.json")), Ok(None));
    let failure = refused(pollster::block_on(source.read("missing.json", 0..1)), "there is no missing.json");
    assert!(failure.missing && failure.url.ends_with("/m/missing.json"), "{failure:?}");
    refused(read(&mut source, 49_000..50_002), "truncated");
    // What was handed out is asked for by range when it is wanted again.
    read(&mut source, 5..9000).unwrap();
    assert!(server.asked.borrow().len() > 1);
}

#[test]
fn what_does_not_fit_is_dropped_and_asked_for_again() {
    let server = ranged();
    let mut source = source(&server, HttpOptions { kept_bytes: 3 * BLOCK, ..options() });
    // The end first, then all that passed.
    let reads: Vec<_> = [40_000..50_000, 0..40_000].map(|range| (NAME.to_owned(), range)).into();
    pollster::block_on(source.size(NAME)).unwrap();
    source.expect(&reads);
    for (_, range) in &reads {
        read(&mut source, range.clone()).unwrap();
        assert!(source.kept.bytes <= 5 * BLOCK, "{} bytes are kept", source.kept.bytes);
    }
    let asked = server.asked.borrow().len();
    assert!(asked > 2, "{asked} requests");
    assert_eq!(source.kept.bytes, 0);
}

#[test]
fn a_block_that_comes_otherwise_the_second_time_is_refused() {
    // No ETag, the same sizes, and other bytes by range.
    let server = FakeServer::new(|asked: &Asked| {
        let mut file = file();
        if asked.range.is_some_and(|(_, to)| to.is_some()) {
            file[20_000] ^= 1;
        }
        let mut reply = Reply::ranged(asked, &file, "");
        reply.headers.retain(|(name, _)| *name != "etag");
        Some(reply)
    });
    let mut source = source(&server, HttpOptions { kept_bytes: 0, ..options() });
    pollster::block_on(source.size(NAME)).unwrap();
    source.expect(&[(NAME.to_owned(), 40_000..50_000), (NAME.to_owned(), 0..40_000)]);
    read(&mut source, 40_000..50_000).unwrap();
    read(&mut source, 0..16_000).unwrap();
    refused(read(&mut source, 16_000..24_000), "changed on the server");
    assert!(source.distrusted());
}

#[test]
fn a_server_without_ranges_is_read_once_whatever_the_order() {
    let server = FakeServer::new(|_| Some(Reply::whole(&file())));
    let mut source = source(&server, options());
    read_layers(&mut source).unwrap();
    assert_eq!(server.asked.borrow().len(), 1, "the file was asked for more than once");
    // Going back to what was handed out costs a second pass, and is right.
    read(&mut source, 5..9000).unwrap();
    assert_eq!(server.asked.borrow().len(), 2);
}

#[test]
fn a_connection_that_breaks_is_taken_up_where_it_stopped() {
    let broken = Rc::new(Cell::new(0));
    let count = Rc::clone(&broken);
    let server = FakeServer::new(move |asked| {
        let reply = Reply::ranged(asked, &file(), "\"1\"");
        if count.get() == 4 {
            return Some(reply);
        }
        // Three times in the head, once in the stream.
        if count.get() == 3 && asked.range.unwrap().0 == 3000 {
            return Some(reply);
        }
        count.set(count.get() + 1);
        Some(reply.cut(1000))
    });
    let mut source = source(&server, options());
    read_layers(&mut source).unwrap();
    let starts: Vec<_> = server.asked.borrow().iter().map(|asked| asked.range.unwrap().0).collect();
    assert_eq!(starts, [0, 1000, 2000, 3000, 0, 1000]);
    assert_eq!(source.traffic().unwrap().bytes(), BLOCK + 50_001);
}

#[test]
fn a_server_without_ranges_that_breaks_is_read_again_from_the_start() {
    let broken = Cell::new(false);
    let server = FakeServer::new(move |_| {
        Some(if broken.replace(true) { Reply::whole(&file()) } else { Reply::whole(&file()).cut(30_000) })
    });
    read_layers(&mut source(&server, options())).unwrap();
    assert_eq!(server.asked.borrow().len(), 2);
}

#[test]
fn a_connection_that_always_breaks_is_an_error_in_bounded_time() {
    let server = FakeServer::new(|asked| Some(Reply::ranged(asked, &file(), "\"1\"").cut(0)));
    let failure = refused(read(&mut source(&server, options()), 0..10), "the connection broke 6 times");
    assert_eq!(failure.file, NAME);
    assert_eq!(server.asked.borrow().len(), 6, "{:?}", server.asked.borrow());
    let waited: Vec<_> = server.pauses.borrow().iter().map(Duration::as_millis).collect();
    assert_eq!(waited, [250, 500, 1000, 2000, 4000]);
    // A server that says more than it has ends like one that breaks.
    let server = FakeServer::new(|asked| {
        let mut reply = Reply::ranged(asked, &file(), "\"1\"");
        let short = reply.body.len().min(50_000_usize.saturating_sub(asked.range.unwrap().0 as usize));
        reply.body.truncate(short);
        Some(reply)
    });
    refused(read_layers(&mut source(&server, options())), "ended after 50000 of its 50001 bytes");
    // Control: with that byte it is read.
    read_layers(&mut source(&ranged(), options())).unwrap();
}

#[test]
fn web_pages_refusals_and_silence() {
    const HTML: &[u8] = b"\n<!DOCTYPE html><title>Not here</title>";
    for kind in ["text/html; charset=utf-8", "application/octet-stream"] {
        let server = FakeServer::new(move |_| Some(Reply::whole(HTML).with("content-type", kind)));
        for name in [NAME, "config.json"] {
            let mut source = source(&server, options());
            assert_eq!(pollster::block_on(source.size(name)), Ok(None), "a web page was taken for {name}");
            assert_eq!(source.web_pages(), [name]);
            let failure = refused(pollster::block_on(source.read(name, 0..1)), "web page");
            assert!(failure.missing, "{failure:?}");
        }
    }
    for (status, tries, about) in
        [(403, 1, "permission"), (401, 1, "permission"), (500, 6, "later"), (429, 6, "later"), (302, 1, "Expected 200")]
    {
        let server = FakeServer::new(move |_| Some(Reply::status(status)));
        let failure = refused(pollster::block_on(source(&server, options()).size(NAME)), about);
        assert_eq!((failure.status, failure.missing), (Some(status), false));
        assert_eq!(server.asked.borrow().len(), tries, "{status}");
    }
    // Busy once is no failure.
    let busy = Cell::new(true);
    let server = FakeServer::new(move |asked| {
        Some(if busy.replace(false) { Reply::status(503) } else { Reply::ranged(asked, &file(), "x") })
    });
    read_layers(&mut source(&server, options())).unwrap();
    // A server that never answered is not waited for.
    let server = FakeServer::new(|_| None);
    refused(pollster::block_on(source(&server, options()).size(NAME)), "cannot be reached");
    assert_eq!((server.asked.borrow().len(), server.pauses.borrow().len()), (1, 0));
}

#[test]
fn a_file_that_changes_or_comes_in_wrong_pieces_is_refused() {
    let broken = |change: fn(&Asked, Reply) -> Reply| {
        let server = FakeServer::new(move |asked| {
            let reply = Reply::ranged(asked, &file(), "\"1\"");
            let first = asked.range.unwrap().0 == 0;
            let head = asked.range.unwrap().1.is_some();
            Some(if head {
                reply
            } else if first {
                reply.cut(10_000)
            } else {
                change(asked, reply)
            })
        });
        let mut source = source(&server, options());
        let result = read_layers(&mut source);
        (result, source.distrusted())
    };
    let (changed, distrusted) = broken(|_, mut reply| {
        reply.headers.retain(|(name, _)| *name != "etag");
        reply.with("etag", "\"2\"")
    });
    refused(changed, "changed on the server");
    assert!(distrusted);
    let (grown, distrusted) = broken(|asked, mut reply| {
        reply.headers.retain(|(name, _)| *name != "content-range");
        reply.with("content-range", format!("bytes {}-50001/50002", asked.range.unwrap().0))
    });
    refused(grown, "changed on the server");
    assert!(distrusted);
    refused(
        broken(|_, mut reply| {
            reply.headers.retain(|(name, _)| *name != "content-range");
            reply.with("content-range", "bytes 0-40000/50001")
        })
        .0,
        "came from byte 0",
    );
    refused(broken(|_, _| Reply::status(416)).0, "became shorter");
    refused(
        broken(|_, mut reply| {
            reply.body.push(0);
            reply
        })
        .0,
        "more than its 50001 bytes",
    );
    // Control: the same break without any of these.
    broken(|_, reply| reply).0.unwrap();
}

#[test]
fn compressed_text_is_read_compressed_weights_are_refused_an_empty_file_is_empty() {
    // The transport decodes; the length is the compressed one.
    let server = FakeServer::new(|_| {
        let mut reply = Reply::status(200).with("content-encoding", "gzip").with("content-length", "70");
        reply.body = vec![b' '; 20_000];
        Some(reply)
    });
    let mut source_ = source(&server, options());
    assert_eq!(pollster::block_on(source_.size("tokenizer.json")), Ok(Some(20_000)));
    assert_eq!(pollster::block_on(source_.read("tokenizer.json", 19_990..20_000)), Ok(vec![b' '; 10]));
    refused(pollster::block_on(source(&server, options()).size(NAME)), "serve it uncompressed");
    let server = FakeServer::new(|_| Some(Reply::status(416).with("content-range", "bytes */0")));
    let mut source = source(&server, options());
    assert_eq!(pollster::block_on(source.size(NAME)), Ok(Some(0)));
    assert_eq!(pollster::block_on(source.read(NAME, 0..0)), Ok(Vec::new()));
}

/// A hub with one repository whose listing says `sha256` and `size` of the weights.
fn hub(sha256: Hash, size: usize) -> FakeServer {
    FakeServer::new(move |asked| {
        if asked.url == "http://hub.test/api/models/o/m/revision/v1?blobs=true" {
            let listing = format!(
                r#"{{"sha":"c0ffee","siblings":[{{"rfilename":"config.json","size":2}},
                {{"rfilename":"{NAME}","size":{size},"lfs":{{"sha256":"{}"}}}}]}}"#,
                hex(&sha256)
            );
            return Some(Reply::whole(listing.as_bytes()));
        }
        match asked.url.strip_prefix("http://hub.test/o/m/resolve/c0ffee/") {
            Some("config.json") => Some(Reply::whole(b"{}")),
            Some(NAME) => Some(Reply::ranged(asked, &file(), "\"1\"")),
            other => panic!("{other:?} was asked for at {}", asked.url),
        }
    })
}

fn from_hub(server: &FakeServer) -> HttpSource<FakeServer> {
    HttpSource::new(server.clone(), Locator::parse("o/m@v1", None, Some("http://hub.test")).unwrap(), options())
}

#[test]
fn what_a_hub_lists_is_held_against_what_comes() {
    let right = running_hash::hash(&file());
    let server = hub(right, file().len());
    let mut source = from_hub(&server);
    // Known by the listing, without a request.
    assert_eq!(pollster::block_on(source.size(NAME)), Ok(Some(50_001)));
    assert_eq!(pollster::block_on(source.size("tokenizer.json")), Ok(None));
    assert_eq!(server.asked.borrow().len(), 1);
    assert_eq!(pollster::block_on(source.read("config.json", 0..2)), Ok(b"{}".to_vec()));
    pollster::block_on(source.size(NAME)).unwrap();
    source.expect(&[(NAME.to_owned(), 100..20_000)]);
    read(&mut source, 100..20_000).unwrap();
    // Bytes that nobody asked for are hashed too.
    pollster::block_on(source.finish(NAME)).unwrap();
    assert!(!source.distrusted());
    // Control: another hash, and another size.
    let mut wrong = right;
    wrong[31] ^= 1;
    let server = hub(wrong, file().len());
    let mut source = from_hub(&server);
    read(&mut source, 100..20_000).unwrap();
    refused(pollster::block_on(source.finish(NAME)), "SHA-256");
    assert!(source.distrusted());
    for size in [50_000, 50_002] {
        let server = hub(right, size);
        let mut source = from_hub(&server);
        refused(read(&mut source, 0..100), "is listed with");
        assert!(source.distrusted());
    }
}

#[test]
fn a_stream_is_taken_up_with_its_hash_at_any_block() {
    let right = running_hash::hash(&file());
    for mark in [BLOCK, 5 * BLOCK, 12 * BLOCK] {
        let mut first = from_hub(&hub(right, file().len()));
        pollster::block_on(first.size(NAME)).unwrap();
        first.expect(&[(NAME.to_owned(), 0..50_001)]);
        read(&mut first, 0..50_001).unwrap();
        assert_eq!(first.hash_at(NAME, mark - 1), None, "control: only where a block begins");
        let mut first = from_hub(&hub(right, file().len()));
        pollster::block_on(first.size(NAME)).unwrap();
        first.expect(&[(NAME.to_owned(), 0..50_001)]);
        read(&mut first, 0..50_001).unwrap();
        let state = first.hash_at(NAME, mark).expect("the mark has passed");
        for (state, right) in [(state.clone(), true), (RunningHash::default().save(), false)] {
            let server = hub(running_hash::hash(&file()), file().len());
            let mut second = from_hub(&server);
            pollster::block_on(second.take_up(NAME, mark, RunningHash::restore(&state), &[])).unwrap();
            second.expect(&[(NAME.to_owned(), mark..50_001)]);
            read(&mut second, mark..50_001).unwrap();
            {
                let asked = server.asked.borrow();
                assert_eq!(asked.last().unwrap().range, Some((mark, None)), "it went on at its byte");
                assert_eq!(second.traffic().unwrap().bytes() as usize, 50_001 - mark as usize + asked_listing(&asked));
            }
            let finished = pollster::block_on(second.finish(NAME));
            assert_eq!(finished.is_ok(), right, "mark {mark}: {finished:?}");
            // What lies before is there all the same, by range, and is held against its sum.
            if right {
                let own = sum(&file()[..BLOCK as usize]);
                for (known, right) in [(own, true), (own ^ 1, false)] {
                    let mut third = from_hub(&server);
                    let hash = RunningHash::restore(&state);
                    pollster::block_on(third.take_up(NAME, mark, hash, &[(0, known)])).unwrap();
                    read(&mut third, mark - 10..(mark + 10).min(50_001)).unwrap_or_else(|error| assert!(!right, "{error}"));
                    match right {
                        true => read(&mut third, 0..50_001).unwrap(),
                        false => drop(refused(read(&mut third, 0..50_001), "changed on the server")),
                    }
                }
            }
        }
    }
}

/// A caller that writes blocks down, as many as it has room for, and gives them back.
fn lent(kept_bytes: u64, room: usize) -> (u64, usize, u64) {
    let server = ranged();
    let mut source = source(&server, HttpOptions { kept_bytes, ..options() });
    let reads: Vec<_> = [40_000..50_000, 0..40_000].map(|range| (NAME.to_owned(), range)).into();
    pollster::block_on(source.size(NAME)).unwrap();
    source.expect(&reads);
    source.lend(NAME, true);
    let (mut shelf, mut most) = (BTreeMap::new(), 0);
    for (_, range) in &reads {
        let mut at = range.start;
        while at < range.end {
            let until = range.end.min((at / BLOCK + 1) * BLOCK);
            if let Some(bytes) = shelf.remove(&(at / BLOCK)) {
                source.give(NAME, at / BLOCK, bytes);
            }
            while pollster::block_on(source.reach(NAME, at / BLOCK)).unwrap() {
                while let Some((index, bytes)) = source.next_over(NAME) {
                    if shelf.len() < room {
                        assert_eq!(source.written(NAME, index), Some(sum(&bytes)));
                        shelf.insert(index, bytes);
                    }
                }
                most = most.max(source.kept.bytes);
            }
            read(&mut source, at..until).unwrap();
            at = until;
        }
        source.let_go();
    }
    assert_eq!(source.kept.bytes, 0);
    (source.traffic().unwrap().bytes(), server.asked.borrow().len(), most)
}

#[test]
fn what_is_written_down_is_not_asked_for_again() {
    for kept in [0, 3 * BLOCK] {
        let (bytes, asked, most) = lent(kept, usize::MAX);
        assert_eq!((bytes, asked), (BLOCK + 50_001, 2), "the head, and one stream");
        assert!(most <= kept + 4 * BLOCK, "{most} bytes were held");
        // Control: without room for them they come again.
        let (bytes, asked, _) = lent(kept, 2);
        assert!(bytes > 70_000 && asked > 4, "{bytes} bytes by {asked} requests");
    }
    // What is written down goes before what is not.
    let server = ranged();
    let mut source = source(&server, HttpOptions { kept_bytes: 3 * BLOCK, ..options() });
    pollster::block_on(source.size(NAME)).unwrap();
    source.expect(&[(NAME.to_owned(), 0..50_000)]);
    source.lend(NAME, true);
    while source.passed(NAME) < 3 * BLOCK {
        pollster::block_on(source.reach(NAME, 11)).unwrap();
    }
    assert!((0..3).all(|index| source.block(NAME, index).is_some()));
    source.written(NAME, 1);
    while source.passed(NAME) < 4 * BLOCK {
        pollster::block_on(source.reach(NAME, 11)).unwrap();
    }
    let held = |source: &HttpSource<FakeServer>| (0..5).filter(|i| source.block(NAME, *i).is_some()).collect::<Vec<_>>();
    assert_eq!((held(&source), source.next_over(NAME)), (vec![0, 2, 3], None));
    while source.passed(NAME) < 5 * BLOCK {
        pollster::block_on(source.reach(NAME, 11)).unwrap();
    }
    assert_eq!(held(&source), [0, 2, 3]);
    assert_eq!(source.next_over(NAME).map(|(index, _)| index), Some(4));
}

/// Bytes of the listing.
fn asked_listing(asked: &[Asked]) -> usize {
    let right = hex(&running_hash::hash(&file()));
    assert!(asked[0].url.contains("/api/models/"));
    format!(
        r#"{{"sha":"c0ffee","siblings":[{{"rfilename":"config.json","size":2}},
                {{"rfilename":"{NAME}","size":50001,"lfs":{{"sha256":"{right}"}}}}]}}"#
    )
    .len()
}

#[test]
fn by_range_only_what_is_asked_for_travels() {
    let server = ranged();
    let mut source = source(&server, options());
    pollster::block_on(source.by_range(NAME)).unwrap();
    read(&mut source, 20_000..20_100).unwrap();
    pollster::block_on(source.finish(NAME)).unwrap();
    let first = source.traffic().unwrap().bytes();
    assert!(first <= 2 * BLOCK, "{first} bytes travelled");
}

#[test]
fn two_files_may_be_read_in_turns() {
    let server = ranged();
    let mut source = source(&server, options());
    let names = ["a.safetensors", "b.safetensors", "c.safetensors"];
    for name in names {
        pollster::block_on(source.size(name)).unwrap();
    }
    source.expect(&names.map(|name| (name.to_owned(), 0..50_000)));
    server.asked.borrow_mut().clear();
    for at in (0..50_000).step_by(5_000) {
        for name in names {
            let bytes = pollster::block_on(source.read(name, at..at + 5000)).unwrap();
            assert!(bytes == file()[at as usize..at as usize + 5000]);
        }
    }
    // Three take turns on two streams; parked ones go on where they were.
    assert!(server.asked.borrow().iter().all(|asked| asked.range.unwrap().1.is_none()));
}

#[test]
fn what_comes_once_more_is_held_to_its_state() {
    let state = |bytes: u64| {
        let mut hash = RunningHash::default();
        hash.update(&file()[..bytes as usize]);
        hash.save()
    };
    let listing = Listing {
        commit: "c".into(),
        files: [(NAME.to_owned(), Listed { size: Some(50_001), sha256: Some(running_hash::hash(&file())) })].into(),
    };
    for (until, of, right) in
        [(3 * BLOCK, 3 * BLOCK, true), (50_001, 50_001, true), (3 * BLOCK, 2 * BLOCK, false), (50_001, 0, false)]
    {
        let mut source = source(&ranged(), options());
        source.set_listing(listing.clone());
        let taken_up = source.take_up(NAME, BLOCK, RunningHash::restore(&state(BLOCK)), &[]);
        pollster::block_on(taken_up).unwrap();
        source.await_hash(NAME, until, &state(of));
        assert_eq!(source.last_hash(NAME), Some((until, state(of))), "it stays until it has passed");
        let done = pollster::block_on(source.finish(NAME));
        if right {
            done.unwrap();
            assert_eq!(source.last_hash(NAME), Some((50_001, state(50_001))));
        } else {
            assert!(refused(done, "changed on the server").changed);
        }
        assert_eq!(source.distrusted(), !right);
    }
}

#[test]
fn what_was_read_ahead_is_held_to_what_passes() {
    for (flaw, right) in [(None, true), (Some(5_000), true), (Some(100), false), (Some(4_200), false)] {
        let server = FakeServer::new(move |asked| {
            let mut file = file();
            if let (Some(at), Some((_, Some(_)))) = (flaw, asked.range) {
                file[at] ^= 1;
            }
            Some(Reply::ranged(asked, &file, "\"1\""))
        });
        let mut source = source(&server, options());
        for range in [0..8, 8..4_300] {
            pollster::block_on(source.read(NAME, range)).unwrap();
        }
        let reads = [(NAME.to_owned(), 40_000..50_001)];
        source.expect(&reads);
        let done = pollster::block_on(source.read(NAME, 40_000..50_001));
        assert_eq!(done.is_ok(), right, "{flaw:?}: {done:?}");
        if !right {
            assert!(refused(done, "changed on the server").changed);
        }
    }
}
