//! The matmul kernel on a device: against its f64 twin, and one row alone against the same row among others, bit for bit.

mod device;

use std::ops::Range;
use std::sync::{LazyLock, Mutex, PoisonError};

use device::{Random, Rig, matrix};
use forecall::gpu::matmul::{Binding, DeviceClass, OutputKind, Params, Tile, Variant, examples, tile};
use forecall::kernels::matmul::{self as twin, Lora, Norm, Operands};
use forecall::model::program::{Arrangement, LoraB, MatrixId, RowSet};
use forecall::weights::packed::{Format, PackedRows, ScaleFormat};

/// One device for all tests, so that each pipeline is compiled once.
static RIG: LazyLock<Mutex<Rig>> = LazyLock::new(|| Mutex::new(Rig::new()));

const EPS: f32 = 1e-3;
const RANK: usize = 12;

/// A product with everything it may read.
struct Problem {
    weight: PackedRows,
    lora_b: Option<(PackedRows, LoraB)>,
    norm: bool,
    bias: bool,
    output: OutputKind,
    rows: RowSet,
    input: Vec<f32>,
    hidden: Vec<f32>,
    inner: Vec<f32>,
    vectors: Vec<f32>,
    t: usize,
    adapter: Range<usize>,
    choose: Range<usize>,
}

/// What a run wrote: the output `[t, stride]` and H.
#[derive(PartialEq, Debug, Clone)]
struct Written {
    output: Vec<f32>,
    hidden: Vec<f32>,
}

impl Problem {
    #[allow(clippy::too_many_arguments, reason = "a table of cases")]
    fn new(
        format: Format,
        n: usize,
        k: usize,
        lora: Option<Format>,
        norm: bool,
        bias: bool,
        output: OutputKind,
        rows: RowSet,
    ) -> Self {
        let mut random = Random(n as u64 * 131 + k as u64);
        let t = if n > 64 { 70 } else { 19 };
        let weight = matrix(format, n, k, &mut random);
        let arrangement = if output == OutputKind::SwiGlu { Arrangement::Interleaved } else { Arrangement::Stacked };
        let lora_b = lora.map(|f| {
            let spec = LoraB { b: MatrixId(0), rank: RANK, scale: 1.5, segment_starts: [n / 2 - 1, n - 3], arrangement };
            (matrix(f, n, RANK, &mut random), spec)
        });
        let (stride, hidden_stride) = (k.next_multiple_of(32), k.max(n).next_multiple_of(32));
        let mut input = random.values(t * stride);
        let mut hidden = random.values(t * hidden_stride);
        for r in 0..t {
            input[r * stride + k..(r + 1) * stride].fill(0.0);
            hidden[r * hidden_stride + k.max(n)..(r + 1) * hidden_stride].fill(0.0);
        }
        let mut inner = random.values(t * 64);
        let adapter = 5..t - 2;
        for r in (0..t).filter(|r| !adapter.contains(r)) {
            inner[r * 64..(r + 1) * 64].fill(f32::NAN); // stale
        }
        let vectors = random.values(2 * n + 3);
        Self { weight, lora_b, norm, bias, output, rows, input, hidden, inner, vectors, t, adapter, choose: 3..13 }
    }

    fn covered(&self) -> Range<usize> {
        match self.rows {
            RowSet::All => 0..self.t,
            RowSet::Adapter => self.adapter.clone(),
            RowSet::Choose => self.choose.clone(),
        }
    }

    fn strides(&self) -> (usize, usize, usize) {
        let output = if self.output == OutputKind::SwiGlu { self.weight.n / 2 } else { self.weight.n };
        (self.weight.k.next_multiple_of(32), self.weight.k.max(self.weight.n).next_multiple_of(32), output.next_multiple_of(32))
    }

    /// The width that norms are over: k, the width of H in a real model.
    fn width(&self) -> usize {
        self.weight.k
    }

    fn variant(&self, tile: Tile) -> Variant {
        Variant {
            weight: self.weight.format,
            norm: self.norm,
            bias: self.bias,
            lora: self.lora_b.as_ref().map(|(b, _)| b.format),
            output: self.output,
            tile,
        }
    }

    /// Row `r` as a problem of its own.
    fn alone(&self, r: usize) -> Self {
        let (stride, hidden_stride, _) = self.strides();
        let inside = |range: &Range<usize>| 0..usize::from(range.contains(&r));
        Self {
            weight: self.weight.clone(),
            lora_b: self.lora_b.clone(),
            input: self.input[r * stride..(r + 1) * stride].to_vec(),
            hidden: self.hidden[r * hidden_stride..(r + 1) * hidden_stride].to_vec(),
            inner: self.inner[r * 64..(r + 1) * 64].to_vec(),
            vectors: self.vectors.clone(),
            t: 1,
            adapter: inside(&self.adapter),
            choose: inside(&self.choose),
            ..*self
        }
    }

    fn run(&self, rig: &mut Rig, tile: Tile) -> Written {
        let (stride, hidden_stride, output_stride) = self.strides();
        let n = self.weight.n;
        let mut params = Params::new(&self.weight, tile);
        params.input_stride = stride as u32;
        params.output_stride = output_stride as u32;
        params.hidden = self.width() as u32;
        params.hidden_stride = hidden_stride as u32;
        params.eps = EPS;
        params.bias_at = 3;
        params.gain_at = 3 + n as u32;
        params.set_rows(self.rows);
        if let Some((b, spec)) = &self.lora_b {
            params.set_lora(spec, b.format, 64);
        }
        let mut words = [0u32; 16];
        let header = [self.t, self.adapter.start, self.adapter.end, self.choose.start, self.choose.end];
        words.iter_mut().zip(header).for_each(|(w, v)| *w = v as u32);
        // NaN before, and a guard row behind: a kernel that writes too little or too much is seen.
        let output = rig.buffer(bytemuck::cast_slice(&vec![f32::NAN; (self.t + 1) * output_stride]));
        let hidden = rig.buffer(bytemuck::cast_slice(&self.hidden));
        let (call, data) = (rig.buffer(bytemuck::cast_slice(&words)), rig.buffer(bytemuck::cast_slice(&self.weight.data)));
        let (scales, input) =
            (rig.buffer(bytemuck::cast_slice(&self.weight.scales)), rig.buffer(bytemuck::cast_slice(&self.input)));
        let (vectors, inner) = (rig.buffer(bytemuck::cast_slice(&self.vectors)), rig.buffer(bytemuck::cast_slice(&self.inner)));
        let b = rig.buffer(self.lora_b.as_ref().map_or(&[], |(b, _)| bytemuck::cast_slice(&b.data)));
        let prepared = rig.prepare(&self.variant(tile), &params, self.covered().len() as u32, |binding| {
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
        rig.run(&prepared, 1);
        Written { output: rig.read(&output), hidden: rig.read(&hidden) }
    }

    /// What the twin makes of it; NaN where nothing is written.
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let (stride, hidden_stride, output_stride) = self.strides();
        let n = self.weight.n;
        let operands = Operands {
            weight: &self.weight,
            input: &self.input,
            stride,
            rows: self.covered(),
            norm: self.norm.then(|| Norm { h: &self.hidden, stride: hidden_stride, width: self.width(), eps: f64::from(EPS) }),
            bias: self.bias.then(|| &self.vectors[3..3 + n]),
            lora: self.lora_b.as_ref().map(|(b, spec)| Lora {
                spec: *spec,
                b,
                inner: &self.inner,
                stride: 64,
                adapter: self.adapter.clone(),
            }),
        };
        let y = twin::product(&operands);
        let mut hidden: Vec<f64> = self.hidden.iter().map(|&v| f64::from(v)).collect();
        let mut output = vec![f64::NAN; (self.t + 1) * output_stride];
        let first = if self.rows == RowSet::Choose { 0 } else { self.covered().start };
        match self.output {
            OutputKind::Store => twin::store(&y, n, first, output_stride, &mut output),
            OutputKind::SwiGlu => twin::swiglu(&y, n, output_stride, &mut output),
            OutputKind::Residual => {
                for (r, row) in y.chunks_exact(n).enumerate() {
                    for (o, value) in row.iter().enumerate() {
                        let h = hidden[r * hidden_stride + o] + value;
                        hidden[r * hidden_stride + o] = h;
                        output[r * output_stride + o] = h * f64::from(self.vectors[3 + n + o]);
                    }
                }
            }
        }
        (output, hidden)
    }
}

/// Largest difference; infinite where one is NaN and the other is not.
fn difference(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let one = |(&g, &e): (&f32, &f64)| match (g.is_nan(), e.is_nan()) {
        (true, true) => 0.0,
        (false, false) => (f64::from(g) - e).abs(),
        _ => f64::INFINITY,
    };
    got.iter().zip(expected).map(one).fold(0.0, f64::max)
}

/// f32 sums of at most 600 products of the order of 0.05 each, and what comes after: far below this, far above f32's step.
const BOUND: f64 = 2e-5;

const fn affine(bits: u32, group: usize, scale: ScaleFormat) -> Format {
    Format::Affine { bits, group, scale }
}

/// Every format, every epilogue, sizes that are no multiples of tiles or blocks.
fn problems() -> Vec<(&'static str, Problem)> {
    use OutputKind::{Residual, Store, SwiGlu};
    use RowSet::{Adapter, All, Choose};
    let (half, brain) = (ScaleFormat::F16, ScaleFormat::Bf16);
    vec![
        ("q4 g64 norm store", Problem::new(affine(4, 64, half), 43, 576, None, true, false, Store, Choose)),
        // More rows and outputs than a workgroup of any tile has.
        ("q4 g32 swiglu, large", Problem::new(affine(4, 32, half), 140, 288, Some(Format::F16), true, false, SwiGlu, All)),
        ("q4 g32 bf16 residual", Problem::new(affine(4, 32, brain), 30, 96, Some(Format::F32), false, true, Residual, All)),
        ("q4 g128 swiglu", Problem::new(affine(4, 128, half), 36, 160, Some(Format::F16), true, true, SwiGlu, All)),
        ("q8 g64 swiglu", Problem::new(affine(8, 64, brain), 20, 64, None, true, false, SwiGlu, All)),
        ("q8 g32 residual", Problem::new(affine(8, 32, half), 27, 72, Some(Format::F16), false, false, Residual, All)),
        ("f16 residual", Problem::new(Format::F16, 21, 72, Some(Format::F16), false, true, Residual, All)),
        ("f16 store", Problem::new(Format::F16, 17, 72, None, true, true, Store, Adapter)),
        ("f32 store", Problem::new(Format::F32, 25, 70, Some(Format::F32), true, false, Store, All)),
    ]
}

fn tiles(class: DeviceClass) -> Vec<(&'static str, Vec<Tile>)> {
    let of = |rows, outputs, columns, k_lanes, share| Tile { rows, outputs, columns, k_lanes, share, staged: false };
    let mut k1: Vec<Tile> = vec![of(1, 4, 1, 1, None), of(3, 2, 2, 1, None), of(8, 1, 1, 1, None)];
    if let DeviceClass::Cpu { subgroup: Some(_) } = class {
        k1.extend([tile(class, 1, 64), tile(class, 2, 2048), tile(class, 19, 64)]);
    }
    let gpu = [(1, 64), (3, 4096), (8, 64), (13, 4096), (64, 64)].map(|(rows, n)| tile(DeviceClass::Gpu, rows, n)).to_vec();
    assert!(gpu.iter().any(|t| t.staged));
    vec![("one k-lane", k1), ("eight k-lanes", gpu)]
}

#[test]
fn agrees_with_the_twin() {
    let mut rig = RIG.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, problem) in problems() {
        let (output, hidden) = problem.expected();
        for (kind, tiles) in tiles(rig.class) {
            for tile in tiles {
                let got = problem.run(&mut rig, tile);
                let worst = difference(&got.output, &output).max(difference(&got.hidden, &hidden));
                assert!(worst < BOUND, "{name}, {kind}, {tile:?}: off by {worst:e}");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_neighbours_or_on_the_tile() {
    let mut rig = RIG.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, problem) in problems() {
        let (_, hidden_stride, output_stride) = problem.strides();
        for (kind, tiles) in tiles(rig.class) {
            let alone: Vec<_> = [5, problem.covered().end - 1].map(|r| (r, problem.alone(r).run(&mut rig, tiles[0]))).to_vec();
            for &tile in &tiles {
                let wide = problem.run(&mut rig, tile);
                for (r, alone) in &alone {
                    let at = if problem.rows == RowSet::Choose { r - problem.choose.start } else { *r };
                    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    let written = |w: &Written, at: usize, r: usize| {
                        (
                            bits(&w.output[at * output_stride..][..output_stride]),
                            bits(&w.hidden[r * hidden_stride..][..hidden_stride]),
                        )
                    };
                    assert!(
                        written(alone, 0, 0) == written(&wide, at, *r),
                        "{name}, {kind}, {tile:?}: row {r} differs from the same row alone"
                    );
                }
            }
        }
    }
}

/// The judges above can go red: a weight, a neighbour's row and an adapter row changed are all seen.
#[test]
fn the_judges_see_a_perturbation() {
    let mut rig = RIG.lock().unwrap_or_else(PoisonError::into_inner);
    let tile = tile(DeviceClass::Cpu { subgroup: None }, 4, 64);
    let base = || Problem::new(Format::F32, 25, 70, Some(Format::F32), true, false, OutputKind::Store, RowSet::All);
    let (expected, _) = base().expected();
    let mut changed = base();
    changed.weight.data[0] = (f32::from_bits(changed.weight.data[0]) + 1e-3).to_bits();
    assert!(difference(&changed.run(&mut rig, tile).output, &expected) > BOUND);
    let mut changed = base();
    changed.adapter = 4..17;
    assert!(difference(&changed.run(&mut rig, tile).output, &expected) > BOUND, "row 4 must be off, or NaN");
    let mut changed = base();
    changed.input[6 * 96] += 1e-3;
    let (before, after) = (base().run(&mut rig, tile).output, changed.run(&mut rig, tile).output);
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&before[..6 * 32]), bits(&after[..6 * 32]));
    assert_ne!(bits(&before[6 * 32..7 * 32]), bits(&after[6 * 32..7 * 32]));
}

/// Every combination a loader can ask for is valid WGSL and within WebGPU's default limits.
#[test]
fn every_variant_is_valid_under_default_limits() {
    let formats = [
        affine(4, 64, ScaleFormat::F16),
        affine(4, 64, ScaleFormat::Bf16),
        affine(8, 64, ScaleFormat::F16),
        affine(8, 64, ScaleFormat::Bf16),
        Format::F16,
        Format::F32,
    ];
    let variants = examples(&formats);
    assert!(variants.len() > 500, "{}", variants.len());
    for variant in &variants {
        check(variant);
    }
}

fn check(variant: &Variant) {
    let text = device::module_text(&forecall::gpu::variants::product(variant));
    let module = naga::front::wgsl::parse_str(&text).unwrap_or_else(|e| panic!("{variant:?}: {}", e.emit_to_string(&text)));
    let info = naga::valid::Validator::new(naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all())
        .validate(&module)
        .unwrap_or_else(|e| panic!("{variant:?}: {}", e.emit_to_string(&text)));
    check_params(&module);
    let size = module.entry_points[0].workgroup_size;
    assert_eq!(size, [variant.tile.invocations(), 1, 1]);
    assert!(size[0] <= 256, "{variant:?}");
    let (mut storage, mut workgroup, mut bindings) = (0, 0, Vec::new());
    for (handle, variable) in module.global_variables.iter() {
        if info.get_entry_point(0)[handle].is_empty() {
            continue;
        }
        storage += u32::from(matches!(variable.space, naga::AddressSpace::Storage { .. }));
        if variable.space == naga::AddressSpace::WorkGroup {
            workgroup += module.types[variable.ty].inner.size(module.to_ctx());
        }
        bindings.extend(variable.binding.map(|b| b.binding));
    }
    assert!(storage <= 8 && workgroup <= 16384, "{variant:?}: {storage} storage buffers, {workgroup} bytes");
    let mut named: Vec<u32> = variant.bindings().into_iter().map(|b| b as u32).collect();
    (bindings.sort_unstable(), named.sort_unstable());
    assert_eq!(bindings, named, "{variant:?}");
}

/// The shader's parameters lie where Rust writes them.
fn check_params(module: &naga::Module) {
    macro_rules! fields {
        ($($field:ident),*) => { [$((stringify!($field), std::mem::offset_of!(Params, $field))),*] };
    }
    let expected = fields!(
        n,
        blocks,
        groups,
        runs,
        run_blocks,
        runs_per_group,
        input_stride,
        output_stride,
        row_set,
        hidden,
        hidden_stride,
        eps,
        bias_at,
        gain_at,
        lora_blocks,
        lora_rank,
        lora_stride,
        lora_scale,
        lora_interleaved,
        segment_1,
        segment_2
    );
    let (_, found) = module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some("Params")).expect("Params is declared");
    let naga::TypeInner::Struct { members, span } = &found.inner else { panic!("Params is a struct") };
    assert_eq!(*span as usize, size_of::<Params>());
    let named = members.iter().map(|m| (m.name.as_deref().unwrap_or(""), m.offset as usize));
    assert_eq!(named.take(expected.len()).collect::<Vec<_>>(), expected);
}
