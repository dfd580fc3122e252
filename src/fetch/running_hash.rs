//! SHA-256 of a file as it passes by, whose state can be laid down with the place it belongs to and taken up later.

use sha2::digest::common::hazmat::SerializableState;
use sha2::{Digest, Sha256};

/// A finished hash.
pub type Hash = [u8; 32];

/// The hash of what has passed so far.
#[derive(Debug, Clone, Default)]
pub struct RunningHash(Sha256);

impl RunningHash {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of all that passed.
    #[must_use]
    pub fn finish(self) -> Hash {
        self.0.finalize().into()
    }

    /// The state, as lower-case hex.
    #[must_use]
    pub fn save(&self) -> String {
        hex(&self.0.serialize())
    }

    /// A state that [`RunningHash::save`] wrote; `None` if it is none.
    #[must_use]
    pub fn restore(saved: &str) -> Option<Self> {
        let bytes = unhex(saved)?;
        let state = bytes.as_slice().try_into().ok()?;
        Sha256::deserialize(state).ok().map(Self)
    }
}

/// The hash of `bytes`.
#[must_use]
pub fn hash(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// Lower-case hex.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The bytes of hex digits; `None` for anything else.
#[must_use]
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect::<Option<_>>().filter(|_| rest.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_sha256_and_can_be_taken_up_anywhere() {
        let bytes: Vec<u8> = (0..1000_u32).map(|i| (i * 7) as u8).collect();
        let whole = hash(&bytes);
        assert_eq!(hex(&hash(b"abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        for cut in [0, 1, 55, 64, 100, 128, 999, 1000] {
            let mut first = RunningHash::default();
            first.update(&bytes[..cut]);
            let mut second = RunningHash::restore(&first.save()).expect("a state");
            second.update(&bytes[cut..]);
            assert_eq!(second.finish(), whole, "cut at {cut}");
            // Control: a state from another place is another hash.
            let mut other = RunningHash::restore(&first.save()).expect("a state");
            other.update(&bytes[(cut + 1).min(1000)..]);
            assert_eq!(other.finish() == whole, cut == 1000);
        }
    }

    #[test]
    fn refuses_what_is_no_state() {
        let saved = RunningHash::default().save();
        for bad in ["", "00", "zz", &saved[1..], &format!("{saved}00"), &saved.replace('0', "x")] {
            assert!(RunningHash::restore(bad).is_none(), "{bad}");
        }
        assert_eq!(unhex("0aFF"), Some(vec![10, 255]));
        assert_eq!(unhex("0"), None);
    }
}
