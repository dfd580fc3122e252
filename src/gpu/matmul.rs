//! Matrix products: which compiled kernel a product uses, its parameters and its grid. The kernel is `shaders/matmul.wgsl`.

use super::shader::{Setting, Value};
use crate::model::program::{Arrangement, LoraB, RowSet};
use crate::weights::packed::{Format, PackedRows, ScaleFormat, TILE};

/// The part of a product that one workgroup and one thread own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows of a thread: each weight it loads and unpacks serves all of them.
    pub rows: u32,
    /// Tiles of 8 outputs of a thread (one output of each): each input it loads serves all of them.
    pub outputs: u32,
    /// Groups of threads side by side along the outputs.
    pub columns: u32,
    /// Threads that share the inputs of an output between them. The only one of these numbers that results depend on:
    /// the same for every row count on a device.
    pub k_lanes: u32,
    /// Subgroup lanes that hand each other the inputs (4 or 8); `None`: every thread reads its own.
    pub share: Option<u32>,
}

impl Tile {
    /// Invocations of a workgroup.
    #[must_use]
    pub fn invocations(self) -> u32 {
        8 * self.columns * self.k_lanes
    }

    /// Outputs of a workgroup.
    #[must_use]
    pub fn outputs_per_workgroup(self) -> u32 {
        8 * self.outputs * self.columns
    }

    /// Workgroups for `rows` rows and `n` outputs: row chunks along x, so that those that share weights run together;
    /// outputs along y, and along z what exceeds 65535.
    #[must_use]
    pub fn grid(self, rows: u32, n: u32) -> [u32; 3] {
        let groups = n.div_ceil(self.outputs_per_workgroup());
        let y = groups.min(65535);
        [rows.div_ceil(self.rows), y, groups.div_ceil(y.max(1))]
    }

    /// Rows whose partial sums are added up at a time, so that they take at most 8 KB of workgroup memory (16 where a
    /// single row needs it).
    fn pass_rows(self) -> u32 {
        let fits = |p: &u32| self.rows % p == 0 && self.invocations() * p * self.outputs * 4 <= 8192;
        (1..=self.rows).rev().find(fits).unwrap_or(1)
    }
}

/// What kind of device the tiles are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceClass {
    /// A software adapter: a workgroup is a loop over SIMD vectors of lanes.
    Cpu {
        /// Its subgroup size, if shaders may use subgroups and it is 4 or 8.
        subgroup: Option<u32>,
    },
    /// A real GPU.
    Gpu,
}

/// The tile for `rows` rows on a device.
#[must_use]
pub fn tile(class: DeviceClass, rows: u32) -> Tile {
    match class {
        DeviceClass::Cpu { subgroup } => {
            let chunks = rows.div_ceil(8).max(1);
            let rows = rows.div_ceil(chunks).max(1);
            let outputs = if rows <= 4 { 8 } else { 4 };
            Tile { rows, outputs, columns: 2, k_lanes: 1, share: subgroup }
        }
        DeviceClass::Gpu => {
            let rows = match rows {
                0..=2 => rows.max(1),
                3..=4 => 4,
                5..=8 => 8,
                _ => 16,
            };
            let outputs = match rows {
                1..=2 => 2,
                4..=8 => 4,
                _ => 2,
            };
            Tile { rows, outputs, columns: 1, k_lanes: 8, share: None }
        }
    }
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputKind {
    /// Stored.
    Store,
    /// Added to the residual stream.
    Residual,
    /// Gate and up combined.
    SwiGlu,
}

/// One compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Storage of the weights; the group does not matter.
    pub weight: Format,
    /// Whether rows are divided by their RMS.
    pub norm: bool,
    /// Whether a bias is added.
    pub bias: bool,
    /// Storage of LoRA's B (f16 or f32), if it is added.
    pub lora: Option<Format>,
    /// What becomes of the product.
    pub output: OutputKind,
    /// Geometry.
    pub tile: Tile,
}

impl Variant {
    /// Settings of `shaders/matmul.wgsl`.
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        let weights = match self.weight {
            Format::Affine { bits: 4, .. } => "shared/weights_q4.wgsl",
            Format::Affine { .. } => "shared/weights_q8.wgsl",
            Format::F16 => "shared/weights_f16.wgsl",
            Format::F32 => "shared/weights_f32.wgsl",
        };
        let lora = match self.lora {
            None => "matmul/lora_none.wgsl",
            Some(Format::F32) => "matmul/lora_f32.wgsl",
            Some(_) => "matmul/lora_f16.wgsl",
        };
        let output = match self.output {
            OutputKind::Store => "matmul/output_store.wgsl",
            OutputKind::Residual => "matmul/output_residual.wgsl",
            OutputKind::SwiGlu => "matmul/output_swiglu.wgsl",
        };
        let mut settings = vec![
            ("weights", Value::Text(weights)),
            ("norm", Value::Text(if self.norm { "matmul/norm_rms.wgsl" } else { "matmul/norm_none.wgsl" })),
            ("bias", Value::Text(if self.bias { "matmul/bias_add.wgsl" } else { "matmul/bias_none.wgsl" })),
            ("lora", Value::Text(lora)),
            ("output", Value::Text(output)),
            ("R", Value::U32(self.tile.rows)),
            ("NO", Value::U32(self.tile.outputs)),
            ("COLUMNS", Value::U32(self.tile.columns)),
            ("KL", Value::U32(self.tile.k_lanes)),
            ("PASS_ROWS", Value::U32(self.tile.pass_rows())),
        ];
        match self.weight {
            Format::Affine { scale, .. } => settings.push((
                "scale",
                Value::Text(match scale {
                    ScaleFormat::F16 => "shared/scale_f16.wgsl",
                    ScaleFormat::Bf16 => "shared/scale_bf16.wgsl",
                }),
            )),
            Format::F16 | Format::F32 => settings.push(("scales", Value::Text("matmul/scales_none.wgsl"))),
        }
        if let Some(lanes) = self.tile.share {
            settings.push(("inputs", Value::Text("matmul/inputs_shuffle.wgsl")));
            settings.push(("SUBGROUP", Value::U32(lanes)));
        }
        settings
    }

    /// The bindings it reads, in order; its bind group holds these and no others.
    #[must_use]
    pub fn bindings(&self) -> Vec<Binding> {
        let mut list = vec![Binding::Params, Binding::Call, Binding::Weights];
        if matches!(self.weight, Format::Affine { .. }) {
            list.push(Binding::Scales);
        }
        list.push(Binding::Input);
        if self.norm {
            list.push(Binding::NormInput);
        }
        list.push(Binding::Output);
        if self.bias || self.output == OutputKind::Residual {
            list.push(Binding::Vectors);
        }
        if self.lora.is_some() {
            list.extend([Binding::LoraB, Binding::Lora]);
        }
        if self.output == OutputKind::Residual {
            list.push(Binding::Hidden);
        }
        list
    }
}

/// A binding of the kernel; its number is the discriminant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Binding {
    /// [`Params`], uniform.
    Params = 0,
    /// The header of the call's rows ([`crate::model::call_rows`]), uniform, 64 bytes.
    Call = 1,
    /// Weight blocks, storage, read.
    Weights = 2,
    /// Scale and bias pairs, storage, read.
    Scales = 3,
    /// Input activations, storage, read.
    Input = 4,
    /// H of the rows to normalise by, storage, read.
    NormInput = 5,
    /// Where the product goes (X, for [`OutputKind::Residual`]), storage, written.
    Output = 6,
    /// Biases and gains, storage, read.
    Vectors = 7,
    /// Blocks of LoRA's B, storage, read.
    LoraB = 8,
    /// LoRA's inner activations, storage, read.
    Lora = 9,
    /// H that the product is added to, storage, read and written.
    Hidden = 10,
}

/// Parameters of one product, as the shader reads them. Strides count values and are multiples of 4.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Outputs.
    pub n: u32,
    /// Blocks along the inputs.
    pub blocks: u32,
    /// Scale groups along the inputs.
    pub groups: u32,
    /// Runs along the inputs; a run is what one k-lane takes at a time.
    pub runs: u32,
    /// Blocks of a run.
    pub run_blocks: u32,
    /// Runs that share a scale.
    pub runs_per_group: u32,
    /// Row stride of the input.
    pub input_stride: u32,
    /// Row stride of the output.
    pub output_stride: u32,
    /// Rows covered: 0 all, 1 adapter's, 2 choosing.
    pub row_set: u32,
    /// D, for norms.
    pub hidden: u32,
    /// Row stride of H.
    pub hidden_stride: u32,
    /// Added to the mean square.
    pub eps: f32,
    /// Where the bias starts in the vectors.
    pub bias_at: u32,
    /// Where the gain starts in the vectors.
    pub gain_at: u32,
    /// Blocks along the ranks of LoRA's B.
    pub lora_blocks: u32,
    /// Rank; a multiple of 4.
    pub lora_rank: u32,
    /// Row stride of LoRA's inner activations.
    pub lora_stride: u32,
    /// `lora_alpha / r`.
    pub lora_scale: f32,
    /// 1 if the segment of output `o` is `o % 2`.
    pub lora_interleaved: u32,
    /// First output of the second segment.
    pub segment_1: u32,
    /// First output of the third segment.
    pub segment_2: u32,
    /// Zero.
    pub pad: [u32; 3],
}

impl Params {
    /// Sizes of the weights, read by `tile`'s kernel.
    #[must_use]
    pub fn new(weight: &PackedRows, tile: Tile) -> Self {
        let blocks = weight.blocks() as u32;
        let group_blocks = weight.format.group().map_or(4, |g| (g / weight.format.values_per_block()) as u32);
        let run_blocks = if tile.k_lanes == 1 { group_blocks } else { 1 };
        Self {
            n: weight.n as u32,
            blocks,
            groups: weight.groups() as u32,
            runs: blocks.div_ceil(run_blocks),
            run_blocks,
            runs_per_group: group_blocks / run_blocks,
            ..Self::default()
        }
    }

    /// Adds LoRA's part; B holds `ranks_per_block` ranks in a block.
    pub fn set_lora(&mut self, lora: &LoraB, b: Format, stride: u32) {
        self.lora_blocks = lora.rank.div_ceil(b.values_per_block()) as u32;
        self.lora_rank = lora.rank as u32;
        self.lora_stride = stride;
        self.lora_scale = lora.scale;
        self.lora_interleaved = u32::from(lora.arrangement == Arrangement::Interleaved);
        [self.segment_1, self.segment_2] = lora.segment_starts.map(|s| s as u32);
    }

    /// Sets the rows covered.
    pub fn set_rows(&mut self, rows: RowSet) {
        self.row_set = match rows {
            RowSet::All => 0,
            RowSet::Adapter => 1,
            RowSet::Choose => 2,
        };
    }
}

/// Variants that between them show every file and switch of the kernel, for validation.
#[must_use]
pub fn examples(formats: &[Format]) -> Vec<Variant> {
    let mut list = Vec::new();
    let cpu = |subgroup| DeviceClass::Cpu { subgroup };
    for class in [DeviceClass::Gpu, cpu(None), cpu(Some(4)), cpu(Some(8))] {
        for rows in [1, 2, 3, 4, 5, 8, 16, 64] {
            for &weight in formats {
                let tile = tile(class, rows);
                let lora = Some(if rows == 1 { Format::F32 } else { Format::F16 });
                list.push(Variant { weight, norm: true, bias: true, lora, output: OutputKind::Store, tile });
                list.push(Variant { weight, norm: false, bias: false, lora: None, output: OutputKind::Residual, tile });
                list.push(Variant { weight, norm: true, bias: false, lora, output: OutputKind::SwiGlu, tile });
            }
        }
    }
    list
}

/// Outputs of a workgroup are whole tiles of the packed layout.
const _: () = assert!(TILE == 8);
