//! Single kernels against their twins, on odd sizes. Outputs begin as NaN with guard words behind them, and what a row
//! must not see is NaN too.

use std::ops::Range;

use pollster::block_on;

use super::gpu;
use crate::gpu::attention::Attention;
use crate::gpu::matmul::DeviceClass;
use crate::gpu::pipelines::Pipelines;
use crate::gpu::variants::{self, Access, Kernel, KvStorage};
use crate::gpu::{Gpu, readback};
use crate::kernels::attention::{KeyValues, attention};
use crate::kernels::embed::embed;
use crate::kernels::rope_kv::{Frequencies, RopeKv, rope_kv};
use crate::kernels::testing::{Q4, Q8, Random, random, words};
use crate::kernels::{CallRows, Heads, argmax::argmax};
use crate::model::arch::{Rope, RopeScaling};
use crate::model::call_rows::MASK_EMBEDDING;
use crate::weights::packed::{Format, ScaleFormat};

const GUARD: u32 = 0xfeed_beef;
const GUARDS: usize = 64;
const NAN: u32 = 0x7fc0_0000;
/// No vector.
const NONE: u32 = u32::MAX;

fn floats(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn halves(values: &[f32]) -> Vec<u32> {
    let half = |v: f32| u32::from(half::f16::from_f32(v).to_bits());
    values.chunks_exact(2).map(|p| half(p[0]) | half(p[1]) << 16).collect()
}

fn from_halves(words: &[u32]) -> Vec<f32> {
    words.iter().flat_map(|w| [*w as u16, (w >> 16) as u16]).map(|h| half::f16::from_bits(h).to_f32()).collect()
}

/// Runs a kernel over copies of `buffers`, in binding order, and returns what they then hold; checks the guards.
fn run(gpu: &Gpu, kernel: &Kernel, buffers: &[Vec<u32>], grid: [u32; 3]) -> Vec<Vec<u32>> {
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::UNIFORM;
    let usage = usage | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
    let made: Vec<_> = buffers
        .iter()
        .zip(&kernel.bindings)
        .map(|(words, (_, access))| {
            let mut words = words.clone();
            words.resize(words.len() + if *access == Access::Write { GUARDS } else { 0 }, GUARD);
            words.resize(words.len().next_multiple_of(4).max(4), 0);
            let size = words.len() as u64 * 4;
            let buffer =
                gpu.device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false });
            gpu.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&words));
            buffer
        })
        .collect();
    let mut pipelines = Pipelines::new(gpu.clone());
    let id = pipelines.id(kernel).unwrap();
    let bind = pipelines.bind("test", &kernel.bindings, made.iter().map(|b| b.as_entire_buffer_binding()).collect());
    let mut encoder = gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(pipelines.get(id).unwrap());
        pass.set_bind_group(0, &bind, &[]);
        pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
    }
    gpu.queue.submit([encoder.finish()]);
    let mut out = Vec::new();
    for ((buffer, before), (_, access)) in made.iter().zip(buffers).zip(&kernel.bindings) {
        let mut words = block_on(readback::read(gpu, buffer, 0, buffer.size())).unwrap();
        if *access == Access::Write {
            assert!(words[before.len()..][..GUARDS].iter().all(|w| *w == GUARD), "{} wrote behind its output", kernel.file);
        }
        words.truncate(before.len());
        out.push(words);
    }
    out
}

/// Fails unless every value is within `bound` of what was expected.
fn close(got: &[f32], want: &[f64], bound: f64) -> bool {
    got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (f64::from(*g) - w).abs() <= bound)
}

/// `close`, and the control: it is not close once one value is moved by a few bounds.
fn assert_close(got: &[f32], want: &[f64], bound: f64, what: &str) {
    let worst = got
        .iter()
        .zip(want)
        .map(|(g, w)| (f64::from(*g) - w).abs())
        .fold(0.0, |m: f64, d| if d > m || d.is_nan() { d } else { m });
    assert!(close(got, want, bound), "{what}: off by {worst}, {bound} allowed");
    let mut off = want.to_vec();
    let middle = off.len() / 2;
    off[middle] += 3.0 * bound;
    assert!(!close(got, &off, bound), "{what}: the comparison is blind");
}

fn read(words: &[u32]) -> Vec<f32> {
    words.iter().map(|w| f32::from_bits(*w)).collect()
}

fn rows_of(values: &[f32], stride: usize, width: usize) -> Vec<f32> {
    values.chunks_exact(stride).flat_map(|row| row[..width].to_vec()).collect()
}

fn rows_of_f64(values: &[f64], stride: usize, width: usize) -> Vec<f64> {
    values.chunks_exact(stride).flat_map(|row| row[..width].to_vec()).collect()
}

#[test]
fn embeddings_and_masks() {
    let affine = |bits, group, scale| Format::Affine { bits, group, scale };
    let formats = [
        Q4,
        Q8,
        affine(4, 64, ScaleFormat::Bf16),
        affine(8, 32, ScaleFormat::F16),
        affine(4, 128, ScaleFormat::F16),
        Format::F16,
        Format::F32,
    ];
    let gpu = gpu(false);
    for (i, format) in formats.into_iter().enumerate() {
        for d in [30usize, 64, 320] {
            let (vocab, stride) = (21, d.next_multiple_of(32));
            let table = random(format, vocab, d, 7);
            let mut r = Random(3);
            let (gain, mask) = (r.values(d), r.values(d));
            let tokens = [20u32, 0, MASK_EMBEDDING, 7, 20];
            let rows: Vec<_> = tokens.iter().map(|&t| (t, 0, 0, 0..1, 0..0)).collect();
            let call = words(&rows, 0..0, 0..0);
            let mut vectors = vec![9.0; 5];
            vectors.extend(&gain);
            vectors.extend(&mask);
            let (blocks, groups) = (table.blocks() as u32, table.groups() as u32);
            let group = format.group().unwrap_or(1) as u32;
            let params = vec![d as u32, stride as u32, 0, vocab as u32, blocks, groups, group, 5, 5 + d as u32];
            let scales = if table.scales.is_empty() { vec![0; 4] } else { table.scales.clone() };
            let out = vec![NAN; tokens.len() * stride];
            let kernel = variants::embed(format);
            let buffers = [table.data.clone(), scales, floats(&vectors), call.clone(), out.clone(), out, params];
            let got = run(&gpu, &kernel, &buffers, [d.div_ceil(256) as u32, tokens.len() as u32, 1]);
            let (mut h, mut x) = (vec![0.0; tokens.len() * stride], vec![0.0; tokens.len() * stride]);
            embed(CallRows::new(&call), &table, Some(&mask), &gain, stride, &mut h, &mut x);
            for (got, want) in [(&got[4], &h), (&got[5], &x)] {
                let (got, want) = (rows_of(&read(got), stride, d), rows_of_f64(want, stride, d));
                assert_close(&got, &want, 1e-6, &format!("format {i}, width {d}"));
            }
            assert!(got[4].chunks_exact(stride).all(|row| row[d..].iter().all(|w| *w == NAN)), "padding was written");
        }
    }
}

#[test]
fn rotation_norm_and_cache() {
    for (i, (query, key_value, dim)) in
        [(3usize, 1usize, 16usize), (2, 2, 24), (4, 2, 18), (2, 1, 80), (1, 1, 256)].into_iter().enumerate()
    {
        for kv in [KvStorage::F32, KvStorage::F16, KvStorage::Pack16] {
            let gpu = gpu(kv == KvStorage::Pack16);
            let heads = Heads { query, key_value, dim };
            let (norms, rotate) = (i % 2 == 0, i != 3);
            let width = (query + 2 * key_value) * dim;
            let (stride, slots, padded) = (width.next_multiple_of(32), 11usize, dim.next_multiple_of(4));
            let mut r = Random(i as u64 + 5);
            let mut qkv: Vec<f32> = r.values(4 * stride);
            qkv.iter_mut().for_each(|v| *v *= 3.0);
            let mut call = words(
                &[(0, 3, 9, 0..1, 0..0), (0, 0, 0, 0..1, 0..0), (0, 40, 10, 0..1, 0..0), (0, 7, 4, 0..1, 0..0)],
                0..0,
                0..0,
            );
            *call.last_mut().unwrap() = 1.7f32.to_bits();
            let frequencies = Frequencies::new(&Rope { theta: 10_000.0, scaling: RopeScaling::Default }, dim);
            let gains = r.values(2 * dim);
            let (q_at, k_at) = if norms { (0, dim as u32) } else { (NONE, NONE) };
            let eps = 1e-5f32;
            let params = vec![
                query as u32,
                key_value as u32,
                dim as u32,
                stride as u32,
                slots as u32,
                q_at,
                k_at,
                u32::from(rotate),
                eps.to_bits(),
            ];
            let values = 2 * slots * key_value * padded;
            let cache = if kv == KvStorage::F32 { vec![NAN; values] } else { vec![0x7e00_7e00; values / 2] };
            let kernel = variants::rope_kv(kv, gpu.info().subgroups);
            let buffers = [floats(&qkv), cache, floats(&gains), floats(&frequencies.table(41)), call.clone(), params];
            let got = run(&gpu, &kernel, &buffers, [(query + 2 * key_value) as u32, 4, 1]);

            let mut want: Vec<f64> = qkv.iter().map(|v| f64::from(*v)).collect();
            let unwritten = slots * key_value * dim;
            let (mut keys, mut vals) = (vec![f64::NAN; unwritten], vec![f64::NAN; unwritten]);
            let op = RopeKv {
                heads,
                eps: f64::from(eps),
                q_norm: norms.then_some(&gains[..dim]),
                k_norm: norms.then_some(&gains[dim..]),
                rope: rotate.then_some(&frequencies),
            };
            rope_kv(CallRows::new(&call), &op, stride, &mut want, &mut keys, &mut vals);
            let what = format!("case {i}, {kv:?}");
            let q = query * dim;
            assert_close(&rows_of(&read(&got[0]), stride, q), &rows_of_f64(&want, stride, q), 2e-5, &what);
            let stored = if kv == KvStorage::F32 { read(&got[1]) } else { from_halves(&got[1]) };
            let stored: Vec<f32> = rows_of(&stored, padded, dim);
            let bound = if kv == KvStorage::F32 { 2e-5 } else { 4e-3 };
            for (got, want) in stored.chunks_exact(unwritten).zip([&keys, &vals]) {
                let written = |i: &usize| !want[*i].is_nan();
                let at: Vec<usize> = (0..unwritten).filter(written).collect();
                assert_eq!(at.len(), 4 * key_value * dim);
                assert!((0..unwritten).filter(|i| !written(i)).all(|i| got[i].is_nan()), "{what}: another slot was written");
                let (got, want): (Vec<_>, Vec<_>) = at.iter().map(|&i| (got[i], want[i])).unzip();
                assert_close(&got, &want, bound, &what);
            }
        }
    }
}

/// A case of attention: its sizes, its cache, and what runs it.
struct AttentionCase {
    heads: Heads,
    kv: KvStorage,
    window: u32,
    slots: usize,
    stride: usize,
    attn_stride: usize,
    qkv: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// `WordsOf` without token and slot, which attention does not read: position, cache, scratch.
type Seen = (u32, Range<u32>, Range<u32>);

impl AttentionCase {
    /// Slots that no row sees hold NaN: `seen` tells which those are not.
    fn new(heads: Heads, kv: KvStorage, window: u32, rows: usize, slots: usize, seen: impl Fn(usize) -> bool) -> Self {
        let Heads { query, key_value, dim } = heads;
        let stride = ((query + 2 * key_value) * dim).next_multiple_of(32);
        let mut r = Random((query * 1000 + dim) as u64 + 50);
        let qkv = r.values(rows * stride).iter().map(|v| v * 4.0).collect();
        let store = |v: f32| if kv == KvStorage::F32 { v } else { half::f16::from_f32(v).to_f32() };
        let mut region = || -> Vec<f32> {
            let value = |at: usize| if seen(at / (key_value * dim)) { store(r.value()) } else { f32::NAN };
            (0..slots * key_value * dim).map(value).collect()
        };
        let (keys, values) = (region(), region());
        Self { heads, kv, window, slots, stride, attn_stride: (query * dim).next_multiple_of(32), qkv, keys, values }
    }

    /// A call of these rows, whose queries are those of the case's rows `of`, in parts if `parts` > 1: outputs of each row
    /// as bits. Checks padding and guards.
    fn run(&self, gpu: &Gpu, tile: (u32, Option<u32>), seen: &[Seen], of: Range<usize>, parts: u32) -> Vec<Vec<u32>> {
        let Heads { query, key_value, dim } = self.heads;
        let padded = dim.next_multiple_of(4);
        let pad = |v: &[f32]| -> Vec<f32> {
            let head = |h: &[f32]| h.iter().copied().chain(vec![0.0; padded - dim]).collect::<Vec<_>>();
            v.chunks_exact(dim).flat_map(head).collect()
        };
        let all = [pad(&self.keys), pad(&self.values)].concat();
        let cache = if self.kv == KvStorage::F32 { floats(&all) } else { halves(&all) };
        let attention = Attention::new(DeviceClass::Gpu, self.kv, self.heads, 1);
        let kernel = variants::attention(self.kv, tile.1, tile.0, attention.heads(), dim.div_ceil(4) as u32);
        let params = vec![
            query as u32,
            key_value as u32,
            dim as u32,
            self.stride as u32,
            self.attn_stride as u32,
            self.slots as u32,
            self.window,
            (1.0 / (dim as f32).sqrt()).to_bits(),
        ];
        let rows = seen.len() as u32;
        let call = call_of(seen);
        let out = vec![NAN; seen.len() * self.attn_stride];
        let scratch = vec![NAN; if parts > 1 { parts as usize * 16 * query * (padded / 4 + 1) * 4 } else { 4 }];
        let qkv = floats(&self.qkv[of.start * self.stride..of.end * self.stride]);
        let buffers = [qkv, cache, out.clone(), call.clone(), params.clone(), scratch];
        let [columns, _, _] = attention.grid(rows, 1);
        let mut got = run(gpu, &kernel, &buffers, [columns, rows.div_ceil(tile.0), parts]);
        if parts > 1 {
            assert!(got[2].iter().all(|w| *w == NAN), "a part was taken for the whole");
            let buffers = [got.remove(5), out, call, params];
            got = run(gpu, &variants::attention_merge(), &buffers, attention.merge_grid(rows));
            got.insert(0, Vec::new());
        }
        let outputs: Vec<_> = got[2].chunks_exact(self.attn_stride).collect();
        assert!(outputs.iter().all(|row| row[query * dim..].iter().all(|w| *w == NAN)), "padding was written");
        outputs.iter().map(|row| row[..query * dim].to_vec()).collect()
    }

    /// What the twin says of those rows.
    fn want(&self, seen: &[Seen], of: Range<usize>) -> Vec<Vec<f64>> {
        let mut out = vec![0.0; seen.len() * self.attn_stride];
        let call = call_of(seen);
        let cache = KeyValues { keys: &self.keys, values: &self.values };
        let (rows, qkv) = (CallRows::new(&call), &self.qkv[of.start * self.stride..]);
        attention(rows, self.heads, self.window(), qkv, self.stride, cache, &mut out, self.attn_stride);
        let width = self.heads.query * self.heads.dim;
        out.chunks_exact(self.attn_stride).map(|row| row[..width].to_vec()).collect()
    }

    fn window(&self) -> Option<u32> {
        (self.window > 0).then_some(self.window)
    }
}

fn call_of(seen: &[Seen]) -> Vec<u32> {
    let rows: Vec<_> = seen.iter().map(|(p, cache, scratch)| (0, *p, 0, cache.clone(), scratch.clone())).collect();
    words(&rows, 0..0, 0..0)
}

const ATTENTION_SHAPES: [(usize, usize, usize); 9] =
    [(3, 1, 16), (4, 2, 24), (9, 3, 64), (2, 2, 18), (10, 1, 80), (2, 1, 256), (4, 1, 128), (9, 1, 6), (1, 1, 5)];

/// The kernels that a shape may meet: rows of a workgroup, and the subgroup size where neighbours share.
fn tiles(gpu: &Gpu, heads: Heads) -> Vec<(u32, Option<u32>)> {
    let mut tiles = Vec::new();
    let classes = [DeviceClass::Gpu, DeviceClass::Cpu { subgroup: Some(4) }, gpu.class()];
    for attention in classes.map(|class| Attention::new(class, KvStorage::F32, heads, 0)) {
        for rows in [attention.rows(1), attention.rows(9)] {
            let whole = heads.dim.div_ceil(4) as u32;
            let lanes = gpu.info().subgroup_sizes.1;
            tiles.push((rows, None));
            if gpu.info().subgroups && gpu.info().subgroup_sizes.0 == lanes && whole.is_multiple_of(lanes) {
                tiles.push((rows, Some(lanes)));
            }
        }
    }
    tiles.sort_unstable();
    tiles.dedup();
    tiles
}

#[test]
fn attention_over_ranges_tiles_and_windows() {
    for (query, key_value, dim) in ATTENTION_SHAPES {
        for kv in [KvStorage::F32, KvStorage::F16, KvStorage::Pack16] {
            let windows: &[u32] = if kv == KvStorage::F32 { &[0, 5, 200] } else { &[200] };
            for &window in windows {
                let gpu = gpu(kv == KvStorage::Pack16);
                let heads = Heads { query, key_value, dim };
                // Causal rows, blocks whose keys end behind them, scratch ranges that begin together and apart.
                let rows: [Seen; 9] = [
                    (0, 0..1, 440..440),
                    (129, 0..130, 440..440),
                    (130, 0..130, 441..450),
                    (399, 0..400, 0..0),
                    (7, 3..3, 455..456),
                    (299, 127..129, 440..444),
                    (131, 0..130, 441..450),
                    (296, 0..300, 440..440),
                    (297, 0..300, 452..454),
                ];
                // Nobody sees slots from 400 to 440 and behind 456: NaN there must not be noticed.
                let seen = |slot: usize| slot < 400 || (440..456).contains(&slot);
                let case = AttentionCase::new(heads, kv, window, rows.len(), 460, seen);
                let want = case.want(&rows, 0..rows.len());
                let mut first: Option<Vec<Vec<u32>>> = None;
                for tile in tiles(&gpu, heads) {
                    for parts in [1, 3] {
                        let what = format!("{heads:?}, {kv:?}, window {window}, tile {tile:?}, {parts} parts");
                        let got = case.run(&gpu, tile, &rows, 0..rows.len(), parts);
                        for row in 0..rows.len() {
                            if CallRows::new(&call_of(&rows)).row(row).keys(case.window()).next().is_none() {
                                continue; // the window leaves this row nothing; no plan writes such a row
                            }
                            assert_close(&read(&got[row]), &want[row], 1e-5, &format!("{what}, row {row}"));
                            let first = first.get_or_insert_with(|| got.clone());
                            assert!(got[row] == first[row], "{what}: other bits than with one row and no parts in row {row}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn attention_gives_a_row_the_same_bits_in_any_call() {
    const SLOTS: usize = 1200;
    for (i, (query, key_value, dim)) in ATTENTION_SHAPES.into_iter().enumerate() {
        let kv = [KvStorage::F32, KvStorage::F16, KvStorage::Pack16][i % 3];
        let gpu = gpu(kv == KvStorage::Pack16);
        let heads = Heads { query, key_value, dim };
        // 67 rows over the end of a tile, the last ones a block in scratch; slot 1050 and behind 1160 holds NaN, and so
        // do the slots of the other half of the rows, where only those see it.
        let seen: Vec<Seen> =
            (0..67u32).map(|r| if r < 58 { (990 + r, 0..991 + r, 0..0) } else { (1048, 0..1048, 1100..1109) }).collect();
        let damaged = |slot: usize| (1040..1048).contains(&slot) || (1104..1109).contains(&slot);
        let case = AttentionCase::new(heads, kv, 0, seen.len(), SLOTS, |slot| slot < 1050 || (1100..1160).contains(&slot));
        let mut broken = AttentionCase::new(heads, kv, 0, seen.len(), SLOTS, |slot| !damaged(slot));
        let width = key_value * dim;
        for slot in (0..SLOTS).filter(|slot| !damaged(*slot)) {
            let at = slot * width..(slot + 1) * width;
            broken.keys[at.clone()].copy_from_slice(&case.keys[at.clone()]);
            broken.values[at.clone()].copy_from_slice(&case.values[at]);
        }
        let tiles = tiles(&gpu, heads);
        let (one, most) = (tiles[0], *tiles.last().unwrap());
        let wide = case.run(&gpu, most, &seen, 0..67, 1);
        let with_broken = broken.run(&gpu, most, &seen, 0..67, 1);
        let mut worst = 0;
        for row in (0..67).step_by(5).chain([65, 66]) {
            let alone = case.run(&gpu, one, &seen[row..=row], row..row + 1, 1);
            assert_eq!(alone[0], wide[row], "{heads:?}, row {row}");
            let parts = case.run(&gpu, most, &seen[row..=row], row..row + 1, 6);
            assert_eq!(parts[0], wide[row], "{heads:?}, row {row} in parts");
            let sees_damage =
                (0..SLOTS).any(|s| damaged(s) && (seen[row].1.contains(&(s as u32)) || seen[row].2.contains(&(s as u32))));
            assert_eq!(with_broken[row] != wide[row], sees_damage, "{heads:?}, row {row}: another row's NaN");
            worst += usize::from(sees_damage);
        }
        assert!(worst > 1, "the control");
        for count in [2usize, 5, 13, 16] {
            let some = case.run(&gpu, most, &seen[50..50 + count], 50..50 + count, 6);
            assert_eq!(some[..], wide[50..50 + count], "{heads:?}, {count} rows in parts");
        }
    }
}

#[test]
fn choices_ties_bans_and_numbers_that_are_none() {
    for plain in [true, false] {
        let gpu = gpu(plain);
        for vocab in [1usize, 50, 4096, 4097, 9000] {
            let stride = vocab.next_multiple_of(32);
            let mut r = Random(vocab as u64);
            let mut rows: Vec<Vec<f32>> = (0..4).map(|_| r.values(vocab).iter().map(|v| v * 20.0).collect()).collect();
            rows[1][vocab - 1] = 30.0; // a tie between the ends
            rows[1][0] = 30.0;
            rows[2][vocab / 2] = f32::NAN;
            rows[3] = vec![f32::NEG_INFINITY; vocab];
            rows[3][vocab - 1] = -5.0;
            let banned = (vocab > 1).then_some(0u32);
            let mut logits = vec![NAN; rows.len() * stride];
            for (to, row) in logits.chunks_exact_mut(stride).zip(&rows) {
                to[..vocab].copy_from_slice(&floats(row));
            }
            for banned in [None, banned] {
                let chunks = vocab.div_ceil(4096);
                let params = vec![vocab as u32, stride as u32, banned.unwrap_or(0x00ff_ffff)];
                let parts = vec![NAN; rows.len() * chunks * 4];
                let first =
                    run(&gpu, &variants::argmax(gpu.info().subgroups), &[logits.clone(), parts, params], [chunks as u32, 4, 1]);
                let merge = variants::argmax_merge(gpu.info().subgroups);
                let got = run(&gpu, &merge, &[first[1].clone(), vec![NAN; 8], vec![chunks as u32]], [1, 4, 1]);
                for (i, row) in rows.iter().enumerate() {
                    let want = argmax(row, banned);
                    let (token, probability) = (got[1][2 * i], f32::from_bits(got[1][2 * i + 1]));
                    assert_eq!(token, want.token, "vocabulary {vocab}, banned {banned:?}, row {i}");
                    let same = |p: f32| p.is_nan() && want.probability.is_nan() || (p - want.probability).abs() < 1e-5;
                    assert!(same(probability), "row {i}: {probability} {}", want.probability);
                    assert!(!same(probability + 1e-3) || want.probability.is_nan(), "the comparison is blind");
                }
            }
        }
    }
}
