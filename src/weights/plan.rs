//! What to read and what it becomes: every matrix's format is settled from headers alone, then the reading is cut into
//! batches of bounded size. Pure: says which bytes it needs, is given them, hands back packed rows.

use std::ops::Range;

use super::WeightSink;
use super::pack::{self, Float, Stored, StoredRows};
use super::packed::{Format, PackedRows, ScaleFormat, TILE};
use super::quantization::Quantization;
use super::safetensors_header::{Dtype, TensorInfo};
use super::source::Step;
use super::stored_block::{self, BlobReader, BlobWriter};
use crate::error::{Error, Result};
use crate::model::program::{Arrangement, MatrixId, MatrixSpec, Origin, Program, Role, Source, VectorId, VectorSpec};

/// Bytes read at a time, unless eight rows of one matrix take more.
pub const BATCH_BYTES: u64 = 8 << 20;
/// Ranges closer than this are read as one.
const GAP: u64 = 4096;

/// How plain (unquantised) weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlainFormat {
    /// f32 stays f32; f16 and bf16 become f16.
    #[default]
    Auto,
    /// All f32; exact.
    F32,
    /// All f16.
    F16,
    /// Affine groups; embedding and head always in 8 bits, LoRA never.
    Affine {
        /// 4 or 8.
        bits: u32,
        /// Inputs per scale: 32, 64 or 128.
        group: usize,
    },
}

/// A file to read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Whose it is.
    pub origin: Origin,
    /// As its source names it.
    pub name: String,
}

/// A tensor found for a [`Source`].
#[derive(Debug, Clone, PartialEq)]
pub struct Found<'a> {
    /// As the file names it.
    pub name: String,
    /// Index into the plan's files.
    pub file: usize,
    /// The tensor.
    pub info: &'a TensorInfo,
    /// Scales and biases beside it (`X.scales`, `X.biases`): file and tensor.
    pub affine: Option<[(usize, &'a TensorInfo); 2]>,
    /// Multiplies its values.
    pub factor: f32,
}

/// Finds tensors by origin and canonical name.
pub trait Lookup {
    /// The tensor, or an error that names it.
    ///
    /// # Errors
    /// [`Error::BadWeights`] if it is missing.
    fn find(&self, origin: Origin, canonical: &str) -> Result<Found<'_>>;

    /// Module as the checkpoint names it, for the quantisation section's overrides.
    fn quantization(&self) -> Option<&Quantization>;
}

#[derive(Debug, Clone, PartialEq)]
struct Piece {
    /// Rows it fills in the matrix.
    span: usize,
    tensor: Option<Tensor>,
}

#[derive(Debug, Clone, PartialEq)]
struct Tensor {
    name: String,
    stored: Stored,
    rows: usize,
    k: usize,
    factor: f32,
    values: (usize, u64),
    scales: (usize, u64),
    biases: (usize, u64),
}

impl Tensor {
    /// File and bytes of rows: values, then scales and biases if it has them.
    fn ranges(&self, rows: &Range<usize>) -> [(usize, Range<u64>); 3] {
        let at = |(file, start): (usize, u64), width: usize| {
            let width = width as u64;
            (file, start + rows.start as u64 * width..start + rows.end as u64 * width)
        };
        let scale = self.stored.scale_bytes(self.k);
        [at(self.values, self.stored.row_bytes(self.k)), at(self.scales, scale), at(self.biases, scale)]
    }

    fn bytes_per_row(&self) -> u64 {
        (self.stored.row_bytes(self.k) + 2 * self.stored.scale_bytes(self.k)) as u64
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Target {
    Matrix { id: MatrixId, format: Format, n: usize, k: usize },
    Vector { id: VectorId, n: usize },
}

#[derive(Debug, Clone, PartialEq)]
struct Item {
    label: String,
    target: Target,
    arrangement: Arrangement,
    pieces: Vec<Piece>,
}

/// Rows of an item, to be read and packed together.
#[derive(Debug, Clone, PartialEq)]
struct Job {
    item: usize,
    rows: Range<usize>,
}

/// Reads and packs of one step of loading.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Whose bytes it reads.
    pub origin: Origin,
    /// What to read: index into [`WeightPlan::files`], and bytes. Sorted, without overlaps.
    pub reads: Vec<(usize, Range<u64>)>,
    jobs: Vec<Job>,
}

/// How a checkpoint becomes a program's matrices and vectors.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightPlan {
    /// Files read.
    pub files: Vec<PlannedFile>,
    /// Format of each matrix, by [`MatrixId`].
    pub formats: Vec<Format>,
    /// Steps, in order.
    pub batches: Vec<Batch>,
    /// Bytes that all batches read.
    pub total_bytes: u64,
    items: Vec<Item>,
}

impl WeightPlan {
    /// Plans the loading of `program` from what `lookup` finds in `files`.
    ///
    /// # Errors
    /// [`Error::BadWeights`] for missing tensors and wrong shapes or types; [`Error::BadConfig`] if the quantisation
    /// section contradicts them.
    pub fn new(program: &Program, lookup: &impl Lookup, files: Vec<PlannedFile>, plain: PlainFormat) -> Result<Self> {
        let mut items = Vec::new();
        let mut formats = Vec::new();
        for (i, spec) in program.matrices.iter().enumerate() {
            let item = matrix_item(MatrixId(i), spec, lookup, plain)?;
            if let Target::Matrix { format, .. } = item.target {
                formats.push(format);
            }
            items.push(item);
        }
        for (i, spec) in program.vectors.iter().enumerate() {
            items.push(vector_item(VectorId(i), spec, lookup)?);
        }
        let place = |item: &Item| item.pieces.iter().filter_map(|p| p.tensor.as_ref()).map(|t| t.values).min();
        items.sort_by_key(place);
        let batches = batches(&items, &files);
        let total_bytes = batches.iter().flat_map(|b| &b.reads).map(|(_, r)| r.end - r.start).sum();
        Ok(Self { files, formats, batches, total_bytes, items })
    }

    /// Packs a batch whose reads gave `bytes` (one entry per read, in order) and hands the rows to `sink`.
    ///
    /// # Errors
    /// [`Error::BadWeights`] for values that cannot be kept; whatever `sink` answers.
    pub fn pack(&self, batch: &Batch, bytes: &[Vec<u8>], sink: &mut impl WeightSink) -> Result<()> {
        for job in &batch.jobs {
            let item = self.items.get(job.item).ok_or_else(|| Error::Internal("a batch of another plan".into()))?;
            match item.target {
                Target::Matrix { id, format, k, .. } => {
                    let mut rows = pack::zeros(format, job.rows.start, job.rows.len(), k);
                    for (tensor, source, first, step) in item.sources(&job.rows) {
                        let [values, scales, biases] = tensor.ranges(&source);
                        let stored = StoredRows {
                            stored: tensor.stored,
                            rows: source.len(),
                            k: tensor.k,
                            values: batch.bytes(bytes, &values)?,
                            scales: batch.bytes(bytes, &scales)?,
                            biases: batch.bytes(bytes, &biases)?,
                            factor: tensor.factor,
                        };
                        pack::write_rows(&mut rows, &stored, first, step, &tensor.name)?;
                    }
                    sink.matrix(id, rows)?;
                }
                Target::Vector { id, n } => {
                    let mut vector = vec![0.0; n];
                    for (tensor, source, first, step) in item.sources(&job.rows) {
                        let [values, ..] = tensor.ranges(&source);
                        let values = batch.bytes(bytes, &values)?;
                        let Stored::Plain(float) = tensor.stored else {
                            return Err(Error::Internal(format!("vector {} planned as quantised", item.label)));
                        };
                        let mut decoded = vec![0.0; source.len()];
                        float.decode(values, &mut decoded);
                        let slots = vector.get_mut(first..).unwrap_or_default().iter_mut().step_by(step);
                        slots.zip(decoded).for_each(|(slot, v)| *slot = v);
                    }
                    sink.vector(id, vector)?;
                }
            }
        }
        Ok(())
    }
}

/// Remembers what it passes on.
struct Recorder<'a, S> {
    sink: &'a mut S,
    blob: BlobWriter,
}

impl<S: WeightSink> WeightSink for Recorder<'_, S> {
    fn matrix(&mut self, id: MatrixId, rows: PackedRows) -> Result<()> {
        self.blob.matrix(&rows);
        self.sink.matrix(id, rows)
    }

    fn vector(&mut self, id: VectorId, values: Vec<f32>) -> Result<()> {
        self.blob.vector(&values);
        self.sink.vector(id, values)
    }
}

impl WeightPlan {
    /// Names what a batch is packed into, by all that it depends on but the content of the files.
    #[must_use]
    pub fn key(&self, batch: &Batch) -> String {
        let mut text = String::new();
        for job in &batch.jobs {
            let Some(Item { label, target, arrangement, pieces }) = self.items.get(job.item) else { continue };
            // Not by its number, which depends on whether there is an adapter.
            let target = match target {
                Target::Matrix { format, n, k, .. } => format!("{format:?} {n} {k}"),
                Target::Vector { n, .. } => format!("vector {n}"),
            };
            text.push_str(&format!("{label} {target} {arrangement:?} {:?}\n", job.rows));
            for Piece { span, tensor } in pieces {
                text.push_str(&format!("{span}"));
                if let Some(Tensor { name, stored, rows, k, factor, values, scales, biases }) = tensor {
                    text.push_str(&format!(" {name} {stored:?} {rows} {k} {factor:?}"));
                    for (file, start) in [values, scales, biases] {
                        let file = self.files.get(*file).map_or("", |file| file.name.as_str());
                        text.push_str(&format!(" {file} {start}"));
                    }
                }
                text.push('\n');
            }
        }
        stored_block::key(&text)
    }

    /// [`WeightPlan::pack`] that also gives what was handed over as a blob for [`WeightPlan::unpack`].
    ///
    /// # Errors
    /// As [`WeightPlan::pack`].
    pub fn pack_and_keep(&self, batch: &Batch, bytes: &[Vec<u8>], sink: &mut impl WeightSink) -> Result<Vec<u8>> {
        let mut recorder = Recorder { sink, blob: BlobWriter::default() };
        self.pack(batch, bytes, &mut recorder)?;
        Ok(recorder.blob.finish())
    }

    /// Hands a batch that was kept to `sink`. `false`, and nothing is handed over, if `blob` is damaged or another batch's.
    ///
    /// # Errors
    /// Whatever `sink` answers.
    pub fn unpack(&self, batch: &Batch, blob: &[u8], sink: &mut impl WeightSink) -> Result<bool> {
        let Some(mut reader) = BlobReader::new(blob) else { return Ok(false) };
        let mut made = Vec::with_capacity(batch.jobs.len());
        for job in &batch.jobs {
            let rows = &job.rows;
            let part = match self.items.get(job.item).map(|item| &item.target) {
                Some(&Target::Matrix { id, format, k, .. }) => {
                    reader.matrix(format, rows.start, rows.len(), k).map(|rows| Made::Matrix(id, rows))
                }
                Some(&Target::Vector { id, n }) => reader.vector(n).map(|values| Made::Vector(id, values)),
                None => None,
            };
            let Some(part) = part else { return Ok(false) };
            made.push(part);
        }
        if !reader.at_end() {
            return Ok(false);
        }
        for part in made {
            match part {
                Made::Matrix(id, rows) => sink.matrix(id, rows)?,
                Made::Vector(id, values) => sink.vector(id, values)?,
            }
        }
        Ok(true)
    }

    /// The batches' steps, those of the base and of the adapter, each in order.
    #[must_use]
    pub fn steps(&self) -> (Vec<Step>, Vec<Step>) {
        let (mut base, mut adapter) = (Vec::new(), Vec::new());
        for batch in &self.batches {
            let named = |(file, range): &(usize, Range<u64>)| Some((self.files.get(*file)?.name.clone(), range.clone()));
            let step = Step { key: self.key(batch), reads: batch.reads.iter().filter_map(named).collect() };
            match batch.origin {
                Origin::Base => base.push(step),
                Origin::Adapter => adapter.push(step),
            }
        }
        (base, adapter)
    }
}

/// A part of a batch, packed.
enum Made {
    Matrix(MatrixId, PackedRows),
    Vector(VectorId, Vec<f32>),
}

impl Batch {
    /// A range of a file out of what was read.
    fn bytes<'a>(&self, read: &'a [Vec<u8>], (file, range): &(usize, Range<u64>)) -> Result<&'a [u8]> {
        if range.is_empty() {
            return Ok(&[]);
        }
        let at = self.reads.partition_point(|(f, r)| (*f, r.end) < (*file, range.end));
        let found = self.reads.get(at).zip(read.get(at)).filter(|((f, r), _)| f == file && r.start <= range.start);
        let bytes = found.and_then(|((_, r), bytes)| {
            bytes.get(usize::try_from(range.start - r.start).ok()?..usize::try_from(range.end - r.start).ok()?)
        });
        bytes.ok_or_else(|| Error::Internal("bytes of a batch that were not read".into()))
    }
}

impl Item {
    fn n(&self) -> usize {
        match self.target {
            Target::Matrix { n, .. } | Target::Vector { n, .. } => n,
        }
    }

    /// What fills `rows` of the item: tensor, its rows, the first row filled (counted from `rows.start`) and the step.
    fn sources(&self, rows: &Range<usize>) -> Vec<(&Tensor, Range<usize>, usize, usize)> {
        let mut found = Vec::new();
        let mut start = 0;
        for (i, piece) in self.pieces.iter().enumerate() {
            let (source, first, step) = match self.arrangement {
                Arrangement::Stacked => {
                    let from = rows.start.max(start);
                    let to = rows.end.min(start + piece.span).max(from);
                    (from - start..to - start, from - rows.start, 1)
                }
                Arrangement::Interleaved => {
                    let step = self.pieces.len();
                    let at_least = |row: usize| row.saturating_sub(i).div_ceil(step);
                    let from = at_least(rows.start);
                    (from..at_least(rows.end), from * step + i - rows.start, step)
                }
            };
            start += piece.span;
            let Some(tensor) = &piece.tensor else { continue };
            let source = source.start..source.end.min(tensor.rows);
            if !source.is_empty() {
                found.push((tensor, source, first, step));
            }
        }
        found
    }

    /// Rows read at a time: whole tiles, as many as fit in a batch, one at least. Vectors are read whole.
    fn rows_per_job(&self) -> usize {
        if let Target::Vector { n, .. } = self.target {
            return n.max(1);
        }
        let widest = self.pieces.iter().filter_map(|p| p.tensor.as_ref()).map(Tensor::bytes_per_row).max().unwrap_or(1);
        let rows = usize::try_from(BATCH_BYTES / widest.max(1)).unwrap_or(usize::MAX).min(1 << 20);
        (rows / TILE * TILE).max(TILE)
    }
}

/// Cuts the items into jobs and groups these, in order, into batches of at most [`BATCH_BYTES`] where jobs allow. The base's
/// and the adapter's are apart, so that what is made of the one does not depend on whether the other is there.
fn batches(items: &[Item], files: &[PlannedFile]) -> Vec<Batch> {
    let mut batches = Vec::new();
    let (mut jobs, mut ranges, mut bytes) = (Vec::new(), Vec::new(), 0);
    let mut origin = Origin::Base;
    for (i, item) in items.iter().enumerate() {
        let file = item.pieces.iter().find_map(|p| p.tensor.as_ref()).and_then(|t| files.get(t.values.0));
        // What consists of zeros alone goes with whatever is before it.
        let of = file.map_or(origin, |file| file.origin);
        if of != origin && !jobs.is_empty() {
            batches.push(Batch { origin, reads: merged(std::mem::take(&mut ranges)), jobs: std::mem::take(&mut jobs) });
            bytes = 0;
        }
        origin = of;
        let step = item.rows_per_job();
        for start in (0..item.n()).step_by(step) {
            let rows = start..(start + step).min(item.n());
            let job_ranges: Vec<_> = item
                .sources(&rows)
                .into_iter()
                .flat_map(|(tensor, source, ..)| tensor.ranges(&source))
                .filter(|(_, range)| !range.is_empty())
                .collect();
            let job_bytes: u64 = job_ranges.iter().map(|(_, r)| r.end - r.start).sum();
            if bytes + job_bytes > BATCH_BYTES && !jobs.is_empty() {
                batches.push(Batch { origin, reads: merged(std::mem::take(&mut ranges)), jobs: std::mem::take(&mut jobs) });
                bytes = 0;
            }
            bytes += job_bytes;
            ranges.extend(job_ranges);
            jobs.push(Job { item: i, rows });
        }
    }
    if !jobs.is_empty() {
        batches.push(Batch { origin, reads: merged(ranges), jobs });
    }
    batches
}

fn merged(mut ranges: Vec<(usize, Range<u64>)>) -> Vec<(usize, Range<u64>)> {
    ranges.sort_unstable_by_key(|(file, range)| (*file, range.start));
    let mut reads: Vec<(usize, Range<u64>)> = Vec::new();
    for (file, range) in ranges {
        match reads.last_mut() {
            Some((f, last)) if *f == file && range.start <= last.end + GAP => last.end = last.end.max(range.end),
            _ => reads.push((file, range)),
        }
    }
    reads
}

fn matrix_item(id: MatrixId, spec: &MatrixSpec, lookup: &impl Lookup, plain: PlainFormat) -> Result<Item> {
    let mut pieces = Vec::new();
    for source in &spec.sources {
        let tensor = match source {
            Source::Zeros { .. } => None,
            Source::Tensor { origin, name, rows, k } => Some(matrix_tensor(lookup, *origin, name, *rows, *k)?),
        };
        pieces.push(Piece { span: source.rows(), tensor });
    }
    let format = common_format(pieces.iter().filter_map(|p| p.tensor.as_ref()), spec.role, plain);
    let target = Target::Matrix { id, format, n: spec.n, k: spec.k };
    Ok(Item { label: spec.label.clone(), target, arrangement: spec.arrangement, pieces })
}

fn vector_item(id: VectorId, spec: &VectorSpec, lookup: &impl Lookup) -> Result<Item> {
    let mut pieces = Vec::new();
    for source in &spec.sources {
        let tensor = match source {
            Source::Zeros { .. } => None,
            Source::Tensor { origin, name, rows, .. } => {
                let found = lookup.find(*origin, name)?;
                let elements = found.info.shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d));
                let flat = found.info.shape.iter().filter(|d| **d != 1).count() <= 1;
                if elements != Some(*rows as u64) || !flat {
                    return Err(wrong_shape(&found, &format!("[{rows}]")));
                }
                let stored = Stored::Plain(float(&found, "F32, F16 or BF16")?);
                Some(Tensor::new(&found, stored, *rows, 1))
            }
        };
        pieces.push(Piece { span: source.rows(), tensor });
    }
    Ok(Item { label: spec.label.clone(), target: Target::Vector { id, n: spec.n }, arrangement: spec.arrangement, pieces })
}

impl Tensor {
    fn new(found: &Found, stored: Stored, rows: usize, k: usize) -> Self {
        let values = (found.file, found.info.bytes.start);
        let [scales, biases] = found.affine.map_or([values; 2], |pair| pair.map(|(file, info)| (file, info.bytes.start)));
        Self { name: found.name.clone(), stored, rows, k, factor: found.factor, values, scales, biases }
    }
}

fn wrong_shape(found: &Found, expected: &str) -> Error {
    Error::BadWeights(format!("tensor `{}` has shape {:?}; expected {expected}", found.name, found.info.shape))
}

fn float(found: &Found, expected: &str) -> Result<Float> {
    plain_type(&found.info.dtype)
        .ok_or_else(|| Error::BadWeights(format!("tensor `{}` has type {}; expected {expected}", found.name, found.info.dtype)))
}

fn plain_type(dtype: &Dtype) -> Option<Float> {
    match dtype {
        Dtype::F32 => Some(Float::F32),
        Dtype::F16 => Some(Float::F16),
        Dtype::Bf16 => Some(Float::Bf16),
        Dtype::U32 | Dtype::Other(_) => None,
    }
}

/// Finds and checks a matrix's tensor. An adapter's may have fewer rows or inputs (a smaller rank); the rest is zero.
fn matrix_tensor(lookup: &impl Lookup, origin: Origin, name: &str, rows: usize, k: usize) -> Result<Tensor> {
    let found = lookup.find(origin, name)?;
    let (got_rows, got_k) = match found.info.shape.as_slice() {
        [rows, k] => (*rows, *k),
        _ => return Err(wrong_shape(&found, &format!("[{rows}, {k}]"))),
    };
    if found.info.dtype != Dtype::U32 {
        let stored = Stored::Plain(float(&found, "F32, F16, BF16, or U32 with scales")?);
        let fits = match origin {
            Origin::Base => got_rows == rows as u64 && got_k == k as u64,
            Origin::Adapter => (1..=rows as u64).contains(&got_rows) && (1..=k as u64).contains(&got_k),
        };
        if !fits {
            return Err(wrong_shape(&found, &format!("[{rows}, {k}]")));
        }
        return Ok(Tensor::new(&found, stored, got_rows as usize, got_k as usize));
    }
    let stored = affine(lookup, &found, rows, k)?;
    Ok(Tensor::new(&found, stored, rows, k))
}

/// Checks a quantised matrix and its scales against what the config says of it.
fn affine(lookup: &impl Lookup, found: &Found, rows: usize, k: usize) -> Result<Stored> {
    let name = &found.name;
    let bad = |what: String| Err(Error::BadWeights(format!("tensor `{name}` {what}")));
    let Some([(_, scales), (_, biases)]) = found.affine else {
        return bad("is quantised (U32), but its `.scales` and `.biases` are missing".into());
    };
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let Some(params) = lookup.quantization().and_then(|q| q.of(module)) else {
        return Err(Error::BadConfig(format!(
            "config.json: tensor `{name}` is quantised (U32), but `quantization` does not say how; expected its group_size and bits"
        )));
    };
    let (bits, group) = (params.bits, params.group);
    if !k.is_multiple_of(group) {
        return bad(format!("has {k} inputs; quantised ones must be a multiple of the group of {group}"));
    }
    let (packed, groups) = ((k * bits as usize / 32) as u64, (k / group) as u64);
    if found.info.shape != [rows as u64, packed] {
        return Err(wrong_shape(found, &format!("[{rows}, {packed}] ({k} inputs of {bits} bits)")));
    }
    for (what, info) in [("scales", scales), ("biases", biases)] {
        if info.shape != [rows as u64, groups] {
            return bad(format!("has {what} of shape {:?}; expected [{rows}, {groups}] (groups of {group})", info.shape));
        }
    }
    match plain_type(&scales.dtype) {
        Some(scale) if scales.dtype == biases.dtype => Ok(Stored::Affine { bits, group, scale }),
        _ => bad(format!("has {} scales and {} biases; expected both F16, both BF16 or both F32", scales.dtype, biases.dtype)),
    }
}

/// The format that keeps all of a matrix's tensors.
///
/// Affine tensors stay affine: the most bits, the smallest group, lossless. Where their scales differ in storage, or are
/// f32, or a plain tensor is among them, the matrix becomes plain: f32 if anything in it is f32 or storage differs, else f16.
fn common_format<'a>(tensors: impl Iterator<Item = &'a Tensor> + Clone, role: Role, plain: PlainFormat) -> Format {
    let affine = tensors.clone().filter_map(|t| match t.stored {
        Stored::Affine { bits, group, scale } => Some((bits, group, pack::scale_format(scale))),
        Stored::Plain(_) => None,
    });
    let has_plain = tensors.clone().any(|t| matches!(t.stored, Stored::Plain(_)));
    let has_f32 =
        tensors.clone().any(|t| matches!(t.stored, Stored::Plain(Float::F32) | Stored::Affine { scale: Float::F32, .. }));
    let mut mixed_scales = false;
    let common = affine.reduce(|a, b| {
        mixed_scales |= a.2 != b.2;
        (a.0.max(b.0), a.1.min(b.1), a.2)
    });
    match (common, has_plain, plain) {
        (Some((bits, group, Some(scale))), false, _) if !mixed_scales => Format::Affine { bits, group, scale },
        (Some(_), _, _) if mixed_scales || has_f32 => Format::F32,
        (_, _, PlainFormat::F32) => Format::F32,
        (Some(_), _, _) | (None, _, PlainFormat::F16) => Format::F16,
        (None, _, PlainFormat::Affine { bits, group }) if role != Role::Lora => {
            let bits = if role == Role::Linear { bits } else { 8 };
            Format::Affine { bits, group, scale: ScaleFormat::F16 }
        }
        (None, _, _) if has_f32 => Format::F32,
        (None, _, _) => Format::F16,
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
