//! Every kernel that can be compiled: its file, settings and bindings. One list, validated and reflected by tests.

use super::matmul;
use super::shader::{self, Header, Setting, Value};
use crate::error::Result;
use crate::weights::packed::{Format, ScaleFormat};

/// How a kernel uses a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// A storage buffer that is read.
    Read,
    /// A storage buffer that is written, and perhaps read.
    Write,
    /// A uniform buffer.
    Uniform,
}

/// A kernel ready to be linked. Two with the same settings are the same pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// Path under `shaders/`.
    pub file: &'static str,
    /// What differs from the file's defaults.
    pub settings: Vec<Setting>,
    /// Bindings of group 0.
    pub bindings: Vec<(u32, Access)>,
    /// Threads of a workgroup.
    pub invocations: u32,
    /// Whether it uses the f16 type.
    pub f16: bool,
    /// Whether it uses subgroup operations.
    pub subgroups: bool,
}

impl Kernel {
    /// Its WGSL.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] if file and settings do not fit.
    pub fn source(&self, header: Header) -> Result<String> {
        shader::link(self.file, &self.settings, header, &file)
    }

    /// Tells kernels apart.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{} {:?}", self.file, self.settings)
    }
}

/// How K and V are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvStorage {
    /// IEEE single.
    F32,
    /// IEEE half, through the `shader-f16` feature.
    F16,
    /// IEEE half, packed in pairs by built-ins every device has.
    Pack16,
}

impl KvStorage {
    /// Bytes of one value.
    #[must_use]
    pub fn bytes(self) -> u64 {
        if self == Self::F32 { 4 } else { 2 }
    }

    fn setting(self) -> Setting {
        let file = match self {
            Self::F32 => "shared/kv_f32.wgsl",
            Self::F16 => "shared/kv_f16.wgsl",
            Self::Pack16 => "shared/kv_pack16.wgsl",
        };
        ("kv", Value::Text(file))
    }
}

fn reduce(subgroups: bool) -> Setting {
    let file = if subgroups { "shared/reduce_subgroup.wgsl" } else { "shared/reduce_workgroup.wgsl" };
    ("reduce", Value::Text(file))
}

fn numbered(accesses: &[Access]) -> Vec<(u32, Access)> {
    (0..).zip(accesses.iter().copied()).collect()
}

use Access::{Read, Uniform, Write};

/// Gathers embeddings from a table in `format`; its group does not matter.
#[must_use]
pub fn embed(format: Format) -> Kernel {
    let weights = match format {
        Format::Affine { bits: 4, .. } => "shared/weights_q4.wgsl",
        Format::Affine { .. } => "shared/weights_q8.wgsl",
        Format::F16 => "shared/weights_f16.wgsl",
        Format::F32 => "shared/weights_f32.wgsl",
    };
    let scale = match format {
        Format::Affine { scale: ScaleFormat::Bf16, .. } => "shared/scale_bf16.wgsl",
        _ => "shared/scale_f16.wgsl",
    };
    Kernel {
        file: "embed.wgsl",
        settings: vec![("weights", Value::Text(weights)), ("scale", Value::Text(scale))],
        bindings: numbered(&[Read, Read, Read, Read, Write, Write, Uniform]),
        invocations: 64,
        f16: false,
        subgroups: false,
    }
}

/// Rotates queries and keys, writes K and V.
#[must_use]
pub fn rope_kv(kv: KvStorage, subgroups: bool) -> Kernel {
    Kernel {
        file: "rope_kv.wgsl",
        settings: vec![kv.setting(), reduce(subgroups)],
        bindings: numbered(&[Write, Write, Read, Read, Read, Uniform]),
        invocations: 64,
        f16: kv == KvStorage::F16,
        subgroups,
    }
}

/// Attention of workgroups of `rows` rows and `heads` query heads, with heads of `units` times four dimensions (rounded up).
/// `share`: the subgroup size, where neighbours hand each other what they read; it divides `units`.
#[must_use]
pub fn attention(kv: KvStorage, share: Option<u32>, rows: u32, heads: u32, units: u32) -> Kernel {
    let mut settings = vec![kv.setting(), ("ROWS", Value::U32(rows)), ("HEADS", Value::U32(heads)), ("UNITS", Value::U32(units))];
    if let Some(lanes) = share {
        settings.extend([("lanes", Value::Text("shared/lanes_share.wgsl")), ("SHARE", Value::U32(lanes))]);
    }
    Kernel {
        file: "attention.wgsl",
        settings,
        bindings: numbered(&[Read, Read, Write, Read, Uniform, Write]),
        invocations: 64,
        f16: kv == KvStorage::F16,
        subgroups: share.is_some(),
    }
}

/// Merges the parts of attention that was split along the cache.
#[must_use]
pub fn attention_merge() -> Kernel {
    Kernel {
        file: "attention_merge.wgsl",
        settings: Vec::new(),
        bindings: numbered(&[Read, Write, Read, Uniform]),
        invocations: 64,
        f16: false,
        subgroups: false,
    }
}

/// First pass of the choice of tokens.
#[must_use]
pub fn argmax(subgroups: bool) -> Kernel {
    Kernel {
        file: "argmax.wgsl",
        settings: vec![reduce(subgroups)],
        bindings: numbered(&[Read, Write, Uniform]),
        invocations: 64,
        f16: false,
        subgroups,
    }
}

/// Second pass of the choice of tokens.
#[must_use]
pub fn argmax_merge(subgroups: bool) -> Kernel {
    Kernel { file: "argmax_merge.wgsl", ..argmax(subgroups) }
}

/// A matrix product.
#[must_use]
pub fn product(variant: &matmul::Variant) -> Kernel {
    let access = |binding: &matmul::Binding| {
        use matmul::Binding as B;
        let access = match binding {
            B::Params | B::Call => Uniform,
            B::Weights | B::Scales | B::Input | B::NormInput | B::Vectors | B::LoraB | B::Lora => Read,
            B::Output | B::Hidden => Write,
        };
        (*binding as u32, access)
    };
    Kernel {
        file: variant.file(),
        settings: variant.settings(),
        bindings: variant.bindings().iter().map(access).collect(),
        invocations: variant.tile.invocations(),
        f16: false,
        subgroups: variant.tile.share.is_some(),
    }
}

/// A shader's text without indentation and without lines that are comments to the linker too, as long as `N` has room, and
/// how long it is: what is embedded crosses a network before a page's first token.
const fn lean<const N: usize>(text: &str) -> ([u8; N], usize) {
    const fn begins(text: &[u8], at: usize, with: &[u8]) -> bool {
        let mut i = 0;
        while i < with.len() {
            if at + i >= text.len() || text[at + i] != with[i] {
                return false;
            }
            i += 1;
        }
        true
    }
    let text = text.as_bytes();
    let (mut out, mut length, mut at) = ([0; N], 0, 0);
    while at < text.len() {
        while at < text.len() && text[at] == b' ' {
            at += 1;
        }
        let comment = begins(text, at, b"//") && !begins(text, at, b"// include ");
        while at < text.len() {
            let byte = text[at];
            if !comment {
                if length < N {
                    out[length] = byte;
                }
                length += 1;
            }
            at += 1;
            if byte == b'\n' {
                break;
            }
        }
    }
    (out, length)
}

macro_rules! files {
    ($($path:literal),* $(,)?) => {
        /// The text of a file under `shaders/`.
        fn file(path: &str) -> Option<&'static str> {
            match path {
                $($path => {
                    const TEXT: &str = include_str!(concat!("../../shaders/", $path));
                    const LENGTH: usize = lean::<0>(TEXT).1;
                    const LEAN: [u8; LENGTH] = lean::<LENGTH>(TEXT).0;
                    std::str::from_utf8(&LEAN).ok()
                })*
                _ => None,
            }
        }
    };
}

files!(
    "argmax.wgsl",
    "argmax_merge.wgsl",
    "attention.wgsl",
    "attention_merge.wgsl",
    "embed.wgsl",
    "matmul.wgsl",
    "matmul_prefill.wgsl",
    "matmul/bias_add.wgsl",
    "matmul/bias_none.wgsl",
    "matmul/common.wgsl",
    "matmul/inputs_direct.wgsl",
    "matmul/inputs_shuffle.wgsl",
    "matmul/lora_f16.wgsl",
    "matmul/lora_f32.wgsl",
    "matmul/lora_none.wgsl",
    "matmul/norm_none.wgsl",
    "matmul/norm_rms.wgsl",
    "matmul/output_residual.wgsl",
    "matmul/output_store.wgsl",
    "matmul/output_swiglu.wgsl",
    "matmul/scales_affine.wgsl",
    "matmul/scales_none.wgsl",
    "rope_kv.wgsl",
    "shared/attention.wgsl",
    "shared/call.wgsl",
    "shared/kv_f16.wgsl",
    "shared/kv_f32.wgsl",
    "shared/kv_pack16.wgsl",
    "shared/lanes_alone.wgsl",
    "shared/lanes_share.wgsl",
    "shared/reduce_subgroup.wgsl",
    "shared/reduce_workgroup.wgsl",
    "shared/scale_bf16.wgsl",
    "shared/scale_f16.wgsl",
    "shared/vectors.wgsl",
    "shared/weights_f16.wgsl",
    "shared/weights_f32.wgsl",
    "shared/weights_q4.wgsl",
    "shared/weights_q8.wgsl",
);

/// Every kind of kernel there is, for validation by shader compilers: all files and switches, sizes by example.
#[must_use]
pub fn all() -> Vec<Kernel> {
    let affine = |bits, scale| Format::Affine { bits, group: 32, scale };
    let formats = [
        affine(4, ScaleFormat::F16),
        affine(4, ScaleFormat::Bf16),
        affine(8, ScaleFormat::F16),
        affine(8, ScaleFormat::Bf16),
        Format::F16,
        Format::F32,
    ];
    let mut list: Vec<Kernel> = formats.iter().map(|&f| embed(f)).collect();
    for subgroups in [false, true] {
        for kv in [KvStorage::F32, KvStorage::F16, KvStorage::Pack16] {
            list.push(rope_kv(kv, subgroups));
            let share = subgroups.then_some(8);
            let shapes = [(8, 1, 16), (4, 3, 16), (1, 8, 32), (2, 4, 64)];
            list.extend(shapes.map(|(rows, heads, units)| attention(kv, share, rows, heads, units)));
            list.push(attention(kv, None, 3, 4, 5));
        }
        list.extend([argmax(subgroups), argmax_merge(subgroups), attention_merge()]);
    }
    list.extend(matmul::examples(&formats).iter().filter(|v| v.tile.rows <= 2 || v.tile.staged).map(product));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kernel: &Kernel, module: &naga::Module) -> Result<(), String> {
        let mut found = Vec::new();
        for (_, variable) in module.global_variables.iter() {
            let Some(binding) = &variable.binding else { continue };
            let access = match variable.space {
                naga::AddressSpace::Uniform => Access::Uniform,
                naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE) => Access::Write,
                naga::AddressSpace::Storage { .. } => Access::Read,
                other => return Err(format!("{other:?}")),
            };
            found.push((binding.binding, access));
        }
        found.sort_by_key(|(binding, _)| *binding);
        let mut bound = kernel.bindings.clone();
        bound.sort_by_key(|(binding, _)| *binding);
        if bound != found {
            return Err(format!("{bound:?} is bound, the shader has {found:?}"));
        }
        let storage = kernel.bindings.iter().filter(|(_, access)| *access != Access::Uniform).count();
        if storage > 8 {
            return Err(format!("{storage} storage buffers, and 8 is what every device has"));
        }
        let size = module.entry_points[0].workgroup_size;
        if size != [kernel.invocations, 1, 1] {
            return Err(format!("workgroup size {size:?}, {} expected", kernel.invocations));
        }
        Ok(())
    }

    #[test]
    fn embedded_text_is_what_the_linker_reads() {
        const TEXT: &str = "// what\n// include a.wgsl as b\n  //\n    let x = 1; // unroll\n\n}";
        const LENGTH: usize = lean::<0>(TEXT).1;
        let lean = lean::<LENGTH>(TEXT).0;
        assert_eq!(std::str::from_utf8(&lean).unwrap(), "// include a.wgsl as b\nlet x = 1; // unroll\n\n}");
        for kernel in all() {
            let path = |path: &str| -> Option<&'static str> {
                let text = std::fs::read_to_string(format!("{}/shaders/{path}", env!("CARGO_MANIFEST_DIR"))).ok()?;
                Some(Box::leak(text.into_boxed_str()))
            };
            let lines = |text: String| text.lines().map(|l| l.trim().to_owned()).collect::<Vec<_>>();
            let header = Header { f16: kernel.f16, subgroups: true };
            let whole = shader::link(kernel.file, &kernel.settings, header, &path).unwrap();
            assert_eq!(lines(kernel.source(header).unwrap()), lines(whole), "{}", kernel.key());
        }
    }

    #[test]
    fn every_variant_is_valid_wgsl_and_matches_its_bindings() {
        let capabilities = naga::valid::Capabilities::all();
        let kernels = all();
        for kernel in &kernels {
            let text = kernel.source(Header { f16: kernel.f16, subgroups: false }).unwrap();
            let module =
                naga::front::wgsl::parse_str(&text).unwrap_or_else(|e| panic!("{}: {}", kernel.key(), e.emit_to_string(&text)));
            naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities)
                .validate(&module)
                .unwrap_or_else(|e| panic!("{}: {}", kernel.key(), e.emit_to_string(&text)));
            check(kernel, &module).unwrap_or_else(|e| panic!("{}: {e}", kernel.key()));
            // Controls: another binding, access or workgroup size is noticed.
            let mut other = kernel.clone();
            other.bindings.push((31, Access::Read));
            assert!(check(&other, &module).is_err());
            other = kernel.clone();
            other.bindings[0].1 = if other.bindings[0].1 == Access::Uniform { Access::Read } else { Access::Uniform };
            assert!(check(&other, &module).is_err());
            other = kernel.clone();
            other.invocations += 1;
            assert!(check(&other, &module).is_err());
        }
        for used in kernels.iter().map(|k| k.file) {
            assert!(file(used).is_some());
        }
    }
}
