//! What a caller named -> where its files are: a repository on a Hugging Face hub, or a folder at any address.

use std::collections::BTreeMap;

use super::running_hash::{Hash, unhex};
use crate::error::{Error, Result};
use crate::model::fields::{Fields, parse_object};

/// The hub that repository ids mean unless the caller names another.
pub const HUB_ENDPOINT: &str = "https://huggingface.co";
/// The revision that is meant if none is named.
const DEFAULT_REVISION: &str = "main";

/// Where a checkpoint is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Locator {
    /// A repository of a hub.
    Hub {
        /// The hub's address, without a slash at its end.
        endpoint: String,
        /// `owner/name`.
        repo: String,
        /// A branch, tag or commit.
        revision: String,
    },
    /// A folder, its address ending in a slash.
    Url(String),
}

/// Whether `text` is a repository id, `owner/name` or `owner/name@revision`. Relative folders begin with `./` or `../`.
#[must_use]
pub fn is_repo_id(text: &str) -> bool {
    let (id, revision) = text.split_once('@').map_or((text, None), |(id, revision)| (id, Some(revision)));
    let word = |part: &str| {
        part.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'.' | b'-')) && part.bytes().any(|c| c != b'.')
    };
    revision.is_none_or(is_revision) && id.split_once('/').is_some_and(|(owner, name)| word(owner) && word(name))
}

fn is_revision(text: &str) -> bool {
    !text.is_empty() && text.len() <= 200 && text.bytes().all(|c| c.is_ascii_graphic() && !matches!(c, b'?' | b'#' | b'\\'))
}

impl Locator {
    /// From an address (`scheme://...`) or a repository id. `revision` and `hub` only say something about the latter; `hub`
    /// defaults to [`HUB_ENDPOINT`].
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for anything else, for a revision given twice, and for addresses with a query or fragment.
    pub fn parse(location: &str, revision: Option<&str>, hub: Option<&str>) -> Result<Self> {
        let refuse = |what: String| Err(Error::InvalidOption(what));
        if let Some((scheme, rest)) = location.split_once("://") {
            let scheme = scheme.to_ascii_lowercase();
            check_credentials(rest)?;
            if !matches!(scheme.as_str(), "http" | "https") || rest.is_empty() || location.contains(char::is_whitespace) {
                return refuse(format!("{location}: not an address of http or https"));
            }
            if location.contains(['?', '#']) {
                return refuse(format!("{location}: the address of a model's folder has no query and no fragment"));
            }
            if let Some(revision) = revision {
                return refuse(format!(
                    "revision {revision} was given with the address {location}; only repositories have revisions"
                ));
            }
            let slash = if location.ends_with('/') { "" } else { "/" };
            return Ok(Self::Url(format!("{scheme}://{rest}{slash}")));
        }
        if !is_repo_id(location) {
            return refuse(format!(
                "\"{location}\" is neither an address (https://...) nor a repository id (owner/name or owner/name@revision)"
            ));
        }
        let (repo, named) = location.split_once('@').map_or((location, None), |(repo, named)| (repo, Some(named)));
        let revision = match (named, revision) {
            (Some(a), Some(b)) if a != b => return refuse(format!("two revisions were given for {repo}: {a} and {b}")),
            (a, b) => a.or(b).unwrap_or(DEFAULT_REVISION),
        };
        if !is_revision(revision) {
            return refuse(format!("\"{revision}\" is not the name of a branch, tag or commit"));
        }
        let endpoint = hub.unwrap_or(HUB_ENDPOINT).trim_end_matches('/');
        let (scheme, rest) = endpoint.split_once("://").unwrap_or_default();
        let scheme = scheme.to_ascii_lowercase();
        check_credentials(rest)?;
        if !matches!(scheme.as_str(), "http" | "https") || rest.is_empty() {
            return refuse(format!("\"{endpoint}\" is not a hub's address; expected one like {HUB_ENDPOINT}"));
        }
        Ok(Self::Hub { endpoint: format!("{scheme}://{rest}"), repo: repo.to_owned(), revision: revision.to_owned() })
    }

    /// The source without its revision, as people write it and the store lists it.
    #[must_use]
    pub fn source(&self) -> String {
        match self {
            Self::Hub { endpoint, repo, .. } if endpoint == HUB_ENDPOINT => repo.clone(),
            Self::Hub { endpoint, repo, .. } => format!("{endpoint}/{repo}"),
            Self::Url(base) => base.clone(),
        }
    }

    /// Where a hub lists the files of the revision.
    #[must_use]
    pub fn listing_url(&self) -> Option<String> {
        match self {
            Self::Hub { endpoint, repo, revision } => {
                Some(format!("{endpoint}/api/models/{repo}/revision/{}?blobs=true", escape(revision, false)))
            }
            Self::Url(_) => None,
        }
    }

    /// Where `file` is. `commit` pins the revision of a repository.
    #[must_use]
    pub fn file_url(&self, file: &str, commit: Option<&str>) -> String {
        match self {
            Self::Hub { endpoint, repo, revision } => {
                format!("{endpoint}/{repo}/resolve/{}/{}", escape(commit.unwrap_or(revision), false), escape(file, true))
            }
            Self::Url(base) => format!("{base}{}", escape(file, true)),
        }
    }
}

/// Refuses a name and password before the host; the message repeats neither.
fn check_credentials(rest: &str) -> Result<()> {
    let (_, host) = match rest.split(['/', '?', '#']).next().unwrap_or_default().rsplit_once('@') {
        Some(found) => found,
        None => return Ok(()),
    };
    Err(Error::InvalidOption(format!(
        "the address of {host} has a name or password in it, which would be sent and stored with it; leave them out and pass a header \
         such as `Authorization` instead"
    )))
}

/// Escapes what has a meaning in addresses; slashes too unless they are kept.
fn escape(text: &str, keep_slashes: bool) -> String {
    use std::fmt::Write;
    text.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b'/' if keep_slashes => out.push('/'),
            b'-' | b'.' | b'_' | b'~' => out.push(byte as char),
            byte if byte.is_ascii_alphanumeric() => out.push(byte as char),
            // Writing to a String cannot fail.
            byte => drop(write!(out, "%{byte:02X}")),
        }
        out
    })
}

/// What a hub says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Listed {
    /// Bytes, where it says.
    pub size: Option<u64>,
    /// SHA-256, which it knows of large files.
    pub sha256: Option<Hash>,
}

/// A hub's listing of a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The commit that the revision is.
    pub commit: String,
    /// Files by name.
    pub files: BTreeMap<String, Listed>,
}

impl Listing {
    /// Reads the hub's answer. `name` is the repository's, for messages.
    ///
    /// # Errors
    /// [`Error::Fetch`] if it is not what a hub answers.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self> {
        let name = format!("{name}: the hub's file listing");
        let bad = |error: Error| Error::Fetch(format!("{error}; is the hub's address right?"));
        let map = parse_object(&name, bytes).map_err(bad)?;
        let fields = Fields::new(&name, &map);
        let commit = fields.text("sha").map_err(bad)?.filter(|c| is_revision(c));
        let commit = commit.ok_or_else(|| bad(fields.wrong("sha", "a commit's hash")))?.to_owned();
        let siblings = map.get("siblings").and_then(serde_json::Value::as_array);
        let siblings = siblings.ok_or_else(|| bad(fields.wrong("siblings", "a list of files")))?;
        let mut files = BTreeMap::new();
        for sibling in siblings {
            let Some(file) = sibling.get("rfilename").and_then(serde_json::Value::as_str) else {
                return Err(bad(fields.wrong("siblings", "a list of files, each with `rfilename`")));
            };
            let lfs = sibling.get("lfs");
            let sha256 = lfs.and_then(|lfs| lfs.get("sha256")).and_then(serde_json::Value::as_str);
            let sha256 = sha256.and_then(unhex).and_then(|bytes| bytes.try_into().ok());
            let size = sibling.get("size").or_else(|| lfs.and_then(|lfs| lfs.get("size")));
            files.insert(file.to_owned(), Listed { size: size.and_then(serde_json::Value::as_u64), sha256 });
        }
        Ok(Self { commit, files })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_ids_are_told_from_addresses_and_folders() {
        for id in ["a/b", "HuggingFaceTB/SmolLM2-135M", "x_y/a.b-c", "a/b@main", "a/b@refs/pr/1", "a.b/..c"] {
            assert!(is_repo_id(id), "{id}");
        }
        for other in
            ["a", "a/", "/a", "./a", "../a", "a/..", "a/b/c", "a/b@", "a b/c", "https://a/b", "a\\b", "", "a/b@x y", "é/b"]
        {
            assert!(!is_repo_id(other), "{other}");
        }
    }

    #[test]
    fn addresses() {
        let hub = Locator::parse("nvidia/Some-3B@refs/pr/1", None, None).unwrap();
        assert_eq!(
            hub.listing_url().unwrap(),
            "https://huggingface.co/api/models/nvidia/Some-3B/revision/refs%2Fpr%2F1?blobs=true"
        );
        assert_eq!(hub.file_url("a b/c.json", None), "https://huggingface.co/nvidia/Some-3B/resolve/refs%2Fpr%2F1/a%20b/c.json");
        assert_eq!(hub.file_url("c.json", Some("12ab")), "https://huggingface.co/nvidia/Some-3B/resolve/12ab/c.json");
        assert_eq!(hub.source(), "nvidia/Some-3B");
        let other = Locator::parse("a/b", Some("v1"), Some("http://127.0.0.1:9/")).unwrap();
        assert_eq!(other.file_url("c", None), "http://127.0.0.1:9/a/b/resolve/v1/c");
        assert_eq!(other.source(), "http://127.0.0.1:9/a/b");
        let url = Locator::parse("https://x.org/m", None, Some("unused")).unwrap();
        assert_eq!(url.file_url("d/e.json", Some("ignored")), "https://x.org/m/d/e.json");
        assert_eq!((url.listing_url(), url.source().as_str()), (None, "https://x.org/m/"));
        assert_eq!(Locator::parse("HTTPS://x.org/M", None, None).unwrap(), Locator::Url("https://x.org/M/".into()));
        let hub = Locator::parse("a/b", None, Some("HTTP://127.0.0.1:9")).unwrap();
        assert_eq!(hub.source(), "http://127.0.0.1:9/a/b");
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let refused = |location: &str, revision, hub, about: &str| {
            let error = Locator::parse(location, revision, hub).unwrap_err();
            assert!(matches!(&error, Error::InvalidOption(text) if text.contains(about)), "{error}");
        };
        refused("nowhere", None, None, "nowhere");
        for address in ["https://user:secret@x.org/m", "HTTPS://secret@x.org", "http://a@b:secret@x.org/m"] {
            refused(address, None, None, "header");
            refused("a/b", None, Some(address), "header");
            let error = Locator::parse(address, None, None).unwrap_err().to_string();
            assert!(error.contains("x.org") && !error.contains("secret"), "{error}");
        }
        // Control: behind the host it is a name like any other.
        assert!(Locator::parse("https://x.org/m@v1/", None, None).is_ok());
        refused("ftp://a/b", None, None, "ftp");
        refused("https://", None, None, "https://");
        refused("https://a/b?c", None, None, "query");
        refused("https://a/b/", Some("main"), None, "revision");
        refused("a/b@v1", Some("v2"), None, "v1 and v2");
        refused("a/b", Some(""), None, "branch");
        refused("a/b", None, Some("huggingface.co"), "hub's address");
    }

    /// The page compares origins before a request is made, so it knows the hub's address too.
    #[test]
    fn the_page_knows_the_same_hub() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/pkg/src/options.ts");
        let page = std::fs::read_to_string(path).unwrap();
        assert!(page.contains(&format!("const HUB_ORIGIN = '{HUB_ENDPOINT}';")), "{HUB_ENDPOINT} is not what {path} has");
    }

    #[test]
    fn listings() {
        let sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let text = format!(
            r#"{{"sha": "c0ffee", "siblings": [{{"rfilename": "config.json", "size": 12}}, {{"rfilename": "a/b"}},
            {{"rfilename": "m.safetensors", "size": 7, "lfs": {{"sha256": "{sha}", "size": 7}}}}]}}"#
        );
        let listing = Listing::parse("a/b", text.as_bytes()).unwrap();
        assert_eq!((listing.commit.as_str(), listing.files.len()), ("c0ffee", 3));
        assert_eq!(listing.files["config.json"], Listed { size: Some(12), sha256: None });
        assert_eq!(listing.files["m.safetensors"].sha256.unwrap()[..2], [0xba, 0x78]);
        for bad in ["", "[]", "{}", r#"{"sha": "a"}"#, r#"{"sha": "", "siblings": []}"#, r#"{"sha": "a", "siblings": [{}]}"#] {
            let error = Listing::parse("a/b", bad.as_bytes()).unwrap_err();
            assert!(matches!(&error, Error::Fetch(text) if text.contains("listing")), "{error}");
        }
    }
}
