//! `cargo bench --bench matmul`: what a product costs as its rows grow.
//!
//! All row counts of a shape run by turns in the same rounds, so that a busy machine slows them alike; the fastest round of each counts.
//! `cargo bench --bench matmul -- --shape 576x576q4 --tiles 1:8:1,8:4:4 --rounds 9` compares tiles
//! (rows:outputs:columns[:k_lanes[:share]], or `staged`), one line per tile and row count.
//! `--cpu-time` counts the time that threads ran instead of the time that passed: for software adapters on busy machines.

#[path = "../tests/matmul_gpu/device.rs"]
mod device;

use device::{Prepared, Random, Rig, matrix};
use forecall::gpu::matmul::{self, Binding, DeviceClass, OutputKind, Params, Tile, Variant};
use forecall::model::program::{Arrangement, LoraB, MatrixId};
use forecall::weights::packed::{Format, ScaleFormat};

struct Shape {
    name: &'static str,
    n: usize,
    k: usize,
    format: Format,
    norm: bool,
    output: OutputKind,
}

const Q4: Format = Format::Affine { bits: 4, group: 64, scale: ScaleFormat::F16 };
const Q8: Format = Format::Affine { bits: 8, group: 64, scale: ScaleFormat::F16 };

const SHAPES: [Shape; 8] = [
    Shape { name: "135M qkv", n: 960, k: 576, format: Q4, norm: true, output: OutputKind::Store },
    Shape { name: "135M o", n: 576, k: 576, format: Q4, norm: false, output: OutputKind::Residual },
    Shape { name: "135M gate_up", n: 3072, k: 576, format: Q4, norm: true, output: OutputKind::SwiGlu },
    Shape { name: "135M down", n: 576, k: 1536, format: Q4, norm: false, output: OutputKind::Residual },
    Shape { name: "135M head", n: 49152, k: 576, format: Q8, norm: true, output: OutputKind::Store },
    Shape { name: "3B o", n: 3072, k: 3072, format: Q4, norm: false, output: OutputKind::Residual },
    Shape { name: "3B gate_up", n: 18432, k: 3072, format: Q4, norm: true, output: OutputKind::SwiGlu },
    Shape { name: "3B down", n: 3072, k: 9216, format: Q4, norm: false, output: OutputKind::Residual },
];
const ROWS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

struct Options {
    shape: Option<String>,
    tiles: Vec<Tile>,
    rows: Vec<u32>,
    rounds: usize,
    lora: bool,
    plain: bool,
    cpu_time: bool,
}

fn options() -> Options {
    let mut o =
        Options { shape: None, tiles: vec![], rows: ROWS.to_vec(), rounds: 7, lora: false, plain: false, cpu_time: false };
    let mut args = std::env::args().skip(1);
    let number = |t: &str| t.parse::<u32>().unwrap_or_else(|e| panic!("`{t}`: {e}"));
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} needs a value"));
        match arg.as_str() {
            "--bench" => {}
            "--shape" => o.shape = Some(value()),
            "--rounds" => o.rounds = number(&value()) as usize,
            "--rows" => o.rows = value().split(',').map(number).collect(),
            "--lora" => o.lora = true,
            "--plain" => o.plain = true,
            "--cpu-time" => o.cpu_time = true,
            "--tiles" => {
                o.tiles = value()
                    .split(',')
                    .map(|t| {
                        if t == "staged" {
                            return Tile::staged(8);
                        }
                        let f: Vec<u32> = t.split(':').map(number).collect();
                        let at = |i: usize| f.get(i).copied();
                        Tile {
                            rows: at(0).unwrap_or(1),
                            outputs: at(1).unwrap_or(1),
                            columns: at(2).unwrap_or(1),
                            k_lanes: at(3).unwrap_or(1),
                            share: at(4).filter(|&s| s != 0),
                            staged: false,
                        }
                    })
                    .collect();
            }
            other => {
                panic!(
                    "unknown option {other}; there are --shape NAME, --rows LIST, --rounds N, --tiles LIST, --lora, --plain, --cpu-time"
                )
            }
        }
    }
    o
}

fn main() {
    let options = options();
    let mut rig = Rig::new();
    println!("{} ({:?}, {}), {:?}", rig.info.name, rig.info.backend, rig.info.driver_info, rig.class);
    for shape in &SHAPES {
        if options.shape.as_ref().is_some_and(|s| !shape.name.contains(s.as_str())) {
            continue;
        }
        bench(&mut rig, shape, &options);
    }
}

struct Case {
    rows: u32,
    tile: Tile,
    prepared: Prepared,
    times: usize,
    best: f64,
}

fn bench(rig: &mut Rig, shape: &Shape, options: &Options) {
    let mut random = Random(1);
    let weight = matrix(shape.format, shape.n, shape.k, &mut random);
    let lora_b = matrix(Format::F16, shape.n, 32, &mut random);
    let most = options.rows.iter().copied().max().unwrap_or(1) as usize;
    let stride = shape.k.next_multiple_of(32);
    let input = rig.buffer(bytemuck::cast_slice(&random.values(most * stride)));
    let hidden = rig.buffer(bytemuck::cast_slice(&random.values(most * stride.max(shape.n))));
    let vectors = rig.buffer(bytemuck::cast_slice(&random.values(2 * shape.n)));
    let inner = rig.buffer(bytemuck::cast_slice(&random.values(most * 96)));
    let output = rig.buffer(&vec![0u8; most * shape.n.next_multiple_of(32) * 4]);
    let (data, scales) = (rig.buffer(bytemuck::cast_slice(&weight.data)), rig.buffer(bytemuck::cast_slice(&weight.scales)));
    let b = rig.buffer(bytemuck::cast_slice(&lora_b.data));
    let bytes = (weight.data.len() + weight.scales.len()) * 4;

    let mut cases = Vec::new();
    for &rows in &options.rows {
        let mut words = [0u32; 16];
        words[..5].copy_from_slice(&[rows, 0, if options.lora { rows } else { 0 }, 0, rows]);
        let call = rig.buffer(bytemuck::cast_slice(&words));
        let tiles = if options.tiles.is_empty() {
            let mut tiles = vec![matmul::tile(rig.class, rows, shape.n as u32)];
            if matches!(rig.class, DeviceClass::Cpu { subgroup: Some(_) }) {
                tiles.push(matmul::tile(DeviceClass::Cpu { subgroup: None }, rows, shape.n as u32));
            }
            tiles
        } else {
            options.tiles.iter().copied().filter(|t| t.rows <= rows).collect()
        };
        for tile in tiles {
            let interleaved = shape.output == OutputKind::SwiGlu;
            let variant = Variant {
                weight: shape.format,
                norm: shape.norm && !options.plain,
                bias: false,
                lora: options.lora.then_some(Format::F16),
                output: if options.plain { OutputKind::Store } else { shape.output },
                tile,
            };
            let mut params = Params::new(&weight, tile);
            params.input_stride = stride as u32;
            params.output_stride = shape.n as u32;
            params.hidden = shape.k as u32;
            params.hidden_stride = stride.max(shape.n) as u32;
            params.eps = 1e-5;
            let spec = LoraB {
                b: MatrixId(0),
                rank: 32,
                scale: 2.0,
                segment_starts: if shape.name.ends_with("qkv") { [576, 768] } else { [shape.n; 2] },
                arrangement: if interleaved { Arrangement::Interleaved } else { Arrangement::Stacked },
            };
            params.set_lora(&spec, Format::F16, 96);
            let prepared = rig.prepare(&variant, &params, rows, |binding| {
                match binding {
                    Binding::Params | Binding::Call => &call,
                    Binding::Weights => &data,
                    Binding::Scales => &scales,
                    Binding::Input => &input,
                    Binding::NormInput | Binding::Hidden => &hidden,
                    Binding::Output => &output,
                    Binding::Vectors => &vectors,
                    Binding::LoraB => &b,
                    Binding::Lora => &inner,
                }
                .clone()
            });
            let first = rig.run(&prepared, 1).min(rig.run(&prepared, 1));
            let times = ((0.008 / first) as usize).clamp(1, 100);
            cases.push(Case { rows, tile, prepared, times, best: f64::INFINITY });
        }
    }
    for _ in 0..options.rounds {
        for case in &mut cases {
            case.best = case.best.min(rig.seconds(&case.prepared, case.times, options.cpu_time));
        }
    }
    let one_row = cases.iter().filter(|c| c.rows == 1).map(|c| c.best).fold(f64::INFINITY, f64::min);
    println!("\n{}: {} -> {}, {:?}, {:.2} MB", shape.name, shape.k, shape.n, shape.format, bytes as f64 / 1e6);
    println!("rows  tile                      ms   x best one-row     GB/s   GFLOP/s");
    for c in &cases {
        let t = c.tile;
        println!(
            "{:4}  {:18} {:10.3} {:12.2} {:12.2} {:9.2}",
            c.rows,
            format!("{}:{}:{}:{}:{}", t.rows, t.outputs, t.columns, t.k_lanes, t.share.unwrap_or(0)),
            c.best * 1e3,
            c.best / one_row,
            bytes as f64 / c.best / 1e9,
            2.0 * f64::from(c.rows) * (shape.n * shape.k) as f64 / c.best / 1e9,
        );
    }
}
