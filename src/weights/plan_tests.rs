use std::collections::BTreeMap;

use super::*;
use crate::weights::packed::PackedRows;
use crate::weights::quantization::AffineParams;

fn tensor(stored: Stored, origin_k: usize) -> Tensor {
    let at = (0, 0);
    Tensor { name: "w".into(), stored, rows: 8, k: origin_k, factor: 1.0, values: at, scales: at, biases: at }
}

fn affine(bits: u32, group: usize, scale: Float) -> Stored {
    Stored::Affine { bits, group, scale }
}

fn format(stored: &[Stored], role: Role, plain: PlainFormat) -> Format {
    let tensors: Vec<_> = stored.iter().map(|s| tensor(*s, 128)).collect();
    common_format(tensors.iter(), role, plain)
}

#[test]
fn one_format_keeps_all_tensors_of_a_matrix() {
    let kept = |bits, group, scale| Format::Affine { bits, group, scale };
    let [f32, f16, bf16] = [Float::F32, Float::F16, Float::Bf16].map(Stored::Plain);
    let auto = |stored: &[Stored]| format(stored, Role::Linear, PlainFormat::Auto);
    assert_eq!(auto(&[affine(4, 64, Float::F16), affine(8, 32, Float::F16)]), kept(8, 32, ScaleFormat::F16));
    assert_eq!(auto(&[affine(8, 64, Float::Bf16), affine(4, 128, Float::Bf16)]), kept(8, 64, ScaleFormat::Bf16));
    assert_eq!(auto(&[affine(4, 64, Float::F16), affine(4, 64, Float::Bf16)]), Format::F32);
    assert_eq!(auto(&[affine(4, 64, Float::F32)]), Format::F32);
    assert_eq!(auto(&[affine(4, 64, Float::F16), f16]), Format::F16);
    assert_eq!(auto(&[affine(4, 64, Float::F16), f32]), Format::F32);
    assert_eq!(auto(&[f16, f32]), Format::F32);
    assert_eq!(
        [auto(&[f32]), auto(&[f16]), auto(&[bf16]), auto(&[bf16, f16])],
        [Format::F32, Format::F16, Format::F16, Format::F16]
    );
}

#[test]
fn the_option_is_for_plain_tensors_and_never_quantises_lora() {
    let q4 = PlainFormat::Affine { bits: 4, group: 64 };
    let f32 = Stored::Plain(Float::F32);
    let made = |bits| Format::Affine { bits, group: 64, scale: ScaleFormat::F16 };
    assert_eq!(format(&[f32], Role::Linear, q4), made(4));
    assert_eq!([format(&[f32], Role::Embedding, q4), format(&[f32], Role::Head, q4)], [made(8), made(8)]);
    assert_eq!(format(&[f32], Role::Lora, q4), Format::F32);
    let kept = Format::Affine { bits: 8, group: 128, scale: ScaleFormat::Bf16 };
    for plain in [PlainFormat::F32, PlainFormat::F16, q4, PlainFormat::Auto] {
        assert_eq!(format(&[affine(8, 128, Float::Bf16)], Role::Linear, plain), kept);
    }
    assert_eq!(format(&[f32], Role::Linear, PlainFormat::F16), Format::F16);
    assert_eq!(format(&[Stored::Plain(Float::Bf16)], Role::Linear, PlainFormat::F32), Format::F32);
}

#[test]
fn nearby_ranges_are_read_as_one() {
    let reads = merged(vec![(1, 50..60), (0, 100..200), (0, 0..50), (0, 200..300), (0, 10_000..10_001)]);
    assert_eq!(reads, [(0, 0..300), (0, 10_000..10_001), (1, 50..60)]);
    let batch = Batch { origin: Origin::Base, reads, jobs: Vec::new() };
    let bytes = [(0..=255).cycle().take(300).collect::<Vec<u8>>(), vec![7], vec![9; 10]];
    assert_eq!(batch.bytes(&bytes, &(0, 100..103)).unwrap(), [100, 101, 102]);
    assert_eq!(batch.bytes(&bytes, &(1, 59..60)).unwrap(), [9]);
    for (file, range) in [(0, 299..301), (0, 9_999..10_001), (1, 40..55), (2, 0..1)] {
        assert!(matches!(batch.bytes(&bytes, &(file, range)), Err(Error::Internal(_))));
    }
}

/// A checkpoint of a few tensors, all in one file.
struct Small {
    tensors: BTreeMap<&'static str, TensorInfo>,
    quantization: Option<Quantization>,
}

impl Lookup for Small {
    fn find(&self, _: Origin, name: &str) -> Result<Found<'_>> {
        let info = self.tensors.get(name).ok_or_else(|| Error::BadWeights(format!("no {name}")))?;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let beside = |end: &str| self.tensors.get(format!("{module}.{end}").as_str()).map(|info| (0, info));
        let affine = beside("scales").zip(beside("biases")).map(|(s, b)| [s, b]);
        Ok(Found { name: name.to_owned(), file: 0, info, affine, factor: 1.0 })
    }

    fn quantization(&self) -> Option<&Quantization> {
        self.quantization.as_ref()
    }
}

fn info(dtype: Dtype, shape: &[u64]) -> TensorInfo {
    TensorInfo { dtype, shape: shape.to_vec(), bytes: 0..0 }
}

#[test]
fn quantised_tensors_are_checked_against_the_config() {
    let make = |weight: TensorInfo, scales: TensorInfo, biases: TensorInfo, bits: Option<u32>| Small {
        tensors: BTreeMap::from([("a.weight", weight), ("a.scales", scales), ("a.biases", biases)]),
        quantization: bits.map(|bits| Quantization { default: AffineParams { bits, group: 32 }, overrides: BTreeMap::new() }),
    };
    let (weight, scales) = (info(Dtype::U32, &[5, 8]), info(Dtype::F16, &[5, 2]));
    let check = |small: &Small, k| matrix_tensor(small, Origin::Base, "a.weight", 5, k).map(|t| t.stored);
    let good = make(weight.clone(), scales.clone(), scales.clone(), Some(4));
    assert_eq!(check(&good, 64).unwrap(), affine(4, 32, Float::F16));
    let refused = |small: &Small, k, part: &str| {
        let message = check(small, k).unwrap_err().to_string();
        assert!(message.contains("`a.weight`") && message.contains(part), "{message}");
    };
    refused(&good, 60, "multiple of the group");
    refused(&good, 32, "expected [5, 4] (32 inputs of 4 bits)");
    refused(&make(weight.clone(), scales.clone(), scales.clone(), Some(8)), 64, "expected [5, 16]");
    refused(&make(weight.clone(), scales.clone(), scales.clone(), None), 64, "`quantization` does not say how");
    refused(
        &make(weight.clone(), info(Dtype::F16, &[5, 1]), scales.clone(), Some(4)),
        64,
        "scales of shape [5, 1]; expected [5, 2]",
    );
    refused(&make(weight.clone(), scales.clone(), info(Dtype::Bf16, &[5, 2]), Some(4)), 64, "F16 scales and BF16 biases");
    refused(&make(info(Dtype::U32, &[40]), scales.clone(), scales, Some(4)), 64, "expected [5, 64]");
}

#[test]
fn an_adapters_tensor_may_be_smaller_and_the_bases_may_not() {
    let small = Small { tensors: BTreeMap::from([("a.weight", info(Dtype::F32, &[2, 16]))]), quantization: None };
    let tensor = matrix_tensor(&small, Origin::Adapter, "a.weight", 4, 16).unwrap();
    assert_eq!((tensor.rows, tensor.k), (2, 16));
    assert!(matrix_tensor(&small, Origin::Base, "a.weight", 4, 16).unwrap_err().to_string().contains("expected [4, 16]"));
    assert!(matrix_tensor(&small, Origin::Adapter, "a.weight", 1, 16).is_err());
}

#[test]
fn pieces_fill_every_row_once() {
    let piece = |span, rows| Piece { span, tensor: Some(Tensor { rows, ..tensor(Stored::Plain(Float::F32), 4) }) };
    let item = |arrangement, pieces: Vec<Piece>| {
        let n = pieces.iter().map(|p| p.span).sum();
        let target = Target::Matrix { id: MatrixId(0), format: Format::F32, n, k: 4 };
        Item { label: "m".into(), target, arrangement, pieces }
    };
    let stacked = item(Arrangement::Stacked, vec![piece(11, 11), Piece { span: 6, tensor: None }, piece(9, 5)]);
    let interleaved = item(Arrangement::Interleaved, vec![piece(13, 13), piece(13, 13)]);
    for (item, want) in [
        (
            &stacked,
            (0..26)
                .map(|r| match r {
                    0..11 => Some(r),
                    17..22 => Some(r - 17),
                    _ => None,
                })
                .collect::<Vec<_>>(),
        ),
        (&interleaved, (0..26).map(|r| Some(r / 2)).collect()),
    ] {
        let mut filled = vec![None; 26];
        for start in (0..26).step_by(8) {
            let rows = start..(start + 8).min(26);
            for (_, source, first, step) in item.sources(&rows) {
                for (i, row) in source.enumerate() {
                    let at = start + first + i * step;
                    assert!(rows.contains(&at) && filled[at].is_none());
                    filled[at] = Some(row);
                }
            }
        }
        assert_eq!(filled, want);
    }
}

/// Takes nothing.
struct Nothing;

impl WeightSink for Nothing {
    fn matrix(&mut self, _: MatrixId, _: PackedRows) -> Result<()> {
        Ok(())
    }

    fn vector(&mut self, _: VectorId, _: Vec<f32>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn bytes_that_were_not_read_are_an_error() {
    let target = Target::Matrix { id: MatrixId(0), format: Format::F32, n: 8, k: 4 };
    let pieces = vec![Piece { span: 8, tensor: Some(tensor(Stored::Plain(Float::F32), 4)) }];
    let items = vec![Item { label: "m".into(), target, arrangement: Arrangement::Stacked, pieces }];
    let batches = batches(&items, &[]);
    let plan = WeightPlan { files: Vec::new(), formats: vec![Format::F32], batches, total_bytes: 128, items };
    assert_eq!(plan.pack(&plan.batches[0], &[vec![0; 128]], &mut Nothing), Ok(()));
    for bytes in [vec![], vec![vec![0; 127]]] {
        assert!(matches!(plan.pack(&plan.batches[0], &bytes, &mut Nothing), Err(Error::Internal(_))));
    }
}
