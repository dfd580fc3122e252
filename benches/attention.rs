//! `cargo bench --bench attention`: what attention of a layer costs as a call's rows and its cache grow.
//!
//! Rows are causal and stand behind the cache, as a prompt's or a draft's do. All cases run by turns in the same rounds, so that a
//! busy machine slows them alike; the fastest round of each counts.
//! `-- --shape 135M --cache 2000 --rows 1,13 --rounds 9 --cpu-time`: the last counts the time that threads ran instead of the
//! time that passed, for software adapters on busy machines.

#[allow(dead_code, reason = "products have more needs")]
#[path = "../tests/matmul_gpu/device.rs"]
mod device;

use device::{Prepared, Random, Rig};
use forecall::gpu::attention::{Attention, part_bytes};
use forecall::gpu::footprint::Limits;
use forecall::gpu::matmul::DeviceClass;
use forecall::gpu::variants::{self, KvStorage};
use forecall::kernels::Heads;
use forecall::model::call_rows::HEADER_WORDS;

struct Shape {
    name: &'static str,
    query: u32,
    key_value: u32,
    dim: u32,
}

const SHAPES: [Shape; 3] = [
    Shape { name: "135M", query: 9, key_value: 3, dim: 64 },
    Shape { name: "0.6B", query: 16, key_value: 8, dim: 128 },
    Shape { name: "3B", query: 32, key_value: 8, dim: 128 },
];

struct Options {
    shape: String,
    cache: Vec<u32>,
    rows: Vec<u32>,
    rounds: usize,
    cpu_time: bool,
    /// K/V in packed halves, as devices without shader-f16 have them.
    pack16: bool,
    /// As on a GPU.
    gpu: bool,
    /// Split along the cache, without the merge.
    split: bool,
    /// Rows of a workgroup, and the subgroup size if neighbours share.
    tile: Option<(u32, Option<u32>)>,
}

fn options() -> Options {
    let mut o = Options {
        shape: "135M".to_owned(),
        cache: vec![128, 512, 2000],
        rows: vec![1, 2, 4, 8, 13, 16, 64],
        rounds: 5,
        cpu_time: false,
        pack16: false,
        gpu: false,
        split: false,
        tile: None,
    };
    let mut args = std::env::args().skip(1);
    let number = |t: &str| t.parse::<u32>().unwrap_or_else(|e| panic!("`{t}`: {e}"));
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} needs a value"));
        match arg.as_str() {
            "--bench" => {}
            "--shape" => o.shape = value(),
            "--cache" => o.cache = value().split(',').map(number).collect(),
            "--rows" => o.rows = value().split(',').map(number).collect(),
            "--rounds" => o.rounds = number(&value()) as usize,
            "--cpu-time" => o.cpu_time = true,
            "--pack16" => o.pack16 = true,
            "--gpu" => o.gpu = true,
            "--split" => o.split = true,
            "--tile" => {
                let text = value();
                let (rows, share) = text.split_once(':').unwrap_or((&text, "0"));
                o.tile = Some((number(rows), Some(number(share)).filter(|lanes| *lanes > 0)));
            }
            other => panic!(
                "unknown option {other}; there are --shape, --cache, --rows, --rounds, --cpu-time, --pack16, --gpu, --split, --tile"
            ),
        }
    }
    o
}

struct Case {
    cache: u32,
    rows: u32,
    prepared: Prepared,
    times: usize,
    best: f64,
}

fn main() {
    let options = options();
    let rig = Rig::new();
    println!("{} ({:?}, {}), {:?}", rig.info.name, rig.info.backend, rig.info.driver_info, rig.class);
    for shape in SHAPES.iter().filter(|shape| shape.name.contains(&options.shape)) {
        bench(&rig, shape, &options);
    }
}

fn bench(rig: &Rig, shape: &Shape, options: &Options) {
    let features = rig.device.features();
    let kv = if features.contains(wgpu::Features::SHADER_F16) && !options.pack16 { KvStorage::F16 } else { KvStorage::Pack16 };
    let heads = Heads { query: shape.query as usize, key_value: shape.key_value as usize, dim: shape.dim as usize };
    let attention = Attention::new(if options.gpu { DeviceClass::Gpu } else { rig.class }, kv, heads, u64::from(options.split));
    let most = |list: &[u32]| list.iter().copied().max().unwrap_or(1);
    let slots = most(&options.cache) + most(&options.rows) + 160;
    let stride = ((shape.query + 2 * shape.key_value) * shape.dim).next_multiple_of(32);
    let attn_stride = (shape.query * shape.dim).next_multiple_of(32);
    let mut random = Random(1);
    let qkv = rig.buffer(bytemuck::cast_slice(&random.values((most(&options.rows) * stride) as usize)));
    let per_slot = shape.key_value * shape.dim.next_multiple_of(4);
    let halves: Vec<_> = random.values((2 * slots * per_slot) as usize).into_iter().map(half::f16::from_f32).collect();
    let cache = rig.buffer(bytemuck::cast_slice(&halves));
    let attn = rig.buffer(&vec![0; (most(&options.rows) * attn_stride * 4) as usize]);
    let scale = (1.0 / (shape.dim as f32).sqrt()).to_bits();
    let params = [shape.query, shape.key_value, shape.dim, stride, attn_stride, slots, 0, scale];
    let params = rig.buffer(bytemuck::cast_slice(&params));
    let parts = rig.buffer(&vec![0; part_bytes(heads, slots, Limits::default()).max(16) as usize]);

    let mut cases = Vec::new();
    for &length in &options.cache {
        for &rows in &options.rows {
            let mut words = vec![0; HEADER_WORDS];
            words[0] = rows;
            for row in 0..rows {
                let position = length + row;
                words.extend([0, position, position, 0, position + 1, slots - 160, slots - 160, 1f32.to_bits()]);
            }
            let call = rig.buffer(bytemuck::cast_slice(&words));
            let kernel = match options.tile {
                Some((rows, share)) => variants::attention(kv, share, rows, attention.heads(), shape.dim.div_ceil(4)),
                None => attention.kernel(attention.rows(rows)),
            };
            let tile_rows = options.tile.map_or(attention.rows(rows), |(rows, _)| rows);
            let [x, _, z] = attention.grid(rows, if options.split { attention.parts(rows, length + rows) } else { 1 });
            let grid = [x, rows.div_ceil(tile_rows), z];
            let prepared = rig.prepare_kernel(&kernel, &[&qkv, &cache, &attn, &call, &params, &parts], grid);
            let first = rig.run(&prepared, 1).min(rig.run(&prepared, 1));
            cases.push(Case {
                cache: length,
                rows,
                prepared,
                times: ((0.01 / first) as usize).clamp(1, 100),
                best: f64::INFINITY,
            });
        }
    }
    for _ in 0..options.rounds {
        for case in &mut cases {
            case.best = case.best.min(rig.seconds(&case.prepared, case.times, options.cpu_time));
        }
    }
    println!("\n{}: {} query heads, {} key heads of {}, {kv:?}", shape.name, shape.query, shape.key_value, shape.dim);
    println!("cache  rows         ms   x one row");
    for c in &cases {
        let one = cases.iter().filter(|o| o.cache == c.cache && o.rows == 1).map(|o| o.best).fold(f64::NAN, f64::min);
        println!("{:5} {:5} {:10.3} {:11.2}", c.cache, c.rows, c.best * 1e3, c.best / one);
    }
}
