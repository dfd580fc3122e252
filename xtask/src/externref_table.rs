//! Repairs what Debian's binaryen 108 breaks: it writes every exported table as table 0. wasm-bindgen's modules have two,
//! functions and JavaScript values, and export the second; with the first in its place they do not even start.

use wasmparser::{BinaryReaderError, ExternalKind, Parser, Payload, RefType};

/// Name under which wasm-bindgen exports the table of JavaScript values.
const EXPORT: &str = "__wbindgen_externrefs";

/// What stands in the way of the repair.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// The module cannot be read.
    #[error("the module cannot be read: {0}")]
    Malformed(#[from] BinaryReaderError),
    /// The module exports the table and has not exactly one that could be meant, or the index is not a single byte.
    #[error("the table exported as {EXPORT} cannot be told: {0}")]
    Ambiguous(String),
}

/// Points the export at the module's one table of JavaScript values. Returns whether anything had to be changed.
///
/// # Errors
/// [`RepairError`]; the module is then as it was.
pub fn restore(module: &mut [u8]) -> Result<bool, RepairError> {
    let mut tables = Vec::new();
    let mut exported = None;
    for payload in Parser::new(0).parse_all(module) {
        match payload? {
            // Imported tables would come first in the numbering; wasm-bindgen imports none.
            Payload::TableSection(section) => {
                for (index, table) in section.into_iter().enumerate() {
                    if table?.ty.element_type == RefType::EXTERNREF {
                        tables.push(index);
                    }
                }
            }
            Payload::ExportSection(section) => {
                let end = section.range().end;
                let items = section.into_iter_with_offsets().collect::<Result<Vec<_>, _>>()?;
                for (i, (_, export)) in items.iter().enumerate() {
                    if export.kind == ExternalKind::Table && export.name == EXPORT {
                        // An item ends with its index, so that is the byte before the next item.
                        exported = Some(items.get(i + 1).map_or(end, |(offset, _)| *offset) - 1);
                    }
                }
            }
            _ => {}
        }
    }
    let Some(at) = exported else { return Ok(false) };
    let index = match tables.as_slice() {
        [one] => u8::try_from(*one).ok().filter(|index| *index < 0x80),
        _ => None,
    };
    let index = index.ok_or_else(|| RepairError::Ambiguous(format!("tables of JavaScript values: {tables:?}")))?;
    match module.get_mut(at) {
        // A byte of a longer number would have its high bit set, or one before it would.
        Some(byte) if *byte < 0x80 => Ok(std::mem::replace(byte, index) != index),
        _ => Err(RepairError::Ambiguous("its index has several bytes".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables of functions and of JavaScript values, the latter exported as table `index`.
    fn module(index: u8) -> Vec<u8> {
        let mut bytes = b"\0asm\x01\0\0\0".to_vec();
        bytes.extend([4, 7, 2, 0x70, 0, 1, 0x6f, 0, 1]);
        let name = EXPORT.as_bytes();
        bytes.extend([7, name.len() as u8 + 4 + 4, 2, name.len() as u8]);
        bytes.extend(name);
        bytes.extend([1, index, 1, b'f', 1, 0]);
        bytes
    }

    #[test]
    fn the_table_of_values_is_exported_again() {
        let mut broken = module(0);
        assert!(restore(&mut broken).unwrap());
        assert_eq!(broken, module(1));
        assert!(!restore(&mut broken).unwrap(), "a sound module is left alone");
    }

    #[test]
    fn what_cannot_be_repaired_is_refused() {
        let mut none = b"\0asm\x01\0\0\0".to_vec();
        assert!(!restore(&mut none).unwrap());
        let mut two = module(0);
        two[11] = 0x6f; // both tables hold values
        assert!(matches!(restore(&mut two), Err(RepairError::Ambiguous(_))));
        let whole = module(0);
        assert!(matches!(restore(&mut whole[..20].to_vec()), Err(RepairError::Malformed(_))));
    }
}
